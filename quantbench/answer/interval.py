"""Figures with ends, as rows hold them, JSON has them and tables show them.

Ratio.of(stats.Interval(…), 0.95).inverse   # what `ab` shows of an arm
Interval.of(Ratio.of(stats.Interval(…)))    # the same where no verdict hangs on it
"""

import math
from dataclasses import dataclass

from quantbench import stats


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % interval; `low` and `high` are None where there were too few
    measurements for one."""

    value: float
    low: float | None = None
    high: float | None = None

    @staticmethod
    def of(ratio: "Ratio") -> "Interval":
        if ratio.confidence is None:
            return Interval(ratio.value)
        return Interval(ratio.value, ratio.low, ratio.high)

    def __str__(self) -> str:
        return self.written(".3f")

    def written(self, form: str) -> str:
        """0.86 (0.85 to 0.87), each number in this format."""
        if self.low is None or self.high is None:
            return f"{self.value:{form}}"
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"

    def to_json(self) -> list[float]:
        """[value, low, high], or [value]."""
        if self.low is None or self.high is None:
            return [self.value]
        return [self.value, self.low, self.high]

    @staticmethod
    def from_json(value: object) -> "Interval":
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        numbers = value if isinstance(value, list) else []
        if len(numbers) not in (1, 3) or not all(isinstance(n, int | float) for n in numbers):
            raise ValueError(f"an interval is [value, low, high] or [value]; given: {value!r:.80}")
        return Interval(*map(float, numbers))


@dataclass(frozen=True)
class Ratio:
    """An arm against the baseline. `confidence` is that of all intervals of the comparison
    together; None where there are too few cycles for an interval, and low and high are the value.
    """

    value: float
    low: float
    high: float
    confidence: float | None = None

    @staticmethod
    def of(interval: stats.Interval, confidence: float = 0.95) -> "Ratio":
        """Seconds ÷ the baseline's seconds: below 1 the arm is faster."""
        if not math.isfinite(interval.half_width):
            return Ratio(interval.ratio, interval.ratio, interval.ratio)
        return Ratio(interval.ratio, interval.low, interval.high, confidence)

    @property
    def inverse(self) -> "Ratio":
        """The speed-up, above 1 where the arm is faster."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low, self.confidence)

    @property
    def ends(self) -> str:
        """1.85 to 1.87"""
        return "no interval" if self.confidence is None else f"{self.low:.2f} to {self.high:.2f}"

    def written(self, form: str) -> str:
        """1.86 (1.85 to 1.87), or 1.86 (no interval)."""
        if self.confidence is None:
            return f"{self.value:{form}} (no interval)"
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


SpeedUp = Ratio  # where it is one: above 1 is faster
