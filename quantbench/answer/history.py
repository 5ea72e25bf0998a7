"""Speeds of a log's lines on several days, each relative to the limit that was read that day.

    history = History.read("replays.jsonl")
    history.against(key, now)               # change since the last day; None without one
    history.append(key, now)

A file of JSON lines: {"line": the command, "time": …, "values": seconds a token × bytes a second}.
Absolute speeds drift by half from day to day; these can be compared, as what slows both cancels:
log(seconds × limit) for each process, where the limit is bytes per second read next to it. The
means of two days are compared by Welch's t. How far days differ beyond that is unknown from two of
them; `day_scatter` estimates it from the earlier days of a line, and it is added.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from quantbench import files
from quantbench.answer.compared import CONFIDENCE
from quantbench.answer.interval import Ratio
from quantbench.errors import UsageError
from quantbench.log import log
from quantbench.quality.block_errors import LEAST_BLOCKS, Estimate
from quantbench.typed_json import from_json, parsed, to_json


@dataclass(frozen=True)
class Day:
    """One replay of a line: a value for each process, seconds a token × bytes a second."""

    line: str  # the command that it repeats
    time: str  # when, in local time
    values: list[float]


@dataclass(frozen=True)
class History:
    """What the file holds, oldest first."""

    path: Path
    days: list[Day]

    @staticmethod
    def read(path: str) -> "History":
        """Read the file; a missing one is an empty history. Raises UsageError for another kind."""
        place = Path(path)
        if not place.exists():
            files.check_output("--history", path, lambda _: True, "JSON lines")
            return History(place, [])
        lines = files.read_text("--history", path).splitlines()
        try:
            days = [from_json(Day, parsed(line)) for line in lines if line.strip()]
            if any(not day.values or min(day.values) <= 0 for day in days):
                raise ValueError("values above 0 are needed")
        except ValueError as error:
            why = f"it is not what replay --history writes: {error}"
            raise UsageError(files.refusal("--history", path, why)) from None
        return History(place, days)

    def against(self, line: str, values: Sequence[float]) -> Ratio | None:
        """Seconds now ÷ then, each by its own day's limit. How far days scatter is estimated from
        the earlier days of this line, where there are enough of them."""
        days = [level(day.values) for day in self.days if day.line == line]
        if not days or not values:
            return None
        scatter = day_scatter(days) if len(days) >= LEAST_BLOCKS else None
        return change(level(values), days[-1], scatter)

    def append(self, line: str, values: Sequence[float]) -> None:
        """Write the history. Raises LogError where the file cannot be written."""
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            return
        log.append_json(self.path, to_json(Day(line, time.strftime("%Y-%m-%d %H:%M"), [*values])))


def level(values: Sequence[float]) -> Estimate:
    """Mean logarithm of one run's values, one for each process: seconds × limit, above 0."""
    if not values or min(values) <= 0:
        raise ValueError(f"{len(values)} values: at least one, and all above 0")
    logs = np.log(values)
    count = len(logs)
    error = float(logs.std(ddof=1)) / math.sqrt(count) if count >= LEAST_BLOCKS else math.inf
    return Estimate(float(logs.mean()), error, count - 1)


def change(now: Estimate, then: Estimate, days: Estimate | None = None) -> Ratio:
    """Seconds now ÷ then, each relative to the limit of its own day; above 1 it became slower.

    days: what `day_scatter` made of earlier days. Errors add in squares, degrees of freedom as
    Welch and Satterthwaite have it. Without a standard error on either side there is no interval,
    and a gate must not fire.
    """
    centre = now.mean - then.mean
    parts = [(now.standard_error, now.freedom), (then.standard_error, then.freedom)]
    if days is not None:
        parts.append((math.sqrt(2) * days.standard_error, days.freedom))
    variance = sum(error**2 for error, _ in parts)
    if not math.isfinite(variance):
        return Ratio(math.exp(centre), math.exp(centre), math.exp(centre))
    shares = sum(error**4 / freedom for error, freedom in parts)
    freedom = variance**2 / shares if shares else float(sum(freedom for _, freedom in parts))
    reach = float(stats.t.isf((1 - CONFIDENCE) / 2, freedom)) * math.sqrt(variance)
    low, high = math.exp(centre - reach), math.exp(min(centre + reach, 700.0))
    return Ratio(math.exp(centre), low, high, CONFIDENCE)


def day_scatter(days: Sequence[Estimate]) -> Estimate:
    """Standard deviation of a run's level from day to day, beyond its own error, by moments:
    `standard_error` holds it. Raises ValueError for fewer than LEAST_BLOCKS days."""
    if len(days) < LEAST_BLOCKS:
        raise ValueError(f"{len(days)} days: at least {LEAST_BLOCKS} are needed")
    means = np.array([day.mean for day in days])
    within = np.mean([d.standard_error**2 if math.isfinite(d.standard_error) else 0 for d in days])
    between = max(0.0, float(means.var(ddof=1)) - float(within))
    return Estimate(float(means.mean()), math.sqrt(between), len(days) - 1)
