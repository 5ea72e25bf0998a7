"""What all pictures share. The same data give the same file, so that git shows only what changed.

with drawn(path, size=(8, 5)) as figure:
    axes = figure.add_subplot()
    …
    tidy(axes, "batch size", "tokens per second")
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Ids derive from the salt instead of a random number; text stays text, whatever fonts there are.
STYLE: Any = {"svg.hashsalt": "quantbench", "svg.fonttype": "none", "font.size": 9}
COLOURS = ("#1b6ca8", "#d95f0e", "#2a9d5c", "#8c510a", "#7b3294", "#666666")


@contextmanager
def drawn(file: Path | io.StringIO, size: tuple[float, float]) -> Iterator[Any]:
    """A figure of this size in inches, written as SVG afterwards. Raises OSError."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(file, format="svg", metadata={"Date": None})


def tidy(axes: Any, x: str = "", y: str = "") -> None:
    """Labels, a faint grid, and no frame at the top and the right."""
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
