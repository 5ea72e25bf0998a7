"""Speed, memory and quality of all arms in one picture, with those that no other arm beats."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def objectives(row: Row) -> tuple[float, ...] | None:
    """Each the smaller the better: seconds per token, bytes of weights and cache, perplexity if
    it is known. None for an arm without samples."""
    if row["failed"] or "tok_s" not in row:
        return None
    speed, memory = 1 / row["tok_s"], row["weight_bytes"] + row["kv_cache_bytes"]
    return speed, memory, row["perplexity"] or 0.0


def front(rows: Sequence[Row]) -> list[bool]:
    """Whether no other arm is at least as good in everything and better in something."""
    points = [objectives(row) for row in rows]
    return [
        mine is not None
        and not any(
            other is not None and other != mine and all(map(float.__le__, other_f, mine_f))
            for other in points
            for other_f, mine_f in [(tuple(map(float, other or ())), tuple(map(float, mine)))]
        )
        for mine in points
    ]


def draw(rows: Sequence[Row], paths: Sequence[Path]) -> None:
    """Tokens per second against bytes, coloured by perplexity, to files of the endings given."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [(row, best) for row, best in zip(rows, front(rows), strict=True) if objectives(row)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    known = any(row["perplexity"] for row, _ in shown)
    for best, size, edge in ((False, 40, "none"), (True, 90, "black")):
        some = [row for row, is_best in shown if is_best == best]
        if not some:
            continue
        points = axes.scatter(
            [(row["weight_bytes"] + row["kv_cache_bytes"]) / 1e6 for row in some],
            [row["tok_s"] for row in some],
            c=[row["perplexity"] or float("nan") for row in some] if known else "tab:blue",
            **(_scale([row for row, _ in shown]) if known else {}),
            s=size,
            edgecolors=edge,
            plotnonfinite=True,
            label="no other arm is better in everything" if best else "another arm is",
        )
    for row, _ in shown:
        place = ((row["weight_bytes"] + row["kv_cache_bytes"]) / 1e6, row["tok_s"])
        axes.annotate(row["arm"], place, xytext=(6, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("weights and KV cache, MB (less is better)")
    axes.set_ylabel("tokens per second (more is better)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    if shown:
        axes.legend(fontsize=8)
        if known:
            figure.colorbar(points, label="perplexity (less is better)")
    for path in paths:
        figure.savefig(path, dpi=150)


def _scale(rows: Sequence[Row]) -> dict[str, Any]:
    """Colours over the logarithm of perplexity: 2-bit schemes are worse by magnitudes."""
    from matplotlib.colors import LogNorm

    values = [row["perplexity"] for row in rows if row["perplexity"]]
    return {"norm": LogNorm(min(values), max(max(values), min(values) * 1.01)), "cmap": "viridis_r"}
