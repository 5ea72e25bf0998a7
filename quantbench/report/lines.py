"""Decoding as the work grows: above, what was measured (solid) and the limit (dashed), for each
axis; beneath, the share of the limit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantbench.answer import growth
from quantbench.answer.growth import Point
from quantbench.report.drawing import COLOURS, drawn, tidy

# A scheme has its colour in every picture; others take those that are left, in order.
SCHEMES = {"none": "#666666", "int8wo": "#1b6ca8", "int4wo-128": "#d95f0e", "fp6": "#2a9d5c"}
LIMIT = (
    "dashed: the limit, bytes that a step reads ÷ memory bandwidth; "
    "what fits into a cache can be above"
)


AXES = {  # labels of both axes; batch sizes are on a logarithmic one
    "layers": ("number of layers", "tokens per second"),
    "batch": ("batch size", "tokens per second, whole batch"),
    "depth": ("tokens already in the cache", "tokens per second"),
}


def draw(points: Sequence[Point], path: Path, caption: str = "") -> None:
    """Draw SVG. caption: machine and date. Raises OSError."""
    names = [name for name in AXES if any(point.axis == name for point in points)]
    colours = _colours(list(dict.fromkeys(point.scheme or "" for point in points)))
    with drawn(path, size=(max(4 * len(names), 6), 5.2)) as figure:
        panels = figure.subplots(2, len(names), sharex="col", squeeze=False, height_ratios=(2.2, 1))
        for (above, beneath), name in zip(panels.T, names, strict=True):
            on_axis = [point for point in points if point.axis == name]
            for scheme, colour in colours.items():
                _lines(above, beneath, [p for p in on_axis if p.scheme == scheme], colour)
            _dress(above, beneath, name, on_axis)
        figure.suptitle("\n".join(part for part in (caption, LIMIT) if part), fontsize=9, x=0.5)
        handles, labels = panels[0][0].get_legend_handles_labels()
        columns = max(1, len(labels))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _colours(schemes: Sequence[str]) -> dict[str, str]:
    """A colour for each scheme, in the order of SCHEMES and then as given."""
    left = iter([colour for colour in COLOURS if colour not in SCHEMES.values()] * len(schemes))
    others = {scheme: next(left) for scheme in schemes if scheme not in SCHEMES}
    return {name: colour for name, colour in SCHEMES.items() if name in schemes} | others


def _lines(above: Any, beneath: Any, points: Sequence[Point], colour: str) -> None:
    line = sorted(points, key=lambda point: point.value)
    if not line:
        return
    values = [point.value for point in line]
    speeds = [point.decode_tok_s for point in line]
    above.plot(values, speeds, "o-", color=colour, markersize=4, label=line[0].scheme)
    if all(point.limit_tok_s for point in line):
        above.plot(values, [p.limit_tok_s for p in line], "--", color=colour, alpha=0.7)
        shares = [100 * (p.decode_tok_s or 0) / (p.limit_tok_s or 1) for p in line]
        beneath.plot(values, shares, "o-", color=colour, markersize=4)


def _dress(above: Any, beneath: Any, axis: str, points: Sequence[Point]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    above.set_title(points[0].model or growth.AXES[axis].model, fontsize=9, fontweight="bold")
    label, rate = AXES[axis]
    tidy(above, y=rate)
    tidy(beneath, label, "% of the limit")
    above.set_yscale("log")
    above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    above.yaxis.set_minor_locator(NullLocator())
    above.yaxis.set_major_formatter("{x:g}")
    beneath.set_ylim(0, max(110, beneath.get_ylim()[1]))
    beneath.axhline(100, color="#444", linestyle="--", linewidth=0.9)
    if axis == "batch":
        beneath.set_xscale("log", base=2)
        beneath.xaxis.set_minor_locator(NullLocator())
    values = sorted({point.value for point in points})
    short = [f"{n // 1024}k" if n and n % 1024 == 0 else str(n) for n in values]  # 65536: 64k
    beneath.set_xticks(values, short)
