"""The table of the documentation on how far verdicts of comparisons can be trusted."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from quantbench.log.about import About
from quantbench.report.columns import Columns, markdown, number
from quantbench.report.doc_data import captioned, one_file, read
from quantbench.report.documents import Block

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


TABLES: Mapping[str, Block] = {
    "trust": trust,
}
