"""Which arm to use: at most three answers, and what each limit ruled out.

    answer = recommend(rows, Limits(max_memory=8_000_000_000))
    print(answer.text())

**Who may be recommended.** Arms that were measured here to the end and stay within every limit.
Memory is the peak while generating, which is what the log calls peak_mem; weights and KV cache
where a device has no such figure. An arm keeps quality if the upper end of its perplexity ratio's
interval is within the limit. One whose interval contains the limit is "not shown to keep" it, and
is not recommended either. The baseline keeps its own quality.

**What is recommended.** The fastest; the smallest; and the best compromise, the arm with the
highest speed-up ÷ memory ÷ perplexity^10: a tenth more speed, a tenth less memory and one percent
less perplexity count alike. No other arm is as good as it in all three. Arms that cannot be told
from the fastest (Hsu's comparisons with the best) are named, and of them the one with the least
memory is taken, then the one with the best quality.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quantbench.compare.figures.choices import (
    Choice,
    Limit,
    Limits,
    Recommendation,
    RuledOut,
    What,
)
from quantbench.compare.figures.interval import Interval, SpeedUp
from quantbench.compare.figures.row import Row
from quantbench.log import shell
from quantbench.log.config import RunConfig, argv
from quantbench.log.options import parse

PERPLEXITY_WEIGHT = 10  # in the compromise: 1 % of perplexity counts as 10 % of speed or memory
SAME_MEMORY = 1.01  # peaks of equal runs differ by less
PROGRAM = ("quantbench", "generate")
MEASURING = ("max_new_tokens", "write_result")  # options that a comparison sets for its own sake


BestOf = Callable[[Sequence[int]], set[int]]  # of these rows, those that may be the fastest


@dataclass(frozen=True)
class _Arm:
    """A measured row's three figures, and how far it is beyond each limit (logarithms)."""

    number: int
    row: Row
    speed: SpeedUp
    memory: int
    perplexity: Interval
    beyond: dict[Limit, float] = field(default_factory=dict)

    def merit(self, end: Literal["value", "low", "high"] = "value") -> float:
        """How good a compromise the arm is: the logarithm of speed ÷ memory, less what it loses in
        perplexity. end: "low" and "high" take the worse and the better ends of its intervals."""
        speed, ratio = self.speed.value, self.perplexity.value
        if end == "low":
            speed, ratio = self.speed.low, self.perplexity.high or ratio
        elif end == "high":
            speed, ratio = self.speed.high, self.perplexity.low or ratio
        logs = math.log(speed), math.log(self.memory), math.log(ratio)
        return logs[0] - logs[1] - PERPLEXITY_WEIGHT * logs[2]


def recommend(rows: Sequence[Row], limits: Limits, best_of: BestOf | None = None) -> Recommendation:
    """The answer for these rows, the baseline's first.

    best_of: which of the rows with these numbers cannot be told from the fastest of them (Hsu).
    Without it, rows' own `can_be_best` counts where no faster arm was ruled out, else, and where
    there are only ranges, whether the ends overlap those of the fastest.
    """
    quality_measured = any(row.perplexity_ratio is not None for row in rows[1:])
    measured = [
        arm
        for number, row in enumerate(rows)
        if (arm := _measured(number, row, limits, quality_measured)) is not None
    ]
    failed = [row.arm for row in rows if row.verdict == "failed"]
    known = {arm.row.arm for arm in measured} | set(failed)
    out: dict[Limit, list[_Arm]] = {}
    for arm in measured:
        for limit in arm.beyond:
            out.setdefault(limit, []).append(arm)
    within = [arm for arm in measured if not arm.beyond]
    nothing = None
    if not rows or not measured or rows[0].verdict == "failed":
        within, nothing = [], "Nothing to recommend: no arm was measured beside a baseline"
    elif not within:
        nothing = _relax(measured, limits)
    return Recommendation(
        limits=limits,
        choices=_choices(within, best_of) if within else [],
        ruled_out=[_ruled_out(limit, arms, limits) for limit, arms in out.items()],
        failed=failed,
        unmeasured=[row.arm for row in rows if row.arm not in known],
        quality_measured=quality_measured,
        nothing=nothing,
        note=_note(rows) if quality_measured else None,
    )


def command(arguments: Sequence[str]) -> str:
    """The command that runs generate.py as the arm did; options at their defaults are left out."""
    defaults = {name: getattr(RunConfig(), name) for name in MEASURING}
    config = dataclasses.replace(parse(arguments), **defaults)
    return shell.join([*PROGRAM, *argv(config, said=True, always=("checkpoint_path",))])


def _note(rows: Sequence[Row]) -> str | None:
    ratios = [row.perplexity_ratio for row in rows[1:] if row.perplexity_ratio is not None]
    if any(ratio.high is not None for ratio in ratios):
        return None
    return "Quality was measured on too little text for an interval: give more --tokens"


def _ruled_out(limit: Limit, arms: Sequence[_Arm], limits: Limits) -> RuledOut:
    unclear: Sequence[_Arm] = []
    if limit == "max_perplexity_increase":
        unclear = [arm for arm in arms if (arm.perplexity.low or 0.0) <= limits.most]
    return RuledOut(limit, [arm.row.arm for arm in arms], [arm.row.arm for arm in unclear])


def _measured(number: int, row: Row, limits: Limits, quality: bool) -> _Arm | None:
    """The row as an arm to choose from; None where it failed or has no speed-up."""
    is_baseline, memory = row.verdict == "baseline", memory_bytes(row)
    if row.verdict == "failed" or row.tok_s is None or memory is None:
        return None
    speed = SpeedUp(1.0, 1.0, 1.0) if is_baseline else row.speed_up
    if speed is None:
        return None
    ratio = Interval(1.0, 1.0, 1.0) if is_baseline or not quality else row.perplexity_ratio
    beyond: dict[Limit, float] = {}
    if limits.max_memory is not None and memory > limits.max_memory:
        beyond["max_memory"] = math.log(memory / limits.max_memory)
    if limits.min_tok_s is not None and row.tok_s < limits.min_tok_s:
        beyond["min_tok_s"] = math.log(limits.min_tok_s / row.tok_s)
    highest = math.inf if ratio is None or ratio.high is None else ratio.high
    if highest > limits.most:
        beyond["max_perplexity_increase"] = PERPLEXITY_WEIGHT * math.log(highest / limits.most)
    return _Arm(number, row, speed, memory, ratio or Interval(1.0), beyond)


def memory_bytes(row: Row) -> int | None:
    """The peak while generating, of the kind that is logged; weights and cache without a peak."""
    peaks = (row.peak_memory_bytes or {}).get("generate")
    if peaks:
        return next(iter(peaks.values()))
    if row.weight_bytes is None:
        return None
    return row.weight_bytes + (row.kv_cache_bytes or 0)


def _choices(arms: Sequence[_Arm], best_of: BestOf | None) -> list[Choice]:
    tied = _fastest(arms, best_of)
    fastest = _preferred(tied, lambda arm: arm.perplexity.value)
    smallest = _preferred(arms, lambda arm: -arm.speed.value)
    compromise = max(_front(arms), key=lambda arm: arm.merit())
    picked: dict[int, list[What]] = {}
    answers: dict[What, _Arm] = {
        "fastest": fastest,
        "smallest": smallest,
        "compromise": compromise,
    }
    for what, arm in answers.items():
        picked.setdefault(arm.number, []).append(what)
    as_good = [
        arm.row.arm
        for arm in _front(arms)
        if arm is not compromise and arm.merit("high") >= compromise.merit("low")
    ]
    by_number = {arm.number: arm for arm in arms}
    return [
        _choice(
            by_number[number],
            what,
            [arm.row.arm for arm in tied] if "fastest" in what else [],
            as_good if what == ["compromise"] else [],
        )
        for number, what in picked.items()
    ]


def _choice(arm: _Arm, what: list[What], tied: list[str], as_good: list[str]) -> Choice:
    row = arm.row
    return Choice(
        what=what,
        arm=row.arm,
        speed_up=row.speed_up,
        memory_bytes=arm.memory,
        perplexity=row.perplexity,
        perplexity_ratio=row.perplexity_ratio,
        quality_model=row.quality_model,
        tied=tied if len(tied) > 1 else [],
        as_good=as_good,
        command=command(row.argv),
    )


def _fastest(arms: Sequence[_Arm], best_of: BestOf | None) -> list[_Arm]:
    """The arms that may be the fastest of them."""
    fastest = max(arms, key=lambda arm: arm.speed.value)
    ranges = any(arm.row.speed_up and arm.row.speed_up.confidence is None for arm in arms)
    if best_of is not None and not ranges:
        numbers = best_of([arm.number for arm in arms]) | {fastest.number}
        return [arm for arm in arms if arm.number in numbers]
    if fastest.row.can_be_best and not ranges:
        return [arm for arm in arms if arm.row.can_be_best or arm is fastest]
    lowest = fastest.speed.low
    return [arm for arm in arms if arm.speed.high >= lowest]


def _preferred(arms: Sequence[_Arm], then: Callable[[_Arm], float]) -> _Arm:
    """The arm of the least memory; of those that take as little, the one for which `then` is
    least, and the fastest of equals."""
    least = min(arm.memory for arm in arms) * SAME_MEMORY
    return min(
        (arm for arm in arms if arm.memory <= least),
        key=lambda arm: (then(arm), -arm.speed.value, arm.perplexity.value),
    )


def _front(arms: Sequence[_Arm]) -> list[_Arm]:
    """The Pareto front: arms that no other arm matches in speed, memory and quality while being
    better in one of them."""
    points = [(-arm.speed.value, arm.memory, arm.perplexity.value) for arm in arms]

    def beaten(point: tuple[float, ...]) -> bool:
        return any(
            rival != point and all(a <= b for a, b in zip(rival, point, strict=True))
            for rival in points
        )

    return [arm for arm, point in zip(arms, points, strict=True) if not beaten(point)]


def _relax(arms: Sequence[_Arm], limits: Limits) -> str:
    """Which limit to relax, and to what, so that the nearest arm satisfies all of them; and how far
    any arm gets, where a limit is beyond all of them."""
    nearest = min(arms, key=lambda arm: sum(arm.beyond.values()))
    ratio = nearest.perplexity.high or 1.0
    options: dict[Limit, str] = {
        "max_memory": f"--max_memory {_rounded_up(nearest.memory)}",
        "min_tok_s": f"--min_tok_s {_rounded_down(nearest.row.tok_s or 0.0):g}",
        "max_perplexity_increase": (
            f"--max_perplexity_increase {math.ceil(1000 * (ratio - 1) - 1e-9) / 10:g}%"
        ),
    }
    needed = " and ".join(options[limit] for limit in nearest.beyond)
    said = f"No arm satisfies all limits; the nearest, {nearest.row.arm}, needs {needed}"
    fastest = max(arms, key=lambda arm: arm.row.tok_s or 0.0)
    if fastest is not nearest and "min_tok_s" in fastest.beyond:
        said += f"; the fastest, {fastest.row.arm}, makes {fastest.row.tok_s:.1f} tok/s"
    smallest = min(arms, key=lambda arm: arm.memory)
    if smallest is not nearest and "max_memory" in smallest.beyond:
        said += f"; the smallest, {smallest.row.arm}, takes {_rounded_up(smallest.memory)}"
    return said


def _rounded_up(count: int) -> str:
    """Bytes as --max_memory takes them, not fewer."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{math.ceil(100 * count / unit) / 100:g}{name}"


def _rounded_down(value: float) -> float:
    """To three digits, and not above it."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return math.floor(value / unit) * unit
