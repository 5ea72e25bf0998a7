"""Speeds of a log's lines on several days, each relative to the limit that was read that day.

    history = History.read("replays.jsonl")
    history.against(key, now)               # change since the last day; None without one
    history.append(key, now)

A file of JSON lines: {"line": the command, "time": …, "values": seconds a token × bytes a second}.
Absolute speeds drift by half from day to day; these can be compared, as what slows both cancels:
log(seconds × limit) for each process, where the limit is bytes per second read next to it. The
means of two days are compared by Welch's t; earlier days of a line tell how far days differ beyond.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantbench import files
from quantbench.answer.compared import CONFIDENCE
from quantbench.answer.interval import Interval
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
        """Read the file; if it is missing, the history is empty. Raises UsageError for others."""
        place = Path(path)
        if not place.exists():
            files.Output("--history", path, lambda _: True, "JSON lines").check()
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

    def against(self, line: str, values: Sequence[float]) -> Interval | None:
        """The change since the last day of this line; None on its first day."""
        days = [day.values for day in self.days if day.line == line]
        return change(values, days) if days and values else None

    def append(self, line: str, values: Sequence[float]) -> None:
        """Write the history. Raises LogError where the file cannot be written."""
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            return
        log.append_json(self.path, to_json(Day(line, time.strftime("%Y-%m-%d %H:%M"), [*values])))


def change(now: Sequence[float], days: Sequence[Sequence[float]]) -> Interval:
    """Seconds now ÷ on the last of the days, each relative to the limit of its own day; above 1 it
    became slower. Values are above 0, one for each process.

    Errors add in squares, degrees of freedom as Welch and Satterthwaite have it. How far days
    scatter beyond their own errors is estimated by moments, from LEAST_BLOCKS days or more. With
    fewer processes than that on either side there is no interval, and a gate must not fire.
    """
    logs = [np.log(values) for values in (*days, now)]
    means = [float(own.mean()) for own in logs]
    parts = [
        (float(own.var(ddof=1)) / len(own) if len(own) >= LEAST_BLOCKS else math.inf, len(own) - 1)
        for own in logs
    ]
    centre, both = means[-1] - means[-2], parts[-2:]
    if len(days) >= LEAST_BLOCKS:
        within = np.mean([part if math.isfinite(part) else 0 for part, _ in parts[:-1]])
        between = max(0.0, float(np.var(means[:-1], ddof=1)) - float(within))
        both.append((2 * between, len(days) - 1))
    variance = sum(part for part, _ in both)
    if not math.isfinite(variance):
        return Interval(math.exp(centre))
    shares = sum(part**2 / freedom for part, freedom in both)
    freedom = variance**2 / shares if shares else sum(freedom for _, freedom in both)
    low, high = Estimate(centre, math.sqrt(variance), freedom).ends(CONFIDENCE)
    return Interval(math.exp(centre), math.exp(low), math.exp(min(high, 700.0)))
