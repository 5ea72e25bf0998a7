"""What two processes of one arm differ by, for as long as they live.

Cycles of one process are not replicates of a process, however many: where memory lies and which
pages are huge is drawn once, at the start (docs/LOG.md: 1.5 % on this machine). The standard
deviation of the logarithm between processes is a `Floor` under every interval. Two processes an arm
cannot estimate it alone, so it has a prior worth `freedom` degrees of freedom, which the processes
of this session and of earlier ones update (moderated variance: Smyth 2004).

The update is MIVQUE (Rao 1971): the log ratios y of all segments of all arms have

    E(y) = one mean per arm,    Cov(y) = floor² K + V,

K from shared processes (the baseline's are shared by arms), V from the noise of turns. The estimate
is the quadratic form that is best if the prior is right and unbiased in any case. It counts
floor⁴ tr((Cov⁻¹ K)²) degrees of freedom: nearly none while turns are noisier than processes differ.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantbench.stats.paired import Contrast, Turns, contrast

MOST_FREEDOM = 40.0  # a machine changes: the past is not worth more


@dataclass(frozen=True)
class Floor:
    """Standard deviation between processes of the logarithm of seconds, above 0."""

    deviation: float = 0.015
    freedom: float = 4.0  # degrees of freedom behind it


Session = tuple[Turns, Mapping[int, Turns]]  # of the baseline, and of each arm by its number


def floor_of(history: Iterable[Session], prior: Floor | None = None) -> Floor:
    """The prior updated by the processes of earlier sessions."""
    floor = prior or Floor()
    for baseline, arms in history:
        floor = updated(floor, [contrast(turns, baseline) for turns in arms.values()])
    return floor


def updated(floor: Floor, contrasts: Iterable[Contrast]) -> Floor:
    """The floor after the processes of one session, given every arm's contrast."""
    differences: list[NDArray[np.float64]] = []  # of segments of one arm: their means drop out
    shared: list[NDArray[np.float64]] = []  # by which processes enter each difference
    noises: list[NDArray[np.float64]] = []
    columns: dict[tuple[int, int], int] = {}
    rows: list[tuple[list[tuple[int, int]], Contrast]] = []
    for number, one in enumerate(contrasts, start=1):
        if one.freedom < 1 or len(one.segments) < 2:
            continue
        names = [
            name
            for segment in one.segments
            for name in ((number, segment.processes[0]), (0, segment.processes[1]))
        ]
        for name in names:
            columns.setdefault(name, len(columns))
        rows.append((names, one))
    for names, one in rows:
        count = len(one.segments)
        design = np.zeros((count, len(columns)))
        for row in range(count):
            design[row, columns[names[2 * row]]] += 1
            design[row, columns[names[2 * row + 1]]] -= 1
        values = np.array([segment.logs.mean() for segment in one.segments])
        noise = np.array([one.variance / len(segment.logs) for segment in one.segments])
        apart = np.eye(count)[1:] - np.eye(count)[:-1]  # (count - 1, count)
        differences.append(apart @ values)
        shared.append(apart @ design)
        noises.append(apart @ np.diag(noise) @ apart.T)
    if not rows:
        return floor
    y, design = np.concatenate(differences), np.concatenate(shared)
    noise = np.zeros((len(y), len(y)))
    start = 0
    for block in noises:
        noise[start : start + len(block), start : start + len(block)] = block
        start += len(block)
    processes = design @ design.T
    prior = floor.deviation**2
    inverse = np.linalg.inv(prior * processes + noise)
    weights = inverse @ processes @ inverse
    information = float(np.trace(weights @ processes))
    if information <= 0:
        return floor
    estimate = max(0.0, float(y @ weights @ y - np.trace(weights @ noise)) / information)
    freedom = prior**2 * information
    total = floor.freedom + freedom
    variance = (floor.freedom * prior + freedom * estimate) / total
    return Floor(math.sqrt(variance), min(total, MOST_FREEDOM))
