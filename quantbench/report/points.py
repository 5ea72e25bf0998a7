"""What pictures show of an arm: speed-up, bytes and quality, each as one number or a band.

for point in points(rows):
    print(point.arm, point.memory_bytes, point.speed_up, point.band)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.answer.row import Row

# Perplexity ÷ the baseline's, up to and including. Above the last, text is visibly worse: such an
# arm is drawn hollow, since its speed is of no use.
BANDS = (("same", 1.01), ("near", 1.05), ("worse", 2.0))
BROKEN, UNKNOWN = "broken", "unknown"

# Short names of the quality bands, and their colours on white, for pictures.
LABELS = {
    "same": "perplexity ≤ 1 % above the baseline's",
    "near": "≤ 5 % above",
    "worse": "worse",
    BROKEN: "broken: more than twice",
    UNKNOWN: "quality not measured",
}
COLOURS = {
    "same": "#08784f",
    "near": "#c77700",
    "worse": "#b3261e",
    BROKEN: "#7d8590",
    UNKNOWN: "#4a5a9a",
}


@dataclass(frozen=True)
class Point:
    """An arm that was measured. None: not known."""

    arm: str
    memory_bytes: int  # weights and KV cache
    tok_s: float
    speed_up: float | None  # over the baseline, whose own is 1
    low: float | None  # of the interval of the speed-up, or of its range
    high: float | None
    confidence: float | None  # of the interval; None: low and high are a range
    perplexity_ratio: float | None  # perplexity ÷ the baseline's
    band: str  # a key of LABELS
    baseline: bool


def points(rows: Sequence[Row]) -> list[Point]:
    """A point for each arm that has samples, in the order of the rows."""
    return [_point(row, rows[0]) for row in rows if not row.failed and row.tok_s is not None]


def band(perplexity_ratio: float | None) -> str:
    """The quality band that an arm's perplexity is in: a key of LABELS."""
    if perplexity_ratio is None:
        return UNKNOWN
    return next((name for name, most in BANDS if perplexity_ratio <= most), BROKEN)


def staircase(shown: Sequence[Point], bands: Sequence[str]) -> list[Point]:
    """Arms of these bands that no smaller arm of them outruns, the smallest first."""
    front: list[Point] = []
    able = [point for point in shown if point.band in bands and point.speed_up is not None]
    for point in sorted(able, key=lambda point: (point.memory_bytes, -(point.speed_up or 0))):
        if not front or (point.speed_up or 0) > (front[-1].speed_up or 0):
            front.append(point)
    return front


def _point(row: Row, baseline: Row) -> Point:
    ratio, is_baseline = row.speed_up, row is baseline
    quality = _perplexity_ratio(row, baseline)
    return Point(
        arm=row.arm,
        memory_bytes=(row.weight_bytes or 0) + (row.kv_cache_bytes or 0),
        tok_s=row.tok_s or 0.0,
        speed_up=1.0 if is_baseline else ratio.value if ratio else None,
        low=ratio.low if ratio else None,
        high=ratio.high if ratio else None,
        confidence=ratio.confidence if ratio else None,
        perplexity_ratio=quality,
        band=band(quality),
        baseline=is_baseline,
    )


def _perplexity_ratio(row: Row, baseline: Row) -> float | None:
    """Infinity where the arm's perplexity is not a number."""
    if row is baseline:
        return 1.0 if row.perplexity else None
    if row.perplexity_ratio is not None:
        ratio = row.perplexity_ratio.value
        return math.inf if math.isnan(ratio) else ratio
    return None
