"""Decoding as the work grows: a panel for each axis, solid lines for what was measured, dashed ones
for the limit. The same points give the same file, so that git shows only what has changed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

TITLES = {
    "layers": "number of layers",
    "batch": "rows at once",
    "depth": "positions in the cache, thousands",
}
COLOURS = ("#1b6ca8", "#d95f0e", "#2a9d5c", "#8c510a", "#7b3294", "#666666")
# Ids derive from the salt instead of a random number; text stays text, whatever fonts there are.
STYLE: Any = {"svg.hashsalt": "quantbench", "svg.fonttype": "none", "font.size": 9}


class Point(Protocol):
    """What is drawn of a measurement."""

    @property
    def axis(self) -> str: ...  # a key of TITLES
    @property
    def value(self) -> int: ...  # on that axis
    @property
    def scheme(self) -> str: ...
    @property
    def decode_tok_s(self) -> float | None: ...
    @property
    def limit_tok_s(self) -> float | None: ...


def draw(points: Sequence[Point], path: Path) -> None:
    """As SVG. Raises OSError."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    axes = [name for name in TITLES if any(point.axis == name for point in points)]
    schemes = list(dict.fromkeys(point.scheme for point in points))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4 * len(axes), 3.6), layout="constrained")
        for number, name in enumerate(axes, 1):
            panel = figure.add_subplot(1, len(axes), number)
            for scheme, colour in zip(schemes, COLOURS * len(schemes), strict=False):
                _line(panel, name, scheme, colour, points)
            panel.set_xlabel(TITLES[name])
            panel.set_ylabel(
                "tokens per second, all rows" if name == "batch" else "tokens per second"
            )
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            panel.yaxis.set_minor_locator(NullLocator())
            panel.yaxis.set_major_formatter("{x:g}")
            panel.grid(alpha=0.3)
            if name == "batch":
                panel.set_xscale("log", base=2)
                panel.xaxis.set_minor_locator(NullLocator())
            values = sorted({point.value / _unit(name) for point in points if point.axis == name})
            panel.set_xticks(values, [f"{value:.3g}" for value in values])
            if number == 1:
                panel.legend(title="dashed: the limit", fontsize=8, title_fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _unit(axis: str) -> int:
    return 1000 if axis == "depth" else 1


def _line(panel: Any, axis: str, scheme: str, colour: str, points: Sequence[Point]) -> None:
    line = [point for point in points if (point.axis, point.scheme) == (axis, scheme)]
    line.sort(key=lambda point: point.value)
    x = [point.value / _unit(axis) for point in line]
    panel.plot(x, [point.decode_tok_s for point in line], "o-", color=colour, label=scheme)
    if all(point.limit_tok_s for point in line):
        panel.plot(x, [point.limit_tok_s for point in line], "--", color=colour, alpha=0.7)
