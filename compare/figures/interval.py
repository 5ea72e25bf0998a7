"""A figure with its 95 % interval, as rows hold it, JSON has it and tables show it."""

from dataclasses import dataclass

from compare.figures.statistics import Estimate


@dataclass(frozen=True)
class Interval:
    """`low` and `high` are None where there were too few rounds for an interval."""

    value: float
    low: float | None = None
    high: float | None = None

    @staticmethod
    def of(estimate: Estimate) -> "Interval":
        if not estimate.low:
            return Interval(estimate.ratio)
        return Interval(estimate.ratio, estimate.low, estimate.high)

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
        """What `to_json` gave. Raises ValueError for anything else."""
        numbers = value if isinstance(value, list) else []
        if len(numbers) not in (1, 3) or not all(isinstance(n, int | float) for n in numbers):
            raise ValueError(f"an interval is [value, low, high] or [value]; given: {value!r:.80}")
        return Interval(*map(float, numbers))
