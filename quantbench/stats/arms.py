"""Answers about several arms: intervals against the baseline, and which may be the fastest.

An interval's half-width is the root of the squares of two parts, both logarithms: the noise of
turns (`paired`), made valid at any time (`sequence`), and what processes differ by (`processes`),
which no turn changes; a restart changes it, and has no allowance for the look that it is.

All intervals of one call hold together. The noise of each has level ÷ arms (Bonferroni), as its
variance is estimated arm by arm; the processes' part has the studentized maximum modulus, as all
arms share that estimate. Neither needs to know which turns of the baseline arms share.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from quantbench.stats.paired import Contrast, Turns, contrast
from quantbench.stats.processes import Floor, updated
from quantbench.stats.sequence import FIRST, largest, reach

BASELINE = 0  # the baseline's arm number
LEVEL = 0.05  # share of sessions in which any of the intervals leaves out the truth, at any time

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


def intervals(
    baseline: Turns, arms: Mapping[int, Turns], floor: Floor, level: float = LEVEL
) -> dict[int, Interval]:
    """The interval of every arm, simultaneous over arms and valid at any time."""
    contrasts = {arm: contrast(turns, baseline) for arm, turns in arms.items()}
    now = updated(floor, contrasts.values())
    result = {}
    for arm, one in contrasts.items():
        mean, width, part = _difference(now, [one], level, len(arms))
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


def best(
    baseline: Turns,
    arms: Mapping[int, Turns],
    floor: Floor,
    among: Collection[int],
    level: float = LEVEL,
) -> set[int]:
    """The arms of `among` (0 is the baseline) that may be the fastest of them.

    The set contains the fastest with probability 1 - level, at any time (Hsu 1984): an arm leaves
    it where the leader, the arm whose upper end is lowest, is shown to be faster, one-sided and for
    all rivals together. Two arms are compared in the cycles that they share, and through the
    baseline where those are too few.
    """
    turns = {BASELINE: baseline, **arms}
    against = {arm: contrast(arms[arm], baseline) for arm in arms}
    now = updated(floor, against.values())
    two_sided, rivals = 2 * level, max(1, len(among) - 1)

    def upper(arm: int) -> float:
        if arm == BASELINE:
            return 0.0
        apart, width, _ = _difference(now, [against[arm]], two_sided, rivals)
        return apart + width

    def is_slower(arm: int) -> bool:
        parts = [contrast(turns[arm], turns[leader])]
        if parts[0].cycles < FIRST and BASELINE not in (arm, leader):
            parts = [against[arm], against[leader]]
        apart, width, _ = _difference(now, parts, two_sided, rivals)
        return apart > width

    leader = min(sorted(among), key=upper)
    return {arm for arm in among if arm == leader or not is_slower(arm)}


def _difference(
    floor: Floor, parts: list[Contrast], level: float, count: int
) -> tuple[float, float, float]:
    """A log ratio, its half-width where `count` intervals hold together, and the part of the
    half-width that processes cause. Two contrasts with the baseline: the first less the second,
    whose noise counts as independent."""
    found = [part.estimate(floor.deviation) for part in parts]
    noise = [
        reach(part.cycles, part.freedom, level / count) * estimate.error
        for part, estimate in zip(parts, found, strict=True)
    ]
    share = math.sqrt(sum(estimate.process_share for estimate in found))
    of_processes = largest(level, count, floor.freedom) * floor.deviation * share
    mean = found[0].mean - sum(estimate.mean for estimate in found[1:])
    return mean, math.hypot(*noise, of_processes), of_processes
