"""Pictures of latency results: latency against throughput, and scaling.

Panels, of which those are drawn that have two points on a line:
- time per output token over decoded tokens/s of all rows, a point for each batch size;
- decoded tokens/s over batch sizes;
- time to first token at the smallest batch size over prompt lengths;
- decoded tokens/s over ranks, at the largest batch size that every number of ranks has.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantbench.answer.latency import Latencies, Table
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
    shown: dict[str, Lines] = {panel: {} for panel in AXES}
    smallest, sizes = min(results.plan.batch_sizes), dict[str, list[set[int]]]()
    for table in results.tables:
        own = {cell.batch_size for cell in table.cells if cell.counted}
        sizes.setdefault(_name(table, results, "ranks"), []).append(own)
    largest = {name: max(set.intersection(*own), default=0) for name, own in sizes.items()}

    def add(panel: str, line: str, x: float, y: float, label: str = "") -> None:
        shown[panel].setdefault(line, []).append(Point(x, y, label))

    for table in results.tables:
        line, over_prompts, over_ranks = (
            _name(table, results, without) for without in ("", "sequence_length", "ranks")
        )
        for cell in (cell for cell in table.cells if cell.counted):
            size = cell.batch_size
            step_ms = 1e3 * float(np.mean([sample.token_seconds for sample in cell.counted]))
            prompt_ms = 1e3 * float(np.mean([sample.prefill_seconds for sample in cell.counted]))
            decoded = 1e3 * size / step_ms  # tokens/s of all rows
            add(LATENCY, line, decoded, step_ms, str(size))
            add(BATCH, line, size, decoded)
            if size == smallest:
                add(PROMPT, over_prompts, table.sequence_length, prompt_ms)
            if size == largest[over_ranks]:
                add(RANKS, f"{over_ranks}, batch {size}", table.ranks, decoded)
    kept = {
        panel: {name: sorted(p, key=lambda p: p.x) for name, p in lines.items() if len(p) > 1}
        for panel, lines in shown.items()
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
