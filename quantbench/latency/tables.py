"""Latency results as files for people: Markdown, CSV with every sample, and a picture.

Every table of a sweep is a section: the table of parameters, the latencies, the rates, and why a
cell is NaN. Of these panels the picture has those with two points on a line:
- time per output token over decoded tokens/s of all rows, a point for each batch size;
- decoded tokens/s over batch sizes;
- time to first token at the smallest batch size over prompt lengths;
- decoded tokens/s over ranks, at the largest batch size that every number of ranks has.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quantbench.latency.answer import (
    CONFIDENCE,
    INTERPOLATION,
    LEAST_RUNS,
    Cell,
    Latencies,
    LatencyRow,
    Table,
    latency_rows,
    rate_rows,
)
from quantbench.latency.cell_plan import CellPlan
from quantbench.report.columns import table as markdown
from quantbench.report.svg import COLOURS, drawn, tidy
from quantbench.run import energy
from quantbench.run.energy import Energy, NotCounted
from quantbench.text import counted, one_line

INTERVAL, NO_INTERVAL = "95 % Interval", "none"
NOT_REACHED = "not measured yet"
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
    short = [cell for cell in every if not cell.reason and len(cell.samples) < plan.runs]
    heading = f"# {_plain(table.checkpoint)}, {_plain(table.arm)}, " + ", ".join(
        [counted(table.ranks, "rank"), f"prompts of {counted(table.sequence_length, 'token')}"]
    )
    parts = [
        heading,
        markdown(("Parameter", "Value"), parameters(table, plan), padded=True),
        rows_text(latency_rows(every)),
        rows_text(rate_rows(every, table.sequence_length)),
        NOTE,
        *_said(every, "Energy, the prompt's included:", _joules),
        *_said(every, "NaN is what could not be measured:", lambda cell: _plain(cell.reason or "")),
        *_said(short, "Of fewer runs than planned:",
               lambda cell: f"{len(cell.samples)} of {counted(plan.runs, 'run')}"),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _said(cells: Sequence[Cell], heading: str, of_cell: Callable[[Cell], str]) -> list[str]:
    """A line for each cell with a remark, below the heading."""
    said = ((cell.batch_size, of_cell(cell)) for cell in cells)
    lines = "\n".join(f"- batch size {size}: {text}" for size, text in said if text)
    return list(filter(None, [heading, lines])) if lines else []


def _joules(cell: Cell) -> str:
    """A cell's energy, or why it is not known."""
    idle = cell.energy.idle_watts if isinstance(cell.energy, Energy) else None
    why_not = cell.energy.why_not if isinstance(cell.energy, NotCounted) else None
    return energy.sentence(cell.joules_per_token, idle, why_not)


def cells(table: Table, plan: CellPlan) -> list[Cell]:
    """A cell for each batch size of the plan; those that are not there have a reason."""
    reached = {cell.batch_size: cell for cell in table.cells if cell.reason or cell.samples}
    return [reached.get(size, Cell(size, [], NOT_REACHED)) for size in plan.batch_sizes]


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


def rows_text(rows: Sequence[LatencyRow]) -> str:
    """The table's lines, without a line end after the last one. rows: at least one."""
    names = list(rows[0].values)
    header = [name if name.startswith("p") else name.capitalize() for name in names]
    if "average" in names:  # its interval stands behind it
        header.insert(1, INTERVAL)
    return markdown(["Step", "Batch Size", *header], [_cells(row) for row in rows], padded=True)


def _cells(row: LatencyRow) -> list[str]:
    figures = [f"NaN {row.unit}" if math.isnan(value) else f"{value:.2f} {row.unit}"
               for value in row.values.values()]  # fmt: skip
    if "average" in row.values:
        ends = row.interval and f"{row.interval[0]:.2f} to {row.interval[1]:.2f} {row.unit}"
        figures.insert(1, ends or NO_INTERVAL)
    return [row.step, str(row.batch_size), *figures]


# ------------------------------------------------------------------------------------- picture

LATENCY, BATCH, PROMPT, RANKS = "latency against throughput", "batch size", "prompt", "ranks"
AXES = {
    LATENCY: ("decoded tokens per second, all rows", "time per output token, ms"),
    BATCH: ("batch size", "decoded tokens per second, all rows"),
    PROMPT: ("tokens of the prompt", "time to first token, ms"),
    RANKS: ("ranks of tensor parallelism", "decoded tokens per second, all rows"),
}


class PanelPoint(NamedTuple):
    """x and y of a panel."""

    x: float
    y: float
    label: str = ""


Lines = dict[str, list[PanelPoint]]  # by the line's name


def panels(results: Latencies) -> dict[str, Lines]:
    """What each panel shows; without lines of a single point, and without empty panels."""
    shown: dict[str, Lines] = {panel: {} for panel in AXES}
    smallest, sizes = min(results.plan.batch_sizes), dict[str, list[set[int]]]()
    for table in results.tables:
        own = {cell.batch_size for cell in table.cells if cell.counted}
        sizes.setdefault(_name(table, results, "ranks"), []).append(own)
    largest = {name: max(set.intersection(*own), default=0) for name, own in sizes.items()}

    def add(panel: str, line: str, x: float, y: float, label: str = "") -> None:
        shown[panel].setdefault(line, []).append(PanelPoint(x, y, label))

    for table, cell in [(t, cell) for t in results.tables for cell in t.cells if cell.counted]:
        size, line = cell.batch_size, _name(table, results)
        step_ms = 1e3 * float(np.mean([sample.token_seconds for sample in cell.counted]))
        decoded = 1e3 * size / step_ms  # tokens/s of all rows
        add(LATENCY, line, decoded, step_ms, str(size))
        add(BATCH, line, size, decoded)
        if size == smallest:
            prompt_ms = 1e3 * float(np.mean([sample.prefill_seconds for sample in cell.counted]))
            over_prompts = _name(table, results, "sequence_length")
            add(PROMPT, over_prompts, table.sequence_length, prompt_ms)
        over_ranks = _name(table, results, "ranks")
        if size == largest[over_ranks]:
            add(RANKS, f"{over_ranks}, batch {size}", table.ranks, decoded)
    kept = {
        panel: {name: sorted(points) for name, points in lines.items() if len(points) > 1}
        for panel, lines in shown.items()
    }
    return {panel: lines for panel, lines in kept.items() if lines}


def draw(shown: Mapping[str, Lines], path: Path) -> None:
    """Draw SVG: `panels`, at least one. Raises OSError."""
    from matplotlib.ticker import NullLocator

    names = list(dict.fromkeys(name for lines in shown.values() for name in lines))
    colours = dict(zip(names, COLOURS * len(names), strict=False))
    dashes = {name: ("o-", "s--", "^:")[n // len(COLOURS) % 3] for n, name in enumerate(names)}
    with drawn(path, size=(4.4 * len(shown), 3.8)) as figure:
        for number, (title, lines) in enumerate(shown.items(), 1):
            panel: Any = figure.add_subplot(1, len(shown), number)
            for name, points in lines.items():
                xs, ys, _ = zip(*points, strict=True)
                panel.plot(xs, ys, dashes[name], color=colours[name], label=name)
                for x, y, label in points:
                    panel.annotate(label, (x, y), xytext=(3, 4), fontsize=7,
                                   textcoords="offset points")  # fmt: skip
            tidy(panel, *AXES[title])
            panel.set_ylim(0, 1.1 * max(point.y for points in lines.values() for point in points))
            if title != LATENCY:
                values = sorted({point.x for points in lines.values() for point in points})
                panel.set_xscale("log", base=2)
                panel.xaxis.set_minor_locator(NullLocator())
                panel.set_xticks(values, [f"{value:g}" for value in values])
            else:
                panel.set_title("numbers: batch size", fontsize=8)
                panel.set_xlim(left=0)
            panel.legend(fontsize=7)


def _name(table: Table, results: Latencies, without: str = "") -> str:
    """What tells a table's line from the others': only what differs in the plan."""
    plan = results.plan
    parts = [table.checkpoint] if len(plan.models) > 1 else []
    parts.append(table.arm)
    if len(plan.ranks) > 1 and without != "ranks":
        parts.append(f"{table.ranks} ranks" if table.ranks > 1 else "1 rank")
    if len(plan.sequence_lengths) > 1 and without != "sequence_length":
        parts.append(f"prompt {table.sequence_length}")
    return ", ".join(parts).replace("$", r"\$")  # matplotlib reads $…$ as mathematics
