"""Speed and quality of every arm as bars, the fastest first, on one scale; from the rows of `ab`.

A bar's colour is its quality's band; a broken arm's bar is hollow. The same rows, the same file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantbench.compare.figures.row import Row
from quantbench.compare.output.points import BROKEN, COLOURS, LABELS, Point, points

STYLE: Any = {"svg.hashsalt": "quantbench", "svg.fonttype": "none", "font.size": 10}


def draw(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Draw SVG or PNG, by the file's ending. title: model, machine and date. Raises OSError."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = sorted(points(rows), key=lambda point: point.tok_s)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 1.6 + 0.3 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        for place, point in enumerate(shown):
            colour = COLOURS[point.band]
            face = "white" if point.band == BROKEN else colour
            axes.barh(place, point.tok_s, color=face, edgecolor=colour, height=0.66)
            axes.annotate(
                _words(point), (point.tok_s, place), xytext=(5, 0), textcoords="offset points",
                va="center", fontsize=8.5,
            )  # fmt: skip
        axes.set_yticks(range(len(shown)), [point.arm for point in shown], parse_math=False)
        axes.set_xlabel("tokens per second, prompt included")
        axes.set_xlim(0, 1.5 * max((point.tok_s for point in shown), default=1))
        axes.set_title(title, fontsize=10, loc="left", wrap=True)
        axes.spines[["top", "right"]].set_visible(False)
        bands = [band for band in LABELS if any(point.band == band for point in shown)]
        handles = [
            Patch(
                facecolor="white" if band == BROKEN else COLOURS[band],
                edgecolor=COLOURS[band],
                label=LABELS[band],
            )
            for band in bands
        ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=3, frameon=False,
            fontsize=8.5,
        )  # fmt: skip
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)


def _words(point: Point) -> str:
    """The text beside a bar: 31.20 tok/s, perplexity 1.004 ×."""
    words = f"{point.tok_s:.2f} tok/s"
    if point.perplexity_ratio is not None and not point.baseline:
        words += f", perplexity {point.perplexity_ratio:.3f} ×"
    return words
