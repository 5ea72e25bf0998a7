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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quantbench import stats
from quantbench.compare.intervals import CONFIDENCE
from quantbench.latency.answer import Cell, Table
from quantbench.report.interval import Interval

Counted = Literal["input", "output", "input + output"]
Verdict = Literal["better", "worse", "no difference shown", "not in turns", "not measured"]
Kind = tuple[str, Counted | None, str, bool]
# Name, tokens counted (of a latency none), the seconds of a LatencySample, and whether of several
# users: the best cell above batch size 1, else batch size 1.
KINDS: tuple[Kind, ...] = (
    ("time to first token", None, "prefill_seconds", False),
    ("maximum prompt throughput", "input", "prefill_seconds", True),
    ("single-user prompt throughput", "input", "prefill_seconds", False),
    ("single-user throughput", "output", "seconds", False),
    ("single-user throughput", "input + output", "seconds", False),
    ("multi-user maximum throughput", "output", "seconds", True),
    ("multi-user maximum throughput", "input + output", "seconds", True),
)
DIFFERENT = len({kind[2:] for kind in KINDS})  # ratios


@dataclass(frozen=True)
class Side:
    """The baseline or the target: a table of one results folder."""

    folder: str
    table: Table
    decode_length: int  # tokens
    runs: int  # of each cell, by the plan


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
    unit: str  # ms, tokens/s
    counted: Counted | None  # which tokens; None for a latency
    baseline: Value | None
    target: Value | None
    ratio: Interval | None  # seconds of the target ÷ the baseline's, for the same work
    verdict: Verdict
    reason: str | None = None

    @property
    def named(self) -> str:
        return f"{self.name} ({self.counted} tokens)" if self.counted else self.name

    @property
    def ratio_name(self) -> str:
        return "Ratio_Throughput" if self.counted else "Ratio_Latency"


@dataclass(frozen=True)
class TableComparison:
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


def compare(baseline: Side, target: Side) -> TableComparison:
    """Every metric. The sides have the same sequence length and decode length."""
    return TableComparison(baseline, target, [_metric(kind, baseline, target) for kind in KINDS])


def _metric(kind: Kind, *sides: Side) -> Metric:
    name, counted, seconds, several_users = kind
    cells, reasons = [], []
    values: dict[str, Value | None] = {"baseline": None, "target": None}
    for side, called in zip(sides, values, strict=True):
        able = [c for c in side.table.cells if (c.batch_size > 1) == several_users]
        if measured := [cell for cell in able if cell.counted]:
            cell = max(measured, key=lambda cell: cell.batch_size / _mean(seconds, cell))
            work = _tokens(side, counted) * cell.batch_size
            taken = _mean(seconds, cell)
            value = work / taken if counted else 1e3 * taken
            values[called] = Value(value, cell.batch_size, len(cell.counted))
            cells.append(cell)
            continue
        what = f"batch size {'above 1' if several_users else '1'}"
        why = "; ".join(dict.fromkeys(cell.reason for cell in able if cell.reason))
        why = why or (f"no run at {what}" if able else f"no {what} in the plan")
        reasons.append(f"{called}: {why}")
    ratio: Interval | None = None
    verdict: Verdict = "not measured"
    if not reasons:
        ratio, verdict = _ratio(kind, sides, cells)
    return Metric(
        name,
        "tokens/s" if counted else "ms",
        counted,
        **values,
        ratio=ratio,
        verdict=verdict,
        reason="; ".join(reasons) or None,
    )


def _tokens(side: Side, counted: Counted | None) -> int:
    tokens = {"input": side.table.sequence_length, "output": side.decode_length}
    return sum(tokens[name] for name in tokens if counted and name in counted)


def _mean(seconds: str, cell: Cell) -> float:
    return float(np.mean([getattr(sample, seconds) for sample in cell.counted]))


def _ratio(kind: Kind, sides: Iterable[Side], best: Iterable[Cell]) -> tuple[Interval, Verdict]:
    """best: the cells of baseline and target that the metric is of."""
    _, _, seconds, several_users = kind
    (baseline, target), (before, after) = sides, best
    value = _mean(seconds, after) / after.batch_size / _mean(seconds, before) * before.batch_size
    others = {cell.batch_size: cell for cell in target.table.cells if cell.counted}
    pairs = {
        cell.batch_size: (cell, others[cell.batch_size])
        for cell in baseline.table.cells
        if cell.counted and cell.batch_size in others and (cell.batch_size > 1) == several_users
    }
    sizes = after.batch_size, before.batch_size
    together = all(size in pairs and _in_turns(*pairs[size]) for size in sizes)
    if baseline.folder != target.folder or not together:
        return Interval(value), "not in turns"
    level = (1 - CONFIDENCE) / DIFFERENT / len(pairs)
    low, high = (
        stats.intervals(own, {1: other}, stats.Floor(), level, spent=1.0)[1]
        for own, other in ([_turns(seconds, cell) for cell in pairs[size]] for size in sizes)
    )
    if not (np.isfinite(low.half_width) and np.isfinite(high.half_width)):
        return Interval(value), "no difference shown"
    # The value is a quotient of means, which one late run moves; the interval is of the mean log.
    least, most = min(low.low, value), max(high.high, value)
    verdict: Verdict = "better" if most < 1 else "worse" if least > 1 else "no difference shown"
    return Interval(value, least, most), verdict


def _in_turns(baseline: Cell, target: Cell) -> bool:
    """Whether most runs of the target were taken in cycles with the baseline's."""
    cycles = {sample.cycle for sample in baseline.counted} - {None}
    return sum(sample.cycle in cycles for sample in target.counted) * 2 > len(target.counted)


def _turns(seconds: str, cell: Cell) -> stats.Turns:
    rows = [(sample.cycle, sample.process, getattr(sample, seconds)) for sample in cell.counted]
    cycle, process, taken = zip(*rows, strict=True)
    return stats.Turns(np.array(cycle), np.array(process), np.array(taken))
