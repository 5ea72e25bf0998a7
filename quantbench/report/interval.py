"""Figures with ends, as rows hold them, JSON has them and tables show them.

Interval.of(stats.Interval(…)).inverse      # the speed-up that `ab` shows of an arm
"""

import math
from dataclasses import dataclass

from quantbench import stats


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % interval, which a comparison's intervals have together; `low` and
    `high` are None where there were too few measurements for one."""

    value: float
    low: float | None = None
    high: float | None = None

    @staticmethod
    def of(interval: stats.Interval) -> "Interval":
        """Seconds ÷ the baseline's seconds: below 1 the arm is faster."""
        known = math.isfinite(interval.half_width)
        return Interval(interval.ratio, *((interval.low, interval.high) if known else ()))

    @property
    def inverse(self) -> "Interval":
        """The speed-up, above 1 where the arm is faster."""
        ends = () if self.low is None or self.high is None else (1 / self.high, 1 / self.low)
        return Interval(1 / self.value, *ends)

    @property
    def ends(self) -> str:
        """1.85 to 1.87"""
        known = self.low is not None and self.high is not None
        return f"{self.low:.2f} to {self.high:.2f}" if known else "no interval"

    def written(self, form: str, to: str = " to ") -> str:
        """0.86 (0.85 to 0.87), each number in this format."""
        if self.low is None or self.high is None:
            return f"{self.value:{form}}"
        return f"{self.value:{form}} ({self.low:{form}}{to}{self.high:{form}})"

    def to_json(self) -> list[float]:
        """[value, low, high], or [value]."""
        return [n for n in (self.value, self.low, self.high) if n is not None]

    @staticmethod
    def from_json(value: object) -> "Interval":
        """Read what `to_json` wrote, and what it once did: {"value": …, "low": …, "high": …}.
        Raises ValueError for anything else."""
        if isinstance(value, dict):
            known = ("value", "low", "high") if value.get("confidence") else ("value",)
            value = [value.get(name) for name in known]
        numbers = value if isinstance(value, list) else []
        if len(numbers) not in (1, 3) or not all(isinstance(n, int | float) for n in numbers):
            raise ValueError(f"an interval is [value, low, high] or [value]; given: {value!r:.80}")
        return Interval(*map(float, numbers))
