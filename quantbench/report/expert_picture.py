"""Which experts are chosen, as a picture: a heat map, and hit rates over capacities."""

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from quantbench.experts.placement import HitRates
from quantbench.experts.popularity import LayerSkew
from quantbench.report.drawing import COLOURS, drawn, tidy

MOST = 2.0  # even shares at the end of the colour scale
WAYS = {  # fields of HitRates: their lines' colours and dashes
    "ideal": (COLOURS[5], "--"),
    "popularity": (COLOURS[0], "o-"),
    "uniform": (COLOURS[1], "s-"),
}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>body{{font:16px sans-serif;margin:2em auto;max-width:72em;padding:0 1em}}
svg{{max-width:100%;height:auto}}pre{{overflow-x:auto}}</style></head>
<body><h1>Which experts are chosen</h1>
{picture}
<pre>{text}</pre>
</body></html>
"""


def draw(
    file: Path | io.StringIO, title: str, layers: Sequence[LayerSkew], rates: Sequence[HitRates]
) -> None:
    """Draw SVG. Raises OSError."""
    with drawn(file, size=(11, min(12.0, max(3.4, 1.6 + 0.22 * len(layers))))) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
        _heat(figure, left, layers)
        _rates(right, rates)
        figure.suptitle(title, fontsize=9)


def page(
    title: str, layers: Sequence[LayerSkew], rates: Sequence[HitRates], lines: Sequence[str]
) -> str:
    """A page with the picture and the tables. lines: as the terminal shows them."""
    svg = io.StringIO()
    draw(svg, title, layers, rates)
    picture = svg.getvalue()
    text = escape("\n".join(lines))
    return PAGE.format(title=escape(title), picture=picture[picture.index("<svg") :], text=text)


def _heat(figure: Any, axes: Any, layers: Sequence[LayerSkew]) -> None:
    values = [[share * len(layer.shares) for share in layer.shares] for layer in layers]
    image = axes.imshow(values, vmin=0, vmax=MOST, cmap="RdBu_r", aspect="auto")
    names = [f"{layer.layer}{' (flat)' if layer.is_flat else ''}" for layer in layers]
    axes.set_yticks(range(len(layers)), names)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    if len(values[0]) <= 16:
        axes.set_xticks(range(len(values[0])))
    figure.colorbar(image, ax=axes, extend="max", label="chosen, × an even share")


def _rates(axes: Any, rates: Sequence[HitRates]) -> None:
    shares = [100 * one.share for one in rates]
    for name, (colour, dashes) in WAYS.items():
        values = [100 * getattr(one, name) for one in rates]
        axes.plot(shares, values, dashes, color=colour, label=name, markersize=4)
    tidy(axes, "experts in fast memory, %", "assignments that find their expert there, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 102)
    axes.legend(frameon=False)
