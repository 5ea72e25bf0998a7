"""Answers about several arms: intervals against the baseline, and which may be the fastest.

An interval's error is the noise of turns (`paired`), larger by what looks at a session cost
(`sequence`), and what processes differ by (`processes`), which no turn changes; a restart changes
it, and has no allowance for the look that it is. The variances of both add up, with degrees of
freedom by Satterthwaite 1946. All intervals of one call hold together (Bonferroni): no arm needs to
know which turns of the baseline it shares with others.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from quantbench.stats.paired import Contrast, Turns, contrast
from quantbench.stats.processes import Floor, between, updated
from quantbench.stats.sequence import FIRST, multiple, of_looks

BASELINE = 0  # the baseline's arm number
LEVEL = 0.05  # share of sessions in which any of the intervals leaves out the truth

LARGEST_LOG = 700.0  # math.exp overflows soon after

Verdict = Literal["faster", "slower", "no difference shown"]


@dataclass(frozen=True)
class Interval:
    """Seconds per token of an arm ÷ the baseline's: below 1 where the arm is faster.

    Before FIRST cycles `low` is 0 and `high` infinite.
    """

    ratio: float
    low: float
    high: float
    cycles: int
    processes: int  # of the arm
    noise: float  # standard deviation of the log ratio of one cycle
    floor: float  # the part of the half-width that processes cause, as a logarithm
    assumed: float = 1.0  # share of that part's degrees of freedom that no session measured

    @property
    def half_width(self) -> float:
        """Relative: 0.02 for 1.00 (0.98 to 1.02)."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf

    @property
    def nearer(self) -> float:
        """The end nearer to 1, the least difference that is shown; 1 where none is."""
        return min(max(1.0, self.low), self.high)

    @property
    def verdict(self) -> Verdict:
        if self.low <= 1 <= self.high:
            return "no difference shown"
        return "faster" if self.high < 1 else "slower"


def ratios(
    seconds: ArrayLike, process: ArrayLike | None = None, floor: Floor | None = None
) -> list[Interval]:
    """Seconds of each arm from 1 on ÷ arm 0's in the long run, with intervals that hold at 95 %
    for all arms together.

    seconds: float (cycles, arms), in the order in which cycles ran; NaN where a turn is missing,
    and that arm's cycle does not count. process: int (cycles,), which process of each arm a cycle
    belongs to, in any order; None: one process of each. floor: what processes differ by; None: what
    is assumed, 1.6 % with three degrees of freedom.

    With one arm the list is empty. An arm with fewer than FIRST cycles beside arm 0 has `low` 0 and
    `high` infinite, without any its `ratio` is NaN. With one process the interval stands on the
    floor that is assumed alone, and turns without any scatter leave nothing but the floor. Raises
    ValueError for other shapes, and for seconds that are not above 0.
    """
    table = np.asarray(seconds, float)
    if table.ndim != 2 or table.shape[1] < 1:
        raise ValueError(f"seconds is (cycles, arms); given: {table.shape}")
    which = np.zeros(len(table), int) if process is None else np.asarray(process)
    if which.shape != (len(table),):
        raise ValueError(f"process has a number for each of {len(table)} cycles; given: "
                         f"{which.shape}")  # fmt: skip
    cycles = np.arange(len(table))
    there = ~np.isnan(table)
    turns = [Turns(cycles[is_in], which[is_in], column[is_in])
             for column, is_in in zip(table.T, there.T, strict=True)]  # fmt: skip
    found = intervals(turns[0], dict(enumerate(turns[1:], 1)), floor or Floor())
    return [one if one.cycles else dataclasses.replace(one, ratio=math.nan)
            for one in found.values()]  # fmt: skip


def intervals(
    baseline: Turns,
    arms: Mapping[int, Turns],
    floor: Floor,
    level: float = LEVEL,
    spent: float | None = None,
) -> dict[int, Interval]:
    """The interval of every arm, simultaneous over arms. spent: how much of the session is over,
    as `sequence.of_looks` takes it."""
    contrasts = {arm: contrast(turns, baseline) for arm, turns in arms.items()}
    now = updated(floor, contrasts.values())
    result = {}
    for arm, one in contrasts.items():
        mean, width, part = _difference(now, [one], level / len(arms), spent)
        result[arm] = Interval(
            ratio=math.exp(mean),
            low=math.exp(mean - width),
            high=math.exp(mean + width) if mean + width < LARGEST_LOG else math.inf,
            cycles=one.cycles,
            processes=len({segment.process for segment in one.segments}),
            noise=one.noise,
            floor=part,
            assumed=now.assumed,
        )
    return result


def evidence(baseline: Turns, arms: Mapping[int, Turns], floor: Floor) -> tuple[float, float]:
    """What a session alone says of processes: their variance, which may be negative, and its
    degrees of freedom, as `processes.pooled` takes them."""
    contrasts = [contrast(turns, baseline) for turns in arms.values()]
    return between(updated(floor, contrasts).deviation ** 2, contrasts)


def best(
    baseline: Turns,
    arms: Mapping[int, Turns],
    floor: Floor,
    among: Collection[int],
    level: float = LEVEL,
    spent: float | None = None,
) -> set[int]:
    """The arms of `among` (0 is the baseline) that may be the fastest of them.

    The set contains the fastest with probability 1 - level (Hsu 1984): an arm leaves it where the
    leader, the arm whose upper end is lowest, is shown to be faster, one-sided and for all rivals
    together. Two arms are compared in the cycles that they share, and through the baseline where
    those are too few.
    """
    turns = {BASELINE: baseline, **arms}
    against = {arm: contrast(arms[arm], baseline) for arm in arms}
    now = updated(floor, against.values())
    each = 2 * level / max(1, len(among) - 1)  # two-sided, of each rival

    def upper(arm: int) -> float:
        if arm == BASELINE:
            return 0.0
        apart, width, _ = _difference(now, [against[arm]], each, spent)
        return apart + width

    def is_slower(arm: int) -> bool:
        parts = [contrast(turns[arm], turns[leader])]
        if parts[0].cycles < FIRST and BASELINE not in (arm, leader):
            parts = [against[arm], against[leader]]
        apart, width, _ = _difference(now, parts, each, spent)
        return apart > width

    leader = min(sorted(among), key=upper)
    return {arm for arm in among if arm == leader or not is_slower(arm)}


def _difference(
    floor: Floor, parts: list[Contrast], level: float, spent: float | None
) -> tuple[float, float, float]:
    """A log ratio, its half-width, and the part of the half-width that processes cause. Two
    contrasts with the baseline: the first less the second, whose noise counts as independent."""
    found = [part.estimate(floor.deviation) for part in parts]
    mean = found[0].mean - sum(estimate.mean for estimate in found[1:])
    of_processes = floor.deviation**2 * sum(estimate.process_share for estimate in found)
    if any(part.cycles < FIRST or not part.freedom for part in parts):
        return mean, math.inf, multiple(level, floor.freedom) * math.sqrt(of_processes)
    noise = [(of_looks(spent) * estimate.error) ** 2 for estimate in found]
    variances = np.array([*noise, of_processes])
    freedoms = np.array([*(part.freedom for part in parts), floor.freedom])
    total = float(variances.sum())
    wide = multiple(level, total**2 / float((variances**2 / freedoms).sum()))
    return mean, wide * math.sqrt(total), wide * math.sqrt(of_processes)
