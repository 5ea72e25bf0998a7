"""The four metrics of a deployment report, and how a target compares with a baseline in them.

    comparison = compare(baseline, target)  # a Side each: one table of latencies and its folder
    comparison.metrics[0].ratio             # 0.82 (0.81 to 0.83): below 1 the target is better

1. Time to first token at batch size 1, ms.
2. The largest prompt throughput over batch sizes above 1, input tokens/s.
3. Single-user throughput, batch size 1: of the prompt, and of whole requests.
4. Multi-user throughput of whole requests, the largest over batch sizes above 1.

A whole request takes prefill and all decoding steps. Its tokens are counted twice: output alone,
and input + output. A throughput is all tokens ÷ all seconds of a cell's runs.

Ratio_Latency is target ÷ baseline, Ratio_Throughput is baseline ÷ target: both are the target's
seconds for the same work ÷ the baseline's. An interval is that of quantbench.stats over the cycles
that both sides share, so there is none, and no verdict, for runs that were not taken in turns.
Those of a table hold together (Bonferroni over the four ratios that differ).

The largest throughput is chosen among batch sizes, which is paid for: the ratio of every batch size
has an interval, all together at the level of one. With b and t the best batch sizes of baseline and
target, largest(baseline) ÷ largest(target) is at least the ratio at t, as the baseline's largest is
no less than what it has there, and at most the ratio at b.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quantbench import stats
from quantbench.answer.compared import CONFIDENCE
from quantbench.answer.latency import Cell, LatencySample, Table
from quantbench.stats import Floor, Turns

Counted = Literal["input", "output", "input + output"]
Verdict = Literal["better", "worse", "no difference shown", "not in turns", "not measured"]


@dataclass(frozen=True)
class Side:
    """The baseline or the target: a table of one results folder."""

    folder: str
    table: Table
    decode_length: int  # tokens
    runs: int  # of each cell, by the plan


@dataclass(frozen=True)
class Ratio:
    """Seconds of the target ÷ the baseline's, for the same work."""

    name: Literal["Ratio_Latency", "Ratio_Throughput"]
    value: float
    low: float | None = None  # None: too few cycles that both sides share
    high: float | None = None
    in_turns: bool = True

    @property
    def verdict(self) -> Verdict:
        if not self.in_turns:
            return "not in turns"
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return "no difference shown"
        return "better" if self.high < 1 else "worse"

    @property
    def shown(self) -> list[str]:
        """The value and the interval's ends, with three decimals, or more where an end would read
        as 1 and is not."""
        numbers = [n for n in (self.value, self.low, self.high) if n is not None]
        decimals = 3
        while decimals < 12 and any(
            n != 1 and float(f"{n:.{decimals}f}") == 1 for n in numbers[1:]
        ):
            decimals += 1
        return [f"{n:.{decimals}f}" for n in numbers]

    @property
    def interval(self) -> str:
        """0.81 to 0.83, or why there is none."""
        if not self.in_turns:
            return "not taken in turns"
        return " to ".join(self.shown[1:]) or "too few cycles for an interval"


@dataclass(frozen=True)
class Value:
    """A metric of the baseline or of the target alone."""

    value: float  # in the metric's unit
    batch_size: int
    runs: int


@dataclass(frozen=True)
class Metric:
    """One line of the table. Where a side could not be measured, there is a reason and no ratio."""

    name: str
    unit: Literal["ms", "tokens/s"]
    counted: Counted | None  # which tokens; None for a latency
    baseline: Value | None
    target: Value | None
    ratio: Ratio | None
    reason: str | None = None

    @property
    def verdict(self) -> Verdict:
        return self.ratio.verdict if self.ratio else "not measured"

    @property
    def named(self) -> str:
        return f"{self.name} ({self.counted} tokens)" if self.counted else self.name


@dataclass(frozen=True)
class Comparison:
    """All metrics of two tables of one sequence length."""

    baseline: Side
    target: Side
    metrics: list[Metric]

    @property
    def missing(self) -> dict[str, list[Metric]]:
        """Metrics that were not measured on both sides, by the reason."""
        reasons: dict[str, list[Metric]] = {}
        for metric in self.metrics:
            if metric.reason:
                reasons.setdefault(metric.reason, []).append(metric)
        return reasons


Seconds = Callable[[LatencySample], float]


@dataclass(frozen=True)
class _Kind:
    """How a metric is computed."""

    name: str
    counted: Counted | None
    seconds: Seconds
    several_users: bool  # the best cell above batch size 1; else batch size 1


def _prefill(sample: LatencySample) -> float:
    return sample.prefill_seconds


def _request(sample: LatencySample) -> float:
    return sample.prefill_seconds + sample.decode_seconds


KINDS = (
    _Kind("time to first token", None, _prefill, False),
    _Kind("maximum prompt throughput", "input", _prefill, True),
    _Kind("single-user prompt throughput", "input", _prefill, False),
    _Kind("single-user throughput", "output", _request, False),
    _Kind("single-user throughput", "input + output", _request, False),
    _Kind("multi-user maximum throughput", "output", _request, True),
    _Kind("multi-user maximum throughput", "input + output", _request, True),
)
DIFFERENT = len({(kind.seconds, kind.several_users) for kind in KINDS})  # ratios


def compare(baseline: Side, target: Side) -> Comparison:
    """Every metric. Both sides have the same sequence length and decode length: ValueError else."""
    works = [(side.table.sequence_length, side.decode_length) for side in (baseline, target)]
    if works[0] != works[1]:
        raise ValueError(f"{works[0]} and {works[1]} tokens: not the same work")
    return Comparison(baseline, target, [_metric(kind, baseline, target) for kind in KINDS])


def _metric(kind: _Kind, baseline: Side, target: Side) -> Metric:
    sides = {"baseline": baseline, "target": target}
    cells = {name: _cells(kind, side) for name, side in sides.items()}
    reasons = [f"{name}: {of}" for name, of in cells.items() if isinstance(of, str)]
    best = {
        name: max(of, key=lambda cell: cell.batch_size / _mean(kind, cell))
        for name, of in cells.items()
        if not isinstance(of, str)
    }
    values = {name: _value(kind, cell, sides[name]) for name, cell in best.items()}
    ratio = None
    if len(best) == 2:
        ratio = _ratio(kind, best["baseline"], best["target"], baseline, target)
    return Metric(
        name=kind.name,
        unit="tokens/s" if kind.counted else "ms",
        counted=kind.counted,
        baseline=values.get("baseline"),
        target=values.get("target"),
        ratio=ratio,
        reason="; ".join(reasons) or None,
    )


def _cells(kind: _Kind, side: Side) -> list[Cell] | str:
    """The measured cells that the metric may be of, or why there is none."""
    fitting = [c for c in side.table.cells if (c.batch_size > 1) == kind.several_users]
    what = "above 1" if kind.several_users else "1"
    if not fitting:
        return f"no batch size {what} in the plan"
    reasons = dict.fromkeys(cell.reason for cell in fitting if cell.reason)
    measured = [cell for cell in fitting if cell.counted]
    return measured or "; ".join(reasons) or f"no run at batch size {what}"


def _value(kind: _Kind, cell: Cell, side: Side) -> Value:
    seconds = _mean(kind, cell)
    prompt, output = side.table.sequence_length, side.decode_length
    tokens = {"input": prompt, "output": output, "input + output": prompt + output}
    value = 1e3 * seconds
    if kind.counted is not None:
        value = cell.batch_size * tokens[kind.counted] / seconds
    return Value(value, cell.batch_size, len(cell.counted))


def _mean(kind: _Kind, cell: Cell) -> float:
    return float(np.mean([kind.seconds(sample) for sample in cell.counted]))


def _ratio(kind: _Kind, before: Cell, after: Cell, baseline: Side, target: Side) -> Ratio:
    """before, after: the best cells of baseline and target."""
    seconds = [_mean(kind, cell) / cell.batch_size for cell in (after, before)]
    name: Literal["Ratio_Latency", "Ratio_Throughput"]
    name = "Ratio_Throughput" if kind.counted else "Ratio_Latency"
    value = seconds[0] / seconds[1]
    pairs = {
        cell.batch_size: (cell, other)
        for cell in baseline.table.cells
        for other in target.table.cells
        if cell.batch_size == other.batch_size and (cell.batch_size > 1) == kind.several_users
        if cell.counted and other.counted
    }
    same = baseline.folder == target.folder
    if not (same and all(_shared(*pairs.get(c.batch_size, (c, None))) for c in (before, after))):
        return Ratio(name, value, in_turns=False)
    level = (1 - CONFIDENCE) / DIFFERENT / len(pairs)

    def interval(size: int) -> stats.Interval:
        turns = [_turns(kind, cell) for cell in pairs[size]]
        return stats.intervals(turns[0], {1: turns[1]}, Floor(), level)[1]

    low, high = interval(after.batch_size), interval(before.batch_size)
    if not (np.isfinite(low.half_width) and np.isfinite(high.half_width)):
        return Ratio(name, value)
    # The value is a quotient of means, which one late run moves; the interval is of the mean log.
    return Ratio(name, value, min(low.low, value), max(high.high, value))


def _shared(baseline: Cell, target: Cell | None) -> bool:
    """Whether most runs of the target were taken in cycles with the baseline's."""
    if target is None:
        return False
    cycles = {sample.cycle for sample in baseline.counted} - {None}
    return sum(sample.cycle in cycles for sample in target.counted) * 2 > len(target.counted)


def _turns(kind: _Kind, cell: Cell) -> Turns:
    samples = cell.counted
    return Turns(
        np.array([sample.cycle for sample in samples]),
        np.array([sample.process for sample in samples]),
        np.array([kind.seconds(sample) for sample in samples]),
    )
