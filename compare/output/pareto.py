"""Speed, memory and quality of all arms in one picture, with those that no other arm beats."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def objectives(row: Row) -> tuple[float, float, float] | None:
    """Each the smaller the better: seconds per token, bytes of weights and cache, perplexity (0
    where nobody measured it). None for an arm without samples."""
    if row["failed"] or "tok_s" not in row:
        return None
    return 1 / row["tok_s"], row["weight_bytes"] + row["kv_cache_bytes"], row["perplexity"] or 0.0


def front(rows: Sequence[Row]) -> list[bool]:
    """Whether no other arm is at least as good in everything and better in something."""
    points = [objectives(row) for row in rows]
    return [
        mine is not None and not any(other is not None and _beats(other, mine) for other in points)
        for mine in points
    ]


def draw(rows: Sequence[Row], paths: Sequence[Path]) -> None:
    """Tokens per second against bytes, coloured by perplexity, to files of the endings given."""
    from matplotlib.figure import Figure

    shown = [(row, best) for row, best in zip(rows, front(rows), strict=True) if objectives(row)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    largest = max((row["weight_bytes"] for row, _ in shown), default=0)
    unit, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    for row, best in shown:
        x = (row["weight_bytes"] + row["kv_cache_bytes"]) / unit
        edge = "black" if best else "none"
        colour = [_colour(row, [row for row, _ in shown])]
        axes.scatter([x], [row["tok_s"]], c=colour, s=90 if best else 45, edgecolors=edge, zorder=2)
        said = row["arm"]
        if row["perplexity"]:
            said += f"\nperplexity {row['perplexity']:.2f}"
        where: dict[str, Any] = {"xytext": (7, 4), "textcoords": "offset points", "fontsize": 8}
        axes.annotate(said, (x, row["tok_s"]), annotation_clip=False, **where)
    axes.set_xlabel(f"weights and KV cache, {name}")
    axes.set_ylabel("tokens per second")
    axes.set_title(
        "Up and to the left is better, and so is light. Ringed: no other is as good in all three",
        fontsize=9,
    )
    axes.margins(0.2)
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    for path in paths:
        figure.savefig(path, dpi=150)


def _beats(other: Sequence[float], mine: Sequence[float]) -> bool:
    pairs = list(zip(other, mine, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _colour(row: Row, rows: Sequence[Row]) -> tuple[float, float, float]:
    """From light yellow, the lowest perplexity, to dark violet, by its logarithm; grey if unknown.

    2-bit schemes are worse by magnitudes: on a linear scale all others would be alike.
    """
    if not row["perplexity"]:
        return 0.6, 0.6, 0.6
    logs = [math.log(other["perplexity"]) for other in rows if other["perplexity"]]
    worst = max(max(logs) - min(logs), 0.1)
    share = (math.log(row["perplexity"]) - min(logs)) / worst
    light, dark = (0.98, 0.83, 0.25), (0.27, 0.0, 0.33)
    red, green, blue = (a + (b - a) * share for a, b in zip(light, dark, strict=True))
    return red, green, blue
