"""Speed, memory and quality of all arms in one picture, with those that no other arm beats."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare.figures.row import Row


def objectives(row: Row) -> tuple[float, float, float] | None:
    """Seconds per token, bytes of weights and cache, and perplexity, 0 where it was not measured;
    less is better. None for an arm without samples."""
    if row.failed or row.tok_s is None:
        return None
    return 1 / row.tok_s, _bytes(row), row.perplexity or 0.0


def front(rows: Sequence[Row]) -> list[bool]:
    """Whether no other arm is at least as good in everything and better in something."""
    points = [objectives(row) for row in rows]
    return [
        point is not None and not any(rival and _beats(rival, point) for rival in points)
        for point in points
    ]


def draw(rows: Sequence[Row], paths: Sequence[Path]) -> None:
    """Tokens per second against bytes, coloured by perplexity, to files of the endings given."""
    from matplotlib.figure import Figure

    shown = [(row, best) for row, best in zip(rows, front(rows), strict=True) if objectives(row)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    largest = max((row.weight_bytes or 0 for row, _ in shown), default=0)
    unit, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    for row, best in shown:
        x, y = _bytes(row) / unit, row.tok_s or 0.0
        edge = "black" if best else "none"
        colour = [_colour(row, [row for row, _ in shown])]
        axes.scatter([x], [y], c=colour, s=90 if best else 45, edgecolors=edge, zorder=2)
        label = row.arm
        if row.perplexity:
            label += f"\nperplexity {row.perplexity:.2f}"
        where: dict[str, Any] = {"xytext": (7, 4), "textcoords": "offset points", "fontsize": 8}
        axes.annotate(label, (x, y), annotation_clip=False, **where)
    axes.set_xlabel(f"weights and KV cache, {name}")
    axes.set_ylabel("tokens per second")
    axes.set_title(
        "Up, left and light are better. Ringed: no other arm is as good in all three",
        fontsize=9,
    )
    axes.margins(0.2)
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    for path in paths:
        figure.savefig(path, dpi=150)


def _bytes(row: Row) -> int:
    """Weights and KV cache."""
    return (row.weight_bytes or 0) + (row.kv_cache_bytes or 0)


def _beats(rival: Sequence[float], point: Sequence[float]) -> bool:
    pairs = list(zip(rival, point, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _colour(row: Row, rows: Sequence[Row]) -> tuple[float, float, float]:
    """From light yellow, the lowest perplexity, to dark violet, by its logarithm; grey if unknown.

    2-bit schemes are worse by orders of magnitude: a linear scale would not tell the others apart.
    """
    if not row.perplexity:
        return 0.6, 0.6, 0.6
    logs = [math.log(row.perplexity) for row in rows if row.perplexity]
    worst = max(max(logs) - min(logs), 0.1)
    share = (math.log(row.perplexity) - min(logs)) / worst
    light, dark = (0.98, 0.83, 0.25), (0.27, 0.0, 0.33)
    red, green, blue = (a + (b - a) * share for a, b in zip(light, dark, strict=True))
    return red, green, blue
