"""Pictures of latency results: latency against throughput, and scaling.

Panels, of which those are drawn that have two points on a line:
- time per output token over decoded tokens/s of all rows, a point for each batch size;
- decoded tokens/s over batch sizes;
- time to first token at the smallest batch size over prompt lengths;
- decoded tokens/s over ranks, at the largest batch size that every number of ranks has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantbench.answer.latency import Cell, Latencies, Table
from quantbench.report.drawing import COLOURS, drawn, tidy

LATENCY, BATCH, PROMPT, RANKS = "latency against throughput", "batch size", "prompt", "ranks"
AXES = {
    LATENCY: ("decoded tokens per second, all rows", "time per output token, ms"),
    BATCH: ("batch size", "decoded tokens per second, all rows"),
    PROMPT: ("tokens of the prompt", "time to first token, ms"),
    RANKS: ("ranks of tensor parallelism", "decoded tokens per second, all rows"),
}


@dataclass(frozen=True)
class Point:
    """x and y of a panel."""

    x: float
    y: float
    label: str = ""


Lines = dict[str, list[Point]]  # by the line's name


def panels(results: Latencies) -> dict[str, Lines]:
    """What each panel shows; without lines of a single point, and without empty panels."""
    everything: dict[str, Lines] = {name: {} for name in AXES}
    for table in results.tables:
        cells = [cell for cell in table.cells if cell.counted]
        name = _name(table, results)
        everything[LATENCY][name] = [
            Point(_decoded(cell), _step_ms(cell), str(cell.batch_size)) for cell in cells
        ]
        everything[BATCH][name] = [Point(cell.batch_size, _decoded(cell)) for cell in cells]
    everything[PROMPT] = _over_prompts(results)
    everything[RANKS] = _over_ranks(results)
    kept = {
        panel: {name: sorted(p, key=lambda p: p.x) for name, p in lines.items() if len(p) > 1}
        for panel, lines in everything.items()
    }
    return {panel: lines for panel, lines in kept.items() if lines}


def draw(results: Latencies, path: Path) -> bool:
    """Draw SVG. Returns False, and writes no file, without a panel. Raises OSError."""
    from matplotlib.ticker import NullLocator

    shown = panels(results)
    if not shown:
        return False
    names = list(dict.fromkeys(name for lines in shown.values() for name in lines))
    colours = dict(zip(names, COLOURS * len(names), strict=False))
    dashes = {name: ("o-", "s--", "^:")[n // len(COLOURS) % 3] for n, name in enumerate(names)}
    with drawn(path, size=(4.4 * len(shown), 3.8)) as figure:
        for number, (title, lines) in enumerate(shown.items(), 1):
            panel: Any = figure.add_subplot(1, len(shown), number)
            for name, points in lines.items():
                x, y = [p.x for p in points], [p.y for p in points]
                panel.plot(x, y, dashes[name], color=colours[name], label=name)
                for point in points:
                    panel.annotate(point.label, (point.x, point.y), xytext=(3, 4), fontsize=7,
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
    return True


def _over_prompts(results: Latencies) -> Lines:
    lines: Lines = {}
    size = min(results.plan.batch_sizes)
    for table in results.tables:
        for cell in _cells(table, [size]):
            seconds = float(np.mean([sample.prefill_seconds for sample in cell.counted]))
            name = _name(table, results, "sequence_length")
            lines.setdefault(name, []).append(Point(table.sequence_length, 1e3 * seconds))
    return lines


def _over_ranks(results: Latencies) -> Lines:
    groups: dict[str, list[Table]] = {}
    for table in results.tables:
        groups.setdefault(_name(table, results, "ranks"), []).append(table)
    lines: Lines = {}
    for name, tables in groups.items():
        sizes = [{c.batch_size for c in table.cells if c.counted} for table in tables]
        common = set.intersection(*sizes) if sizes else set()
        for table in tables if common else []:
            for cell in _cells(table, [max(common)]):
                line = f"{name}, batch {cell.batch_size}"
                lines.setdefault(line, []).append(Point(table.ranks, _decoded(cell)))
    return lines


def _cells(table: Table, sizes: Sequence[int]) -> Iterator[Cell]:
    return (cell for cell in table.cells if cell.counted and cell.batch_size in sizes)


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


def _step_ms(cell: Cell) -> float:
    return 1e3 * float(np.mean([sample.token_seconds for sample in cell.counted]))


def _decoded(cell: Cell) -> float:
    """Tokens/s of all rows while decoding."""
    return 1e3 * cell.batch_size / _step_ms(cell)
