"""Speed, memory and quality of all arms in one picture, with the arms that no other beats.

Bytes on a logarithmic axis, speed-up with the interval that the verdict is read from, colour by
the class of KL. The staircases join the fastest arms of each size whose quality is not noticeably
worse, and that is good.
"""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench.compare.limits import memory_bytes
from quantbench.compare.row import Row
from quantbench.quality.thresholds import BROKEN, CLASSES, class_of
from quantbench.report.interval import Interval
from quantbench.report.svg import drawn, tidy

UNKNOWN = "quality not measured"
BANDS = [name for _, name, _ in CLASSES]  # of KL, the best first
LABELS = {
    **{name: f"{name}: KL ≤ {most:g}" for most, name, _ in CLASSES},
    BROKEN: f"broken: KL > {CLASSES[-1][0]:g}",
    UNKNOWN: UNKNOWN,
}
# On white; an arm whose text is broken is drawn hollow, since its speed is of no use.
HEX = ("#08784f", "#4c8f1f", "#c77700", "#b3261e", "#7d8590", "#4a5a9a")
COLOURS, MARKERS = dict(zip(LABELS, HEX, strict=True)), dict(zip(LABELS, "oDv^os", strict=True))
FRONTS = {BANDS[0]: BANDS[:1], BANDS[1]: BANDS[:2]}  # bands of arms that a dashed line joins
TICKS = [digits * 10**power for power in (-1, 0, 1, 2) for digits in (1, 1.5, 2, 3, 4, 5, 7)]
MOST_NAMED = 16  # arms that are all named


@dataclass(frozen=True)
class Point:
    """An arm whose speed-up is known."""

    arm: str
    memory_bytes: int  # as the recommendation counts it
    speed_up: Interval  # of a whole run, over the baseline
    band: str  # a key of LABELS
    baseline: bool


def points(rows: Sequence[Row]) -> list[Point]:
    """A point for each arm that has a speed-up, and the baseline's, in the order of the rows."""
    measured = any(row.kl is not None for row in rows)
    made = []
    for row in rows:
        is_baseline = row is rows[0]
        speed = Interval(1.0) if is_baseline else row.speed_up
        memory = memory_bytes(row)
        if speed and memory and not row.failed and row.tok_s is not None:
            kl = 0.0 if is_baseline and measured and row.kl is None else row.kl
            made.append(Point(row.arm, memory, speed, band(kl), is_baseline))
    return made


def band(kl: float | None) -> str:
    """The quality band that a KL divergence is in: a key of LABELS."""
    return UNKNOWN if kl is None else class_of(kl)


def front(shown: Sequence[Point], bands: Sequence[str]) -> list[Point]:
    """Arms of these bands that no smaller arm of them outruns, the smallest first."""
    best: list[Point] = []
    able = [point for point in shown if point.band in bands]
    for point in sorted(able, key=lambda point: (point.memory_bytes, -point.speed_up.value)):
        if not best or point.speed_up.value > best[-1].speed_up.value:
            best.append(point)
    return best


def draw(rows: Sequence[Row], file: Path | io.StringIO, title: str = "") -> None:
    """Draw SVG. title: model, machine, how it decoded. Raises OSError."""
    shown = points(rows)
    with drawn(file, size=(8.4, 5.4)) as figure:
        axes = figure.add_subplot()
        unit = 1e9 if max((p.memory_bytes for p in shown), default=0) >= 1e9 else 1e6
        name = "GB" if unit == 1e9 else "MB"
        tidy(
            axes,
            f"peak memory, {name} (log scale)",
            "speed-up of whole runs over the baseline (log scale)",
        )
        axes.set_title("\n".join(textwrap.wrap(title, 100)), loc="left", parse_math=False)
        if shown:
            for part in (_scale, _fronts, _markers, _names):
                part(axes, shown, unit)
            handles, names = axes.get_legend_handles_labels()
            by_label = dict(zip(names, handles, strict=True))
            labels = [label for label in LABELS.values() if label in by_label]  # the best first
            handles = [by_label[label] for label in labels]
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels),
                          frameon=False, handletextpad=0.1, columnspacing=1.2)  # fmt: skip


def _scale(axes: Any, shown: Sequence[Point], unit: float) -> None:
    """Logarithmic, a little wider than what is shown, with round numbers as ticks."""
    from matplotlib.ticker import NullLocator

    sizes = [point.memory_bytes / unit for point in shown]
    speeds = [end for p in shown for end in p.speed_up.to_json()]
    for name, values, suffix in (("x", sizes, ""), ("y", speeds, " ×")):
        low, high = min(values) / 1.15, max(values) * 1.15
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
        axis = getattr(axes, f"{name}axis")
        axis.set_minor_locator(NullLocator())
        if len(ticks) > 1:
            axis.set_ticks(ticks, [f"{tick:g}{suffix}" for tick in ticks])


def _fronts(axes: Any, shown: Sequence[Point], unit: float) -> None:
    right, bottom = axes.get_xlim()[1], axes.get_ylim()[0]
    unmeasured = all(point.band == UNKNOWN for point in shown)
    for name, bands in {UNKNOWN: [UNKNOWN]}.items() if unmeasured else FRONTS.items():
        if steps := front(shown, bands):
            x = [point.memory_bytes / unit for point in steps]
            y = [point.speed_up.value for point in steps]
            axes.plot([x[0], *x, right], [bottom, *y, y[-1]], drawstyle="steps-post",
                      color=COLOURS[name], linestyle=(0, (5, 3)), linewidth=1.2, zorder=1,
                      label="_front")  # fmt: skip


def _markers(axes: Any, shown: Sequence[Point], unit: float) -> None:
    for point in shown:
        x, speed, colour = point.memory_bytes / unit, point.speed_up, COLOURS[point.band]
        ends = speed.to_json()
        axes.plot([x] * len(ends), sorted(ends), color=colour, linewidth=1.5, zorder=2)
        face, edge = ("white", colour) if point.band == BROKEN else (colour, "white")
        axes.plot([x], [speed.value], MARKERS[point.band], markersize=8, zorder=3, color=colour,
                  markerfacecolor=face, markeredgecolor=edge, label=LABELS[point.band])  # fmt: skip


def _names(axes: Any, shown: Sequence[Point], unit: float) -> None:
    """Names at their markers; of many arms only the fastest of each size. The tables have all."""
    fastest = {point.arm for bands in FRONTS.values() for point in front(shown, bands)}
    for number, point in enumerate(sorted(shown, key=lambda point: point.memory_bytes)):
        if len(shown) <= MOST_NAMED or point.baseline or point.arm in fastest:
            axes.annotate(point.arm, (point.memory_bytes / unit, point.speed_up.value),
                          xytext=(8, (8, -12)[number % 2]), textcoords="offset points",
                          ha="right" if point.baseline else "left", parse_math=False)  # fmt: skip
