"""Speeds of a log's lines on several days, each relative to the limit that was read that day.

    history = History.read("replays.jsonl")
    history.against(key, now)               # change since the last day; None without one
    history.append(key, now)

A file of JSON lines: {"line": the command, "time": …, "values": seconds a token × bytes a second}.
Absolute speeds of different days cannot be compared; these can, as what slows both cancels.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantbench import files
from quantbench.answer.between_days import change, day_scatter, level
from quantbench.answer.interval import Ratio
from quantbench.errors import UsageError
from quantbench.log import log
from quantbench.quality.block_errors import LEAST_BLOCKS
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
