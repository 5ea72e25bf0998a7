"""Answers about several arms: intervals against the baseline, the fastest, and when to stop.

An interval's half-width has two parts, both as logarithms and joined by the root of their squares:
the noise of turns (`paired`), made valid at any time (`sequence`), and what processes differ by
(`processes`), which does not change between looks and so needs no further allowance for them.

All intervals of one call hold together: each has level ÷ arms (Bonferroni). Dunnett's values would
be 1 to 3 % narrower, as arms share the baseline's noise, but not where groups of arms share only a
part of its turns.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from quantbench.stats.paired import Contrast, Turns, contrast
from quantbench.stats.processes import Floor, updated
from quantbench.stats.sequence import FIRST, normal, reach, student

BASELINE = 0  # the baseline's arm number
LEVEL = 0.05  # share of sessions in which any of the intervals leaves out the truth, at any time
PRECISION = 0.03  # relative half-width that answers the question about a ratio near 1
OF_THE_EFFECT = 0.1  # half-width ÷ effect that answers it far from 1, both as logarithms
ALIKE = 0.05  # arms that differ by less are one answer
MOSTLY_FLOOR = 0.9  # share of the half-width; above, endless turns would narrow it by a tenth
RESTARTED = 1.6  # effective processes: the second one weighs at least a quarter

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
    effective_processes: float  # of the arm: 2 for two that have equal weight

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

    @property
    def settled(self) -> bool:
        """Whether the interval is narrow enough, or more turns would hardly narrow it."""
        effect = abs(math.log(self.nearer))
        width = math.log1p(self.half_width)
        return self.exhausted or width <= max(math.log1p(PRECISION), OF_THE_EFFECT * effect)

    @property
    def exhausted(self) -> bool:
        """Whether endless turns of these processes, at least two, would hardly narrow it."""
        restarted = self.effective_processes >= RESTARTED
        return restarted and self.floor >= MOSTLY_FLOOR * math.log1p(self.half_width)


def intervals(
    baseline: Turns, arms: Mapping[int, Turns], floor: Floor, level: float = LEVEL
) -> dict[int, Interval]:
    """The interval of every arm, simultaneous over arms and valid at any time."""
    contrasts = {arm: contrast(turns, baseline) for arm, turns in arms.items()}
    now = updated(floor, contrasts.values())
    result = {}
    for arm, one in contrasts.items():
        share = level / len(arms)
        found = one.estimate(now.deviation)
        part = _floor_part(now, found.process_share, share)
        width = math.hypot(reach(one.cycles, one.freedom, share) * found.error, part)
        result[arm] = Interval(
            ratio=math.exp(found.mean),
            low=math.exp(found.mean - width),
            high=_exp(found.mean + width),
            cycles=one.cycles,
            processes=len({segment.process for segment in one.segments}),
            noise=one.noise,
            floor=part,
            effective_processes=found.effective_processes,
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

    The set contains the fastest with probability 1 - level, at any time: an arm leaves it where it
    is shown to be slower than the leader, one-sided, each at level ÷ (arms - 1) (Hsu 1984). The
    leader is the arm whose upper end is lowest. Two arms are compared in the cycles that they share,
    and through the baseline where they share too few.
    """
    turns = {BASELINE: baseline, **arms}
    against = {arm: contrast(arms[arm], baseline) for arm in arms}
    now = updated(floor, against.values())
    share = 2 * level / max(1, len(among) - 1)  # of a two-sided interval: one side of it is used

    def upper(arm: int) -> float:
        return sum(_difference(now, [against[arm]], share)) if arm != BASELINE else 0.0

    leader = min(sorted(among), key=upper)
    slower = set()
    for arm in set(among) - {leader}:
        direct = contrast(turns[arm], turns[leader])
        if direct.cycles >= FIRST or BASELINE in (arm, leader):
            apart, width = _difference(now, [direct], share)
        else:
            apart, width = _difference(now, [against[arm], against[leader]], share)
        if apart > width:
            slower.add(arm)
    return set(among) - slower


def whole_run(
    decode: Interval,
    prompt: Interval | None,
    baseline_decode_seconds: float,
    baseline_prompt_seconds: float,
    prompt_tokens: int,
    new_tokens: int,
) -> Interval:
    """The ratio of a whole run: a prompt of P tokens, then N new ones, of which the prompt gives
    the first. Without a prompt's interval, the ratio of decoding.

    baseline_decode_seconds, baseline_prompt_seconds: the baseline's per token. The ratio is the mean
    of both ratios weighted by the baseline's time. Its ends are the same mean of their ends, as if
    both were off in the same direction, so it holds where both intervals do, and for normal errors
    of any correlation it is at least as wide as one of the same level.
    """
    if prompt is None:
        return decode
    decoding = baseline_decode_seconds * max(0, new_tokens - 1)
    whole = decoding + baseline_prompt_seconds * prompt_tokens
    if not whole > 0:
        raise ValueError(
            f"a run of {prompt_tokens} prompt and {new_tokens} new tokens takes no time; "
            "at least one of the prompt's and seconds above 0 are needed"
        )
    share = decoding / whole

    def mean(of_decode: float, of_prompt: float) -> float:
        parts = ((share, of_decode), (1 - share, of_prompt))
        return sum(weight * value for weight, value in parts if weight > 0)

    return Interval(
        ratio=mean(decode.ratio, prompt.ratio),
        low=mean(decode.low, prompt.low),
        high=mean(decode.high, prompt.high),
        cycles=min(decode.cycles, prompt.cycles),
        processes=min(decode.processes, prompt.processes),
        noise=mean(decode.noise, prompt.noise),
        floor=mean(decode.floor, prompt.floor),
        effective_processes=min(decode.effective_processes, prompt.effective_processes),
    )


def enough(
    found: Mapping[int, Interval], fastest: Collection[int], excluded: Collection[int] = ()
) -> tuple[bool, set[int]]:
    """Whether the answer is stable, and the arms that still need turns.

    fastest: what `best` returned. excluded: arms that a limit rules out; they need no turns. An arm
    is open until its interval is settled. An arm that may be the fastest, but is more than ALIKE
    slower than the fastest estimate, is open until turns cannot narrow it: it has to be shown slower
    or come closer. The baseline has turns in every cycle and is never open.
    """
    still_open = {arm for arm, one in found.items() if arm not in excluded and not one.settled}
    rivals = {arm: found[arm] for arm in fastest if arm in found and arm not in excluded}
    ratios = [one.ratio for one in rivals.values()] + ([1.0] if BASELINE in fastest else [])
    for arm, one in rivals.items():
        if one.ratio > (1 + ALIKE) * min(ratios) and not one.exhausted:
            still_open.add(arm)
    return not still_open, still_open


def _difference(floor: Floor, parts: list[Contrast], level: float) -> tuple[float, float]:
    """A log ratio and its half-width; of two contrasts with the baseline, the first less the
    second, whose noise counts as independent."""
    found = [part.estimate(floor.deviation) for part in parts]
    noise = [
        reach(part.cycles, part.freedom, level) * estimate.error
        for part, estimate in zip(parts, found, strict=True)
    ]
    share = sum(estimate.process_share for estimate in found)
    mean = found[0].mean - sum(estimate.mean for estimate in found[1:])
    return mean, math.hypot(*noise, _floor_part(floor, share, level))


def _floor_part(floor: Floor, process_share: float, level: float) -> float:
    multiple = student(normal(level), floor.freedom)
    return multiple * floor.deviation * math.sqrt(process_share)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
