"""Speed, memory and quality of all arms in one picture, with the arms that no other beats.

Bytes on a logarithmic axis, speed-up with the interval that the verdict is read from, colour by
the class of KL. The staircases join the fastest arms of each size whose quality is not noticeably
worse, and that is good.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantbench.answer.row import Row
from quantbench.quality.thresholds import BROKEN
from quantbench.report.points import (
    BANDS,
    COLOURS,
    LABELS,
    UNKNOWN,
    Point,
    points,
    staircase,
)

MARKERS = dict(zip(LABELS, "oDv^os", strict=True))
FRONTS = ((BANDS[0], BANDS[:1]), (BANDS[1], BANDS[:2]))
TICKS = [digits * 10**power for power in (-1, 0, 1, 2) for digits in (1, 1.5, 2, 3, 4, 5, 7)]
MOST_NAMED = 16  # arms that are all named
STYLE: Any = {"svg.hashsalt": "quantbench", "svg.fonttype": "none", "font.size": 10}


def draw(rows: Sequence[Row], paths: Sequence[Path], title: str = "") -> None:
    """Draw into each file, by its ending. title: model, machine, how it decoded. Raises OSError."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = [point for point in points(rows) if point.speed_up is not None and point.memory_bytes]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 5.4), layout="constrained")
        axes = figure.add_subplot()
        unit = 1e9 if max((p.memory_bytes for p in shown), default=0) >= 1e9 else 1e6
        if shown:
            _axes(axes, shown, unit)
            _fronts(axes, shown, unit)
            for point in shown:
                _marker(axes, point, unit)
            _legend(figure, shown)
        axes.set_xlabel(f"peak memory, {'GB' if unit == 1e9 else 'MB'} (log scale)")
        axes.set_ylabel("speed-up over the baseline (log scale)")
        axes.set_title("\n".join(textwrap.wrap(title, 100)), fontsize=10, loc="left")
        axes.grid(color="#e6e9ee")
        axes.spines[["top", "right"]].set_visible(False)
        if shown:
            _labels(axes, shown, unit)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(path, dpi=150, metadata=metadata)


def _axes(axes: Any, shown: Sequence[Point], unit: float) -> None:
    """Logarithmic, a little wider than what is shown, with round numbers as ticks."""
    from matplotlib.ticker import NullLocator

    sizes = [point.memory_bytes / unit for point in shown]
    speeds = [end for p in shown for end in (p.low, p.speed_up, p.high) if end]
    for name, values, suffix in (("x", sizes, ""), ("y", speeds, " ×")):
        low, high = min(values) / 1.15, max(values) * 1.15
        ticks = [tick for tick in TICKS if low <= tick <= high]
        getattr(axes, f"set_{name}scale")("log")
        getattr(axes, f"set_{name}lim")(low, high)
        axis = getattr(axes, f"{name}axis")
        axis.set_minor_locator(NullLocator())
        if len(ticks) > 1:
            axis.set_ticks(ticks, [f"{tick:g}{suffix}" for tick in ticks])


def _fronts(axes: Any, shown: Sequence[Point], unit: float) -> None:
    right, bottom = axes.get_xlim()[1], axes.get_ylim()[0]
    unmeasured = all(point.band == UNKNOWN for point in shown)
    for band, bands in [(UNKNOWN, (UNKNOWN,))] if unmeasured else FRONTS:
        if steps := staircase(shown, bands):
            sizes = [point.memory_bytes / unit for point in steps]
            speeds = [point.speed_up for point in steps]
            axes.plot(
                [sizes[0], *sizes, right],
                [bottom, *speeds, speeds[-1]],
                drawstyle="steps-post",
                color=COLOURS[band],
                linestyle=(0, (5, 3)),
                linewidth=1.2,
                alpha=0.8,
                zorder=1,
            )


def _marker(axes: Any, point: Point, unit: float) -> None:
    x, y, colour = point.memory_bytes / unit, point.speed_up or 1.0, COLOURS[point.band]
    if point.low is not None and point.high is not None:
        axes.plot([x, x], [point.low, point.high], color=colour, linewidth=1.5, zorder=2)
    axes.plot(
        [x],
        [y],
        marker=MARKERS[point.band],
        markersize=8,
        color=colour,
        markerfacecolor="white" if point.band == BROKEN else colour,
        markeredgecolor=colour if point.band == BROKEN else "white",
        linestyle="none",
        zorder=3,
    )


def _legend(figure: Any, shown: Sequence[Point]) -> None:
    from matplotlib.lines import Line2D

    bands = [band for band in LABELS if any(point.band == band for point in shown)]
    handles = [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=MARKERS[band],
            color=COLOURS[band],
            markerfacecolor="white" if band == BROKEN else COLOURS[band],
            label=LABELS[band],
        )
        for band in bands
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(bands), frameon=False, fontsize=8.5,
        handletextpad=0.1, columnspacing=1.2,
    )  # fmt: skip


def _labels(axes: Any, shown: Sequence[Point], unit: float) -> None:
    """Names at their markers; of many arms only the fastest of each size. report.html has all."""
    fastest = {point.arm for _, bands in FRONTS for point in staircase(shown, bands)}
    for number, point in enumerate(sorted(shown, key=lambda point: point.memory_bytes)):
        if len(shown) <= MOST_NAMED or point.baseline or point.arm in fastest:
            axes.annotate(
                point.arm,
                (point.memory_bytes / unit, point.speed_up),
                xytext=(8, (8, -12)[number % 2]),
                textcoords="offset points",
                ha="right" if point.baseline else "left",
                fontsize=8.5,
                parse_math=False,
            )
