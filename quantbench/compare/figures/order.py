"""Whether recorded runs differ by when they were taken: their order in the log, and a drift.

Runs that were not taken in turns have an order that may explain what their settings seem to: a page
cache that warms, a processor that heats. Nothing in the figures can tell the two apart where all
runs of one group come before all of another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from quantbench.compare.figures.families import FALSE_VERDICTS, Interval

UNLIKELY = 0.05  # level at which a trend is said


@dataclass(frozen=True)
class Placed:
    """Runs of one group: their places in the log, from 1, and their seconds."""

    places: list[int]
    seconds: list[float]


def apart(first: Placed, second: Placed) -> str | None:
    """ "before" where all runs of the first come before those of the second; "after", or None."""
    if max(first.places) < min(second.places):
        return "before"
    return "after" if min(first.places) > max(second.places) else None


def falls(group: Placed) -> bool:
    """Whether each of three or more runs took less time than the one before it."""
    ordered = [seconds for _, seconds in sorted(zip(group.places, group.seconds, strict=True))]
    return len(ordered) > 2 and all(a > b for a, b in zip(ordered, ordered[1:], strict=False))


def trend(groups: Sequence[Placed]) -> float | None:
    """Kendall's tau of time and order within groups, all together; None where chance explains it.

    S and its variance are summed over the groups (Hirsch and Slack 1984 do so over seasons); the
    normal distribution with a correction for continuity.
    """
    total, variance, pairs = 0, 0.0, 0
    for group in groups:
        ordered = [seconds for _, seconds in sorted(zip(group.places, group.seconds, strict=True))]
        n = len(ordered)
        total += sum(
            int(np.sign(ordered[j] - ordered[i])) for i in range(n) for j in range(i + 1, n)
        )
        variance += n * (n - 1) * (2 * n + 5) / 18
        pairs += n * (n - 1) // 2
    if not variance:
        return None
    z = max(0.0, abs(total) - 1) / math.sqrt(variance)
    return total / pairs if 2 * float(special.ndtr(-z)) < UNLIKELY else None


def without_drift(first: Placed, others: Sequence[Placed], chosen: int) -> Interval | None:
    """The ratio of others[chosen] to the first with a drift taken out that is linear in the run's
    place; None where too few runs are left to estimate it.

    Least squares of the logarithm of seconds on the groups and the place.
    """
    groups = [first, *others]
    places = np.concatenate([group.places for group in groups]).astype(float)
    values = np.log(np.concatenate([group.seconds for group in groups]))
    sizes = [len(group.places) for group in groups]
    member = np.repeat(np.eye(len(groups)), sizes, axis=0)
    design = np.column_stack([member, places - places.mean()])
    freedom = len(values) - design.shape[1]
    if freedom < 3 or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    inverse = np.linalg.inv(design.T @ design)
    estimates = inverse @ design.T @ values
    variance = float(((values - design @ estimates) ** 2).sum()) / freedom
    contrast = np.zeros(design.shape[1])
    contrast[0], contrast[chosen + 1] = -1, 1
    centre = float(contrast @ estimates)
    error = math.sqrt(variance * float(contrast @ inverse @ contrast))
    reach = -float(special.stdtrit(freedom, FALSE_VERDICTS / 2)) * error
    ends = math.exp(centre - reach), math.exp(min(centre + reach, 700.0))
    runs = len(others[chosen].places)
    return Interval(chosen + 1, math.exp(centre), *ends, 1 - FALSE_VERDICTS, runs, freedom)
