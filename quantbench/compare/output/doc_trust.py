"""The tables of the documentation on how far its figures can be trusted: verdicts of comparisons,
and estimates, each beside what was true or measured."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from quantbench.compare.output.columns import Columns, markdown, number
from quantbench.compare.output.doc_data import captioned, one_file, read
from quantbench.compare.output.documents import Block
from quantbench.log.about import About

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class _Share:
    """A share of cases, with the ends of its Clopper-Pearson interval."""

    count: int
    of: int
    low: float
    high: float

    def __str__(self) -> str:
        value = self.count / self.of if self.of else math.nan
        return f"{value:.1%} ({self.low:.1%} to {self.high:.1%})"


def share(read: Callable[[R], _Share | None]) -> Callable[[R], str]:
    return lambda row: str(read(row) or "-")


@dataclasses.dataclass(frozen=True)
class _Cell:
    cell: str
    mode: str
    trials: int
    processes_per_candidate: float | None
    false_verdicts: _Share
    coverage_95: _Share | None
    found: _Share | None


@dataclasses.dataclass(frozen=True)
class _Trust:
    cells: list[_Cell]
    about: About | None = None
    date: str | None = None  # of a file that has no `about`
    command: str | None = None


SIMULATED: Columns[_Cell] = [
    ("arms", lambda cell: cell.mode),
    ("what differs", lambda cell: cell.cell),
    ("runs", lambda cell: str(cell.trials)),
    ("false verdicts", share(lambda cell: cell.false_verdicts)),
    ("95 % intervals that hold", share(lambda cell: cell.coverage_95)),
    ("differences found", share(lambda cell: cell.found)),
    ("processes an arm", number(lambda cell: cell.processes_per_candidate, ".0f")),
]


def trust(words: Sequence[str]) -> str:
    """trust FILE: how often comparisons erred, as `make trust` wrote it."""
    data = read(_Trust, one_file(words))
    if data.about:
        return captioned(SIMULATED, data.cells, data.about)
    caption = f"<sub>{data.date}, commit and machine not recorded: `{data.command}`</sub>"
    return f"{markdown(SIMULATED, data.cells)}\n\n{caption}"


@dataclasses.dataclass(frozen=True)
class _Errors:
    """Errors of estimates, as shares of what was measured."""

    group: str
    cases: int
    mape: float  # mean of the errors' sizes
    worst: float
    median: float  # with its sign
    mape_without_readings: float | None = None


@dataclasses.dataclass(frozen=True)
class _MemoryErrors:
    cases: int
    mape: float | None = None
    worst: float | None = None
    median: float | None = None


@dataclasses.dataclass(frozen=True)
class _Estimates:
    about: About
    summary: list[_Errors]
    memory_summary: _MemoryErrors
    memory_about: About | None = None  # where memory was measured later than the rest


ERRORS: Columns[_Errors] = [
    ("cases", lambda row: row.group),
    ("how many", lambda row: str(row.cases)),
    ("mean error", number(lambda row: row.mape, ".1%")),
    ("worst", number(lambda row: row.worst, ".1%")),
    ("median, with its sign", number(lambda row: row.median, "+.1%")),
    ("mean without the readings of speed", number(lambda row: row.mape_without_readings, ".1%")),
]


def estimates(words: Sequence[str]) -> str:
    """estimates FILE: estimates against measurements, as tests.estimate.accuracy wrote them."""
    data = read(_Estimates, one_file(words))
    memory = data.memory_summary
    rows = list(data.summary)
    if memory.cases and memory.mape is not None:
        errors = memory.mape, memory.worst or 0.0, memory.median or 0.0
        then = data.memory_about.commit if data.memory_about else None
        name = f"peak memory, commit {then[:7]}" if then else "peak memory"
        rows.append(_Errors(name, memory.cases, *errors))
    return captioned(ERRORS, rows, data.about)


TABLES: Mapping[str, Block] = {
    "trust": trust,
    "estimates": estimates,
}
