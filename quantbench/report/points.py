"""What pictures show of an arm: speed-up, bytes and quality, each as one number or a band.

for point in points(rows):
    print(point.arm, point.memory_bytes, point.speed_up, point.band)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.answer.limits import memory_bytes
from quantbench.answer.row import Row
from quantbench.quality.thresholds import BROKEN, CLASSES, class_of

UNKNOWN = "quality not measured"
BANDS = [name for _, name, _ in CLASSES]  # of KL, the best first
# Colours on white; an arm whose text is broken is drawn hollow, since its speed is of no use.
COLOURS = dict(
    zip(
        [*BANDS, BROKEN, UNKNOWN],
        ["#08784f", "#4c8f1f", "#c77700", "#b3261e", "#7d8590", "#4a5a9a"],
        strict=True,
    )
)
LABELS = {
    **{name: f"{name}: KL ≤ {most:g}" for most, name, _ in CLASSES},
    BROKEN: f"broken: KL > {CLASSES[-1][0]:g}",
    UNKNOWN: UNKNOWN,
}


@dataclass(frozen=True)
class Point:
    """An arm that was measured. None: not known."""

    arm: str
    memory_bytes: int  # as the recommendation counts it
    tok_s: float
    speed_up: float | None  # over the baseline, whose own is 1
    low: float | None  # of the interval of the speed-up, or of its range
    high: float | None
    confidence: float | None  # of the interval; None: low and high are a range
    band: str  # a key of LABELS
    baseline: bool


def points(rows: Sequence[Row]) -> list[Point]:
    """A point for each arm that has samples, in the order of the rows."""
    measured = any(row.kl is not None for row in rows)
    able = [row for row in rows if not row.failed and row.tok_s is not None]
    return [_point(row, rows[0], measured) for row in able]


def band(kl: float | None) -> str:
    """The quality band that a KL divergence is in: a key of LABELS."""
    return UNKNOWN if kl is None else class_of(kl)


def staircase(shown: Sequence[Point], bands: Sequence[str]) -> list[Point]:
    """Arms of these bands that no smaller arm of them outruns, the smallest first."""
    front: list[Point] = []
    able = [point for point in shown if point.band in bands and point.speed_up is not None]
    for point in sorted(able, key=lambda point: (point.memory_bytes, -(point.speed_up or 0))):
        if not front or (point.speed_up or 0) > (front[-1].speed_up or 0):
            front.append(point)
    return front


def _point(row: Row, baseline: Row, any_quality: bool) -> Point:
    ratio, is_baseline = row.speed_up, row is baseline
    kl = (0.0 if any_quality else None) if is_baseline else row.kl
    return Point(
        arm=row.arm,
        memory_bytes=memory_bytes(row) or 0,
        tok_s=row.tok_s or 0.0,
        speed_up=1.0 if is_baseline else ratio.value if ratio else None,
        low=ratio.low if ratio else None,
        high=ratio.high if ratio else None,
        confidence=ratio.confidence if ratio else None,
        band=band(kl),
        baseline=is_baseline,
    )
