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
seconds for the same work ÷ the baseline's. Intervals are Welch's t on the logarithm of the mean
seconds (delta method), over runs. Those of a table hold together with 98 % (Bonferroni over the
four ratios that differ: several metrics are of the same seconds), so that equal arms show any
difference in at most 2 % of the tables, as in ab. Runs of one process say nothing of how far
processes scatter, and nothing of what another day changes on a machine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quantbench.compare.figures.between_days import change
from quantbench.compare.figures.families import FALSE_VERDICTS
from quantbench.compare.figures.latency import Cell, LatencySample
from quantbench.compare.sampling.latency_results import TableResult
from quantbench.quality.block_errors import LEAST_BLOCKS, Estimate

CONFIDENCE = 1 - FALSE_VERDICTS  # of all intervals of a table together
Counted = Literal["input", "output", "input + output"]
Verdict = Literal["better", "worse", "no difference shown", "not measured"]


@dataclass(frozen=True)
class Side:
    """The baseline or the target: a table of one results folder."""

    folder: str
    table: TableResult
    decode_length: int  # tokens
    runs: int  # of each cell, by the plan
    warmups: int


@dataclass(frozen=True)
class Ratio:
    """Seconds of the target ÷ the baseline's, for the same work."""

    name: Literal["Ratio_Latency", "Ratio_Throughput"]
    value: float
    low: float | None  # None: too few runs for an interval
    high: float | None

    @property
    def verdict(self) -> Verdict:
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


@dataclass(frozen=True)
class Comparison:
    """All metrics of two tables of one sequence length."""

    baseline: Side
    target: Side
    metrics: list[Metric]


@dataclass(frozen=True)
class _Kind:
    """How a metric is computed."""

    name: str
    counted: Counted | None
    seconds: Callable[[LatencySample], float]
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
    unit: Literal["ms", "tokens/s"] = "tokens/s" if kind.counted else "ms"
    chosen = [_chosen(kind, side) for side in (baseline, target)]
    reasons = [
        f"{name}: {cell}"
        for name, cell in zip(("baseline", "target"), chosen, strict=True)
        if isinstance(cell, str)
    ]
    values = [None if isinstance(c, str) else _value(kind, c, baseline) for c in chosen]
    ratio = None
    before, after = chosen
    if not isinstance(before, str) and not isinstance(after, str):
        ratio = _ratio(kind, before, after)
    return Metric(
        kind.name, unit, kind.counted, values[0], values[1], ratio, "; ".join(reasons) or None
    )


def _chosen(kind: _Kind, side: Side) -> Cell | str:
    """The cell that the metric is of, or why there is none."""
    fitting = [c for c in side.table.cells if (c.batch_size > 1) == kind.several_users]
    what = "above 1" if kind.several_users else "1"
    if not fitting:
        return f"no batch size {what} in the plan"
    measured = [cell for cell in fitting if cell.counted]
    if measured:
        return max(measured, key=lambda cell: cell.batch_size / _mean(kind, cell))
    reasons = dict.fromkeys(cell.reason for cell in fitting if cell.reason)
    return "; ".join(reasons) or f"no run at batch size {what}"


def _value(kind: _Kind, cell: Cell, side: Side) -> Value:
    seconds = _mean(kind, cell)
    prompt, output = side.table.sequence_length, side.decode_length
    tokens = {"input": prompt, "output": output, "input + output": prompt + output}
    if kind.counted is None:
        value = 1e3 * seconds
    else:
        value = cell.batch_size * tokens[kind.counted] / seconds
    return Value(value, cell.batch_size, len(cell.counted))


def _ratio(kind: _Kind, baseline: Cell, target: Cell) -> Ratio:
    interval = change(
        _log_seconds(kind, target),
        _log_seconds(kind, baseline),
        None,
        1 - (1 - CONFIDENCE) / DIFFERENT,
    )
    ends = None if interval.confidence is None else (interval.low, interval.high)
    low, high = ends or (None, None)
    return Ratio("Ratio_Throughput" if kind.counted else "Ratio_Latency", interval.ratio, low, high)


def _mean(kind: _Kind, cell: Cell) -> float:
    return float(np.mean([kind.seconds(sample) for sample in cell.counted]))


def _log_seconds(kind: _Kind, cell: Cell) -> Estimate:
    """Logarithm of the mean seconds for one row of the batch, and its standard error."""
    seconds = [kind.seconds(sample) for sample in cell.counted]
    count, mean = len(seconds), float(np.mean(seconds))
    error = math.inf
    if count >= LEAST_BLOCKS:
        error = float(np.std(seconds, ddof=1)) / math.sqrt(count) / mean
    return Estimate(math.log(mean / cell.batch_size), error, count - 1)
