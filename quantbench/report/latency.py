"""Latency results as files for people: Markdown, and CSV with every sample.

    (folder / "report.md").write_text(report(results))
    (folder / "samples.csv").write_text(samples(results))

Every table of a sweep is a section: the table of parameters, the latencies, the rates, and why a
cell is NaN.
"""

import csv
import io
import math
from collections.abc import Sequence

from quantbench.answer.latency import (
    CONFIDENCE,
    INTERPOLATION,
    LEAST_RUNS,
    Cell,
    Latencies,
    Row,
    Table,
    latency_rows,
    rate_rows,
)
from quantbench.bench.cell_plan import CellPlan
from quantbench.report import documents
from quantbench.run import energy, shown
from quantbench.run.energy import Energy, NotCounted
from quantbench.text import counted, one_line

INTERVAL, NO_INTERVAL = "95 % Interval", "none"
NOT_REACHED = "not measured yet; --resume goes on"
NOTE = (
    f"Percentiles are of sorted samples, by {INTERPOLATION}. Intervals of the averages are "
    f"{100 * CONFIDENCE:.0f} % by Student's t on their logarithms, over runs of one cell; "
    f"{NO_INTERVAL} with fewer than {LEAST_RUNS}. An average rate is all work ÷ all time. "
    "TTFT: time to first token; TPOT: time per output token, the mean of a run's steps; ITL: "
    "latency between two tokens."
)
FIELDS = "model arm ranks sequence_length batch_size run step seconds reason".split()


def report(results: Latencies) -> str:
    """All tables that have a cell, as one Markdown text."""
    sections = [section(table, results.plan) for table in results.tables]
    return "\n".join(sections) if sections else "Nothing was measured.\n"


def section(table: Table, plan: CellPlan) -> str:
    """One model, arm, number of ranks and sequence length."""
    every = cells(table, plan)
    tables = [
        documents.table(("Parameter", "Value"), parameters(table, plan), padded=True),
        rows_text(latency_rows(every)),
        rows_text(rate_rows(every, table.sequence_length)),
    ]
    heading = f"# {_plain(table.checkpoint)}, {_plain(table.arm)}, " + ", ".join(
        [counted(table.ranks, "rank"), f"prompts of {counted(table.sequence_length, 'token')}"]
    )
    missing = [
        f"- batch size {cell.batch_size}: {_plain(cell.reason)}" for cell in every if cell.reason
    ]
    short = [
        f"- batch size {cell.batch_size}: {len(cell.samples)} of {counted(plan.runs, 'run')}"
        for cell in every
        if not cell.reason and len(cell.samples) < plan.runs
    ]
    parts = [heading, *tables, NOTE, *_estimates(every)]
    if missing:
        parts += ["NaN is what could not be measured:", "\n".join(missing)]
    if short:
        parts += ["Of fewer runs than planned:", "\n".join(short)]
    return "\n\n".join(parts) + "\n"


def _estimates(every: Sequence[Cell]) -> list[str]:
    """The estimate made before the first run, the measurement, and energy."""
    parts = []
    said = {cell.batch_size: shown.sentence(cell.estimate) for cell in every}
    if any(said.values()):
        parts.append("\n".join(f"- batch size {size}: {said[size]}" for size in said if said[size]))
    if joules := [line for cell in every if (line := _joules(cell))]:
        parts += ["Energy, the prompt's included:", "\n".join(joules)]
    return parts


def _joules(cell: Cell) -> str:
    """A cell's energy, measured and estimated; "" where neither is known."""
    idle = cell.energy.idle_watts if isinstance(cell.energy, Energy) else None
    why_not = cell.energy.why_not if isinstance(cell.energy, NotCounted) else None
    estimated = (cell.estimate or {}).get("joules_per_token")
    said = energy.sentence(
        cell.joules_per_token, idle, why_not, estimated.estimated if estimated else None
    )
    return f"- batch size {cell.batch_size}: {said}" if said else ""


def cells(table: Table, plan: CellPlan) -> list[Cell]:
    """A cell for each batch size of the plan; those that are not there have a reason."""
    measured = {cell.batch_size: cell for cell in table.cells}
    every = [measured.get(size, Cell(size, [])) for size in plan.batch_sizes]
    return [
        cell if cell.reason or cell.samples else Cell(cell.batch_size, [], NOT_REACHED)
        for cell in every
    ]


def parameters(table: Table, plan: CellPlan) -> list[tuple[str, str]]:
    """Rows of the table of parameters: what describes a run."""
    rows = [
        ("Model", table.model or table.checkpoint),
        ("Sequence Length", str(table.sequence_length)),
        ("Decode Length", str(plan.decode_length)),
        ("N Runs", str(plan.runs)),
        ("Warmups", str(plan.warmups)),
        ("Sampling", "the likeliest token; end of text is ignored"),
        ("Arm", table.arm),
        ("Tensor Parallel", counted(table.ranks, "rank")),
    ]
    if ran := table.ran:
        sizes = ", ".join(map(str, ran.compiled))
        sizes = f"for batch size{'s' * (len(ran.compiled) > 1)} {sizes}" if sizes else "nothing"
        rows += [
            ("Precision", ran.precision),
            ("Kernel", ran.kernel or "-"),
            ("Decoder", ran.decoder or "-"),
            ("Compiled", sizes),
            ("Device", ran.device),
            ("Machine", ran.machine),
        ]
    return [(what, _plain(value)) for what, value in rows]


def samples(results: Latencies) -> str:
    """CSV with a line for each prefill and each decoding step; a cell without samples has one line
    with its reason. Runs count from 1, in the order of arrival; step 0 is prefill."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for table in results.tables:
        for cell in cells(table, results.plan):
            key = [*table.key, cell.batch_size]
            reason = one_line(cell.reason or "")
            lines = [
                [run, step, repr(seconds), reason]
                for run, sample in enumerate(cell.samples, 1)
                for step, seconds in enumerate([sample.prefill_seconds, *sample.step_seconds])
            ]
            writer.writerows([*key, *line] for line in lines or [["", "", "NaN", reason]])
    return text.getvalue()


def _plain(text: str) -> str:
    """A text from elsewhere on one line, without the characters that separate cells."""
    return one_line(text).replace("\\", "/").replace("|", "\\|")


# ------------------------------------------------------------------------------ Markdown tables


def rows_text(rows: Sequence[Row]) -> str:
    """The table's lines, without a line end after the last one. rows: at least one."""
    names = list(rows[0].values)
    header = [name if name.startswith("p") else name.capitalize() for name in names]
    if "average" in names:  # its interval stands behind it
        header.insert(1, INTERVAL)
    return documents.table(
        ["Step", "Batch Size", *header], [_cells(row) for row in rows], padded=True
    )


def _cells(row: Row) -> list[str]:
    figures = [f"NaN {row.unit}" if math.isnan(value) else f"{value:.2f} {row.unit}"
               for value in row.values.values()]  # fmt: skip
    if "average" in row.values:
        ends = row.interval and f"{row.interval[0]:.2f} to {row.interval[1]:.2f} {row.unit}"
        figures.insert(1, ends or NO_INTERVAL)
    return [row.step, str(row.batch_size), *figures]
