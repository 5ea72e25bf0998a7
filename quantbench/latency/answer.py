"""What `latency` measured, as tables: from the turns in a folder to the rows that are printed.

    measured = load(folder)                 # a Table for each model, arm, ranks and prompt length
    latency_rows(measured.tables[0].cells)  # a Row for each step and batch size, in milliseconds
    rate_rows(cells, 1024)                  # tokens/s and requests/s

A run of `decode_length` tokens is one prefill, which ends with the first token, and
decode_length - 1 decoding steps. Usual names: prefill is the time to first token (TTFT), the mean
step is the time per output token (TPOT), a single step is the inter-token latency (ITL).

Percentiles are of the sorted samples; an average rate is all work divided by all time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
from scipy import special  # scipy.stats would take a second longer

from quantbench.bench import store
from quantbench.bench.store import META, ArmResult, Results
from quantbench.errors import UsageError
from quantbench.latency.cell_plan import CellPlan
from quantbench.log.origin import Origin
from quantbench.run.energy import Energy, NotCounted, pooled
from quantbench.typed_json import from_json, omitted

CONFIDENCE = 0.95
LEAST_RUNS = 4  # for an interval: with fewer, Student's t says little but that there are few
INTERPOLATION = "linear interpolation between neighbours (Hyndman and Fan's type 7)"
PERCENTILES = (50, 90, 99)


# --------------------------------------------------------------------------- what was measured


@dataclass(frozen=True)
class LatencySample:
    """One run, seconds of wall time. Runs of one cycle were taken next to each other."""

    prefill_seconds: float  # from the prompt to the first token
    step_seconds: list[float]  # each decoding step: decode_length - 1 of them
    cycle: int | None = omitted()
    process: int | None = omitted()  # of the cell, from 0

    @property
    def decode_seconds(self) -> float:
        return math.fsum(self.step_seconds)

    @property
    def seconds(self) -> float:
        """Seconds of the prompt and of all steps."""
        return self.prefill_seconds + self.decode_seconds

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
    # Joules of each new token, the prompt's included and the idle machine's left out; None where
    # `energy`, that of a run, is not known.
    joules_per_token: float | None = omitted()
    energy: Energy | NotCounted | None = omitted()

    @property
    def counted(self) -> list[LatencySample]:
        return [] if self.reason is not None else self.samples


@dataclass(frozen=True)
class Ran:
    """How a table's model ran."""

    machine: str  # its cards and processor, or the node of a cluster
    device: str
    precision: str
    kernel: str | None = None
    decoder: str | None = None  # "cpu-step; modules at batch size 32"
    compiled: list[int] = field(default_factory=list)  # batch sizes


@dataclass
class Table:
    """One model, arm, number of ranks and sequence length."""

    checkpoint: str  # as the plan names the model
    arm: str  # its name
    ranks: int
    sequence_length: int  # tokens of each prompt
    model: str | None = None  # its own name; None: it was not loaded
    ran: Ran | None = None
    cells: list[Cell] = field(default_factory=list)  # that were started, in the plan's order

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.checkpoint, self.arm, self.ranks, self.sequence_length


@dataclass
class Latencies:
    """All tables of a folder; its JSON is results.json."""

    plan: CellPlan
    tables: list[Table] = field(default_factory=list)
    about: Origin | None = None
    ended: str | None = None  # complete, interrupted; None while it runs


def load(folder: Path, option: str = "--resume") -> Latencies:
    """What latency --output left. Raises UsageError, one line, where nothing of it is there."""
    return tables(*resumable(folder, option))


def resumable(folder: Path, option: str = "--resume") -> tuple[Results, CellPlan]:
    """The measurements themselves, and their plan. Raises as `load`."""
    results = store.load(folder, option, "latency")
    try:
        plan = from_json(CellPlan, results.plan)
        if len(plan.cells) != len(results.arms):
            raise ValueError(f"{len(results.arms)} cells instead of {len(plan.cells)}")
        steps, turns = plan.decode_length - 1, (t for arm in results.arms for t in arm.turns)
        if any(len(t.steps or ()) != steps for t in turns if t.kind == "decode"):
            raise ValueError(f"a turn is not of {steps} steps")
    except ValueError as error:
        raise UsageError(
            f"{option} {folder}: {META} is not what latency --output writes: {error}"
        ) from None
    return results, plan


def tables(results: Results, plan: CellPlan) -> Latencies:
    """The tables that have a cell, in the plan's order."""
    made = Latencies(plan, about=results.about, ended=results.ended)
    numbers = {
        (c.model, c.arm.name, c.ranks, c.sequence_length, c.batch_size): number
        for number, c in enumerate(plan.cells)
    }
    names = [arm.name for arm in plan.arms]
    for key in product(plan.models, names, plan.ranks, plan.sequence_lengths):
        table = Table(*key)
        ready: dict[int, ArmResult] = {}
        for size in plan.batch_sizes:
            number = numbers[*key, size]
            result = results.arms[number]
            if result.facts or result.failed:
                table.cells.append(_cell(size, results, number, plan.decode_length))
            if result.run:
                ready[size] = result
        if ready:
            table.model, table.ran = _ran(ready, results.about)
        if table.cells:
            made.tables.append(table)
    return made


def _cell(size: int, results: Results, number: int, decode_length: int) -> Cell:
    result = results.arms[number]
    prompts = {turn.cycle: turn for turn in results.turns(number, "prompt")}
    samples = [
        LatencySample(prompts[turn.cycle].seconds, turn.steps or [], turn.cycle, turn.process)
        for turn in results.turns(number, "decode")
        if turn.cycle in prompts
    ]
    facts, joules = result.facts, None
    energies = facts.energy if facts else []
    energy: Energy | NotCounted | None = energies[-1] if energies else None
    counted = [one for one in energies if isinstance(one, Energy)]
    if counted and len(counted) == len(energies):
        energy = pooled(counted)
        joules = energy.joules / (size * decode_length)
    return Cell(size, samples, result.failed, joules, energy)


def _ran(ready: dict[int, ArmResult], about: Origin | None) -> tuple[str, Ran]:
    """The model's name, and how it ran at each batch size."""
    decoder, last, compiled = "", "", []
    for size, result in ready.items():
        assert result.facts and result.facts.run
        run = result.facts.run
        if run.decoder != last:
            decoder += f"; {run.decoder} at batch size {size}" if decoder else run.decoder
        last = run.decoder
        compiled += [size] if result.facts.ready.compile_seconds is not None else []
    machine = result.machine or (about.machine if about else run.device.name)
    precision = f"torch.{run.config.precision}"
    return run.model, Ran(machine, run.config.device, precision, run.kernel, decoder, compiled)


# ----------------------------------------------------------------------------- rows of a table


@dataclass(frozen=True)
class LatencyRow:
    """A line of a table. values: by name, in the order of its columns; NaN where nothing was
    measured."""

    step: str
    batch_size: int
    unit: str
    values: dict[str, float]
    interval: tuple[float, float] | None = None  # 95 %, of the average


# Steps, and the milliseconds that a sample has of each.
STEPS: dict[str, Callable[[LatencySample], list[float]]] = {
    "Prefill (TTFT)": lambda sample: [1e3 * sample.prefill_seconds],
    "Decode (token, TPOT)": lambda sample: [1e3 * sample.token_seconds],
    "Decode (total)": lambda sample: [1e3 * sample.decode_seconds],
    "Decode (single steps, ITL)": lambda sample: [1e3 * s for s in sample.step_seconds],
}
# Rates: the step, and the unit.
RATES = (("Prefill", "tokens/s"), ("Prefill", "requests/s"), ("Decode", "tokens/s"))


def latency_rows(cells: Sequence[Cell]) -> list[LatencyRow]:
    """A row for each step and cell. A run may have several values, as many as it has steps; the
    interval is that of the average, from the mean of each run."""
    rows = []
    for (step, milliseconds), cell in product(STEPS.items(), cells):
        runs = [milliseconds(sample) for sample in cell.counted]
        every = [value for run in runs for value in run] or [math.nan]
        percentiles = np.percentile(every, PERCENTILES, method="linear")
        values = {"average": math.fsum(every) / len(every), "lowest": min(every)}
        values |= {"highest": max(every)}
        values |= {f"p{p}": float(v) for p, v in zip(PERCENTILES, percentiles, strict=True)}
        ends = interval([math.fsum(run) / len(run) for run in runs if run])
        rows.append(LatencyRow(step, cell.batch_size, "ms", values, ends))
    return rows


def rate_rows(cells: Sequence[Cell], sequence_length: int) -> list[LatencyRow]:
    """A row for each rate and cell. sequence_length: tokens of each prompt."""
    rows = []
    for (step, unit), cell in product(RATES, cells):
        if step == "Decode":
            # Runs of one cell decode equally many tokens; the first token is prefill's.
            tokens = len(cell.counted[0].step_seconds) if cell.counted else 0
            seconds = [sample.decode_seconds for sample in cell.counted]
        else:
            tokens = sequence_length if unit == "tokens/s" else 1
            seconds = [sample.prefill_seconds for sample in cell.counted]
        rows.append(
            rate(LatencyRow(step, cell.batch_size, unit, {}), cell.batch_size * tokens, seconds)
        )
    return rows


def rate(row: LatencyRow, work: float, seconds: Sequence[float]) -> LatencyRow:
    """The row with its rates. work: of one run. A run without work or time has no rate."""
    values, ends = dict.fromkeys(("average", "lowest", "highest"), math.nan), None
    if seconds and work and min(seconds) > 0:
        values = {"average": work * len(seconds) / math.fsum(seconds)}
        values |= {"lowest": work / max(seconds), "highest": work / min(seconds)}
        ends = interval(seconds)
    inverted = (work / ends[1], work / ends[0]) if ends else None
    return LatencyRow(row.step, row.batch_size, row.unit, values, inverted)


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Ends for the mean of values above 0; None for fewer than LEAST_RUNS values.

    By Student's t on the logarithm of the mean: no end is below 0, however much the values scatter.
    """
    if len(values) < LEAST_RUNS:
        return None
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    reach = float(special.stdtrit(len(values) - 1, (1 + confidence) / 2))
    reach *= deviation / math.sqrt(len(values)) / mean
    return mean * math.exp(-reach), mean * math.exp(reach)
