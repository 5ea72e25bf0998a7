"""What `latency` measured: results.json in the folder of --output, with every sample.

    results = LatencyResults.load(folder)
    results.table("tiny", "int8wo", 1, 100).cells[0].samples
    results.save(folder)                    # replaced whole, so that a kill leaves the last one

Seconds are of wall time. A cell that was not measured has its reason, and no number.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantbench import files
from quantbench.compare.figures.latency import Cell
from quantbench.compare.sampling.latency_plan import LatencyPlan, Load
from quantbench.compare.sampling.results import FILE, read_results
from quantbench.errors import UsageError
from quantbench.log.about import About
from quantbench.typed_json import from_json, require, to_json

KIND, FORMAT = "latency", 1


@dataclass(frozen=True)
class ModelFacts:
    """A model as its config describes it."""

    name: str
    layers: int
    width: int
    heads: int  # query heads
    kv_heads: int
    feed_forward: int  # width
    vocabulary: int  # tokens


@dataclass(frozen=True)
class Carried:
    """How a table's model ran, for people to read: no figure is computed from it."""

    machine: str  # the node: its cards and processor
    device: str
    precision: str
    kernel: str | None = None
    decoder: str | None = None
    compiled: list[str] = field(default_factory=list)  # such as "decode at batch sizes 1, 2"
    weight_bytes: int | None = None


@dataclass
class Spent:
    """Seconds of wall time that a table took, without loading the model."""

    runs: float = 0.0  # prompts and decoding steps, those of warm-ups among them
    compiling: float = 0.0  # first steps of cells for which steps may be compiled
    overhead: float = 0.0  # all other seconds from the first cell's start to the last cell's end
    overhead_share: float | None = None  # overhead ÷ runs

    def add(self, wall: float, runs: float, compiling: float) -> None:
        """Add a cell. wall: all seconds since the cell before it ended, in the same process."""
        self.runs += runs
        self.compiling += compiling
        self.overhead += max(0.0, wall - runs - compiling)
        self.overhead_share = self.overhead / self.runs if self.runs else None


@dataclass
class TableResult:
    """One model, arm, number of ranks and sequence length. A table is of one machine."""

    checkpoint: str  # as the plan names the model
    arm: str  # its name
    ranks: int
    sequence_length: int  # tokens of each prompt
    model: ModelFacts | None = None  # None: it could not be loaded
    carried: Carried | None = None
    cells: list[Cell] = field(default_factory=list)  # in the plan's order, as far as it got
    spent: Spent = field(default_factory=Spent)

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.checkpoint, self.arm, self.ranks, self.sequence_length


@dataclass
class LatencyResults:
    """Everything that was measured so far."""

    plan: LatencyPlan
    tables: list[TableResult] = field(default_factory=list)
    about: About | None = None
    ended: str | None = None  # "complete", "interrupted"; None while it runs

    def table(self, checkpoint: str, arm: str, ranks: int, length: int) -> TableResult | None:
        """The table of that key; None if nothing of it was measured."""
        key = (checkpoint, arm, ranks, length)
        return next((table for table in self.tables if table.key == key), None)

    def begin(self, load: Load, length: int) -> TableResult:
        """The table of a load and a sequence length, which is made if it is not there; tables are
        in the plan's order."""
        table = self.table(*load.key, length)
        if table is None:
            table = TableResult(*load.key, length)
            self.tables.append(table)
            order = [(*each.key, n) for each in self.plan.loads for n in self.plan.sequence_lengths]
            self.tables.sort(key=lambda table: order.index(table.key))
        return table

    def put(self, load: Load, length: int, cell: Cell) -> None:
        """Put a cell into its table, in place of one of the same batch size."""
        table = self.begin(load, length)
        cells = {kept.batch_size: kept for kept in table.cells} | {cell.batch_size: cell}
        table.cells = [cells[size] for size in self.plan.batch_sizes if size in cells]

    def replace(self, tables: Sequence[TableResult]) -> None:
        """Replace the tables that have the same keys as these, whole."""
        for table in tables:
            load = next(each for each in self.plan.loads if each.key == table.key[:3])
            self.tables[self.tables.index(self.begin(load, table.sequence_length))] = table

    def left(self, load: Load) -> list[tuple[int, int]]:
        """Sequence lengths and batch sizes of the plan that have neither all runs nor a reason."""
        cells = []
        for length in self.plan.sequence_lengths:
            table = self.table(load.model, load.arm.name, load.ranks, length)
            done = {
                cell.batch_size
                for cell in (table.cells if table else [])
                if cell.reason is not None or len(cell.samples) >= self.plan.runs
            }
            cells += [(length, size) for size in self.plan.batch_sizes if size not in done]
        return cells

    def save(self, folder: Path) -> None:
        """Write results.json into the folder. Raises LogError where that cannot be written."""
        value = {"kind": KIND, "format": FORMAT, **to_json(self)}
        files.write_text("--output", folder / FILE, json.dumps(value, indent=1) + "\n")

    @staticmethod
    def resume(folder: Path, plan: LatencyPlan) -> "LatencyResults":
        """The results in a folder, to go on with. Raises UsageError if they are of another plan."""
        results = LatencyResults.load(folder)
        if difference := results.plan.difference(plan):
            raise UsageError(f"--resume {folder} is of another plan: {difference}")
        return results

    @staticmethod
    def load(folder: Path, option: str = "--resume") -> "LatencyResults":
        """Read what `save` wrote. option: the one that names the folder, for the message. Raises
        UsageError, one line."""

        def accept(value: Any) -> LatencyResults:
            if "arms" in value and "kind" not in value:
                raise UsageError(
                    f"{option} {folder}: {FILE} is of ab; latency --output writes its own"
                )
            if value.get("kind") != KIND:
                raise ValueError(f"its kind is not {KIND}")
            if value.get("format") != FORMAT:
                raise UsageError(f"{option} {folder}: another version wrote its {FILE}")
            results = from_json(LatencyResults, value)
            for table in results.tables:
                _check(table, results.plan)
            return results

        return read_results(option, folder, "latency", accept)


def _check(table: TableResult, plan: LatencyPlan) -> None:
    """Raise ValueError for a table that no run of this plan can have written."""
    sizes = [cell.batch_size for cell in table.cells]
    if len(set(sizes)) < len(sizes) or not set(sizes) <= set(plan.batch_sizes):
        raise ValueError(f"cells of batch sizes {sizes}")
    for cell in table.cells:
        for sample in cell.samples:
            seconds = [sample.prefill_seconds, *sample.step_seconds]
            if len(seconds) != plan.decode_length:
                raise ValueError(f"{len(seconds)} tokens instead of {plan.decode_length}")
            require("seconds of a sample", *seconds)
