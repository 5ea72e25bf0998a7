"""Latency of prefill and of decoding at several batch sizes: from samples to the rows of tables.

    cells = [Cell(1, samples), Cell(2, [], "out of memory")]
    latency_rows(cells)                     # a Row for each step and batch size, in milliseconds
    rate_rows(cells, 1024)                  # tokens/s and requests/s

A run of `decode_length` tokens is one prefill, which ends with the first token, and
decode_length - 1 decoding steps. Usual names: prefill is the time to first token (TTFT), the mean
step is the time per output token (TPOT), a single step is the inter-token latency (ITL).

Percentiles are of the sorted samples; an average rate is all work divided by all time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from scipy import stats

from quantbench.run.energy import Energy, NotCounted
from quantbench.typed_json import omitted

CONFIDENCE = 0.95
LEAST_RUNS = 4  # for an interval: with fewer, Student's t says little but that there are few
INTERPOLATION = "linear interpolation between neighbours (Hyndman and Fan's type 7)"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class LatencySample:
    """One run, seconds of wall time."""

    prefill_seconds: float  # from the prompt to the first token
    step_seconds: list[float]  # each decoding step: decode_length - 1 of them

    @property
    def decode_seconds(self) -> float:
        return math.fsum(self.step_seconds)

    @property
    def token_seconds(self) -> float:
        """Mean of the steps; NaN where there was none."""
        return self.decode_seconds / len(self.step_seconds) if self.step_seconds else math.nan


@dataclass(frozen=True)
class Cell:
    """What was measured at one batch size. A cell with a reason counts as not measured, although
    it may hold the runs before it failed."""

    batch_size: int
    samples: list[LatencySample]  # in the order of arrival
    reason: str | None = None  # why it cannot be measured
    # What was estimated before the first run: prompt_seconds,
    # token_seconds (a step in the middle of the new tokens), joules_per_token, …
    estimate: dict[str, float] | None = omitted()
    # Joules of each new token, the prompt's included and the idle machine's left out; None where
    # `energy`, that of a run, is not known.
    joules_per_token: float | None = omitted()
    energy: Energy | NotCounted | None = omitted()

    @property
    def counted(self) -> list[LatencySample]:
        return [] if self.reason is not None else self.samples


@dataclass(frozen=True)
class Figures:
    """What a line of a table shows of a cell; NaN for a cell that was not measured."""

    average: float
    lowest: float
    highest: float
    interval: tuple[float, float] | None = field(default=None, kw_only=True)  # 95 %, the average's

    @property
    def values(self) -> dict[str, float]:
        """The figures by name, in the order of a table's columns; without the interval."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in named.items() if name != "interval"}


@dataclass(frozen=True)
class Summary(Figures):
    """How long a step takes, in milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Rate(Figures):
    """Work per second, in the row's unit."""


@dataclass(frozen=True)
class Against:
    """An estimate and what was measured, in the row's unit; NaN for what is not known."""

    estimated: float
    measured: float
    error: float  # (estimated − measured) ÷ measured

    interval = None  # of the average: the table of latencies has it

    @property
    def average(self) -> float:
        return self.measured

    @property
    def values(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    step: str
    batch_size: int
    unit: str
    figures: Summary | Rate | Against


# Steps, and the milliseconds that a sample has of each.
STEPS: dict[str, Callable[[LatencySample], list[float]]] = {
    "Prefill (TTFT)": lambda sample: [1e3 * sample.prefill_seconds],
    "Decode (token, TPOT)": lambda sample: [1e3 * sample.token_seconds],
    "Decode (total)": lambda sample: [1e3 * sample.decode_seconds],
    "Decode (single steps, ITL)": lambda sample: [1e3 * s for s in sample.step_seconds],
}
# Rates: the step, and the unit.
RATES = (("Prefill", "tokens/s"), ("Prefill", "requests/s"), ("Decode", "tokens/s"))

# Steps that are estimated, and their names in an estimate.
ESTIMATED = {"Prefill (TTFT)": "prompt_seconds", "Decode (token, TPOT)": "token_seconds"}


def latency_rows(cells: Sequence[Cell]) -> list[Row]:
    """A row for each step and cell."""
    rows = []
    for step, milliseconds in STEPS.items():
        for cell in cells:
            runs = [milliseconds(sample) for sample in cell.counted]
            rows.append(Row(step, cell.batch_size, "ms", summary(runs)))
    return rows


def rate_rows(cells: Sequence[Cell], sequence_length: int) -> list[Row]:
    """A row for each rate and cell. sequence_length: tokens of each prompt."""
    rows = []
    for step, unit in RATES:
        for cell in cells:
            if step == "Decode":
                # Runs of one cell decode equally many tokens; the first one is prefill's.
                tokens = len(cell.counted[0].step_seconds) if cell.counted else 0
                seconds = [sample.decode_seconds for sample in cell.counted]
            else:
                tokens = sequence_length if unit == "tokens/s" else 1
                seconds = [sample.prefill_seconds for sample in cell.counted]
            figures = rate(cell.batch_size * tokens, seconds)
            rows.append(Row(step, cell.batch_size, unit, figures))
    return rows


def estimate_rows(cells: Sequence[Cell]) -> list[Row]:
    """A row for each step that is estimated and each cell; none if no cell has an estimate."""
    if not any(cell.estimate for cell in cells):
        return []
    rows = []
    for step, name in ESTIMATED.items():
        milliseconds = STEPS[step]
        for cell in cells:
            measured = summary([milliseconds(sample) for sample in cell.counted]).average
            estimated = 1e3 * (cell.estimate or {}).get(name, math.nan)
            figures = Against(estimated, measured, estimated / measured - 1)
            rows.append(Row(step, cell.batch_size, "ms", figures))
    return rows


def summary(runs: Sequence[Sequence[float]]) -> Summary:
    """Figures of all runs' milliseconds, which come in the order of arrival.

    A run may have several values, as many as it has steps. The interval is that of the average,
    from the mean of each run.
    """
    values = [value for run in runs for value in run]
    if not values:
        return Summary(math.nan, math.nan, math.nan, math.nan, math.nan, math.nan)
    p50, p90, p99 = (float(v) for v in np.percentile(values, PERCENTILES, method="linear"))
    means = [math.fsum(run) / len(run) for run in runs if run]
    average = math.fsum(values) / len(values)
    return Summary(average, min(values), max(values), p50, p90, p99, interval=interval(means))


def rate(work: float, seconds: Sequence[float]) -> Rate:
    """Work per second. work: of one run. A run without work or time has no rate."""
    if not seconds or not work or min(seconds) <= 0:
        return Rate(math.nan, math.nan, math.nan)
    rates = [work / value for value in seconds]
    ends = interval(seconds)
    inverted = (work / ends[1], work / ends[0]) if ends else None
    average = work * len(seconds) / math.fsum(seconds)
    return Rate(average, min(rates), max(rates), interval=inverted)


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Ends for the mean of values above 0; None for fewer than LEAST_RUNS values.

    By Student's t on the logarithm of the mean, as the metrics' ratios: no end is below 0, however
    much the values scatter.
    """
    if len(values) < LEAST_RUNS:
        return None
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    reach = float(stats.t.isf((1 - confidence) / 2, len(values) - 1))
    reach *= deviation / math.sqrt(len(values)) / mean
    return mean * math.exp(-reach), mean * math.exp(reach)
