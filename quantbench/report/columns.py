"""Tables as data: a column is a heading and a function from a row to the text of its cell.

    COLUMNS: Columns[Row] = [
        ("arm", lambda row: row.arm),
        ("tok/s", number(lambda row: row.tok_s, ".2f")),
        ("× baseline", interval(lambda row: row.speed_up, ".2f")),
    ]
    aligned(COLUMNS, rows)      # for a terminal
    markdown(COLUMNS, rows)     # for a document

A cell whose figure is not known is a dash.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from quantbench import text
from quantbench.answer.interval import Interval
from quantbench.report.documents import table

R = TypeVar("R")
Columns = Sequence[tuple[str, Callable[[R], str]]]  # a heading, and the text of a row's cell
# Headings of columns that are aligned left.
LEFT = {"", "machine", "model", "arm", "kernel", "verdict", "scheme", "peer", "layer", "over"}
LEFT |= {"setting", "by text", "by depth", "tokens of", "target is"}


def number(
    read: Callable[[R], float | None], form: str, unit: float = 1, suffix: str = ""
) -> Callable[[R], str]:
    """The figure times `unit`, in this format, with the suffix behind it: 27.69 tok/s."""

    def shown(row: R) -> str:
        value = read(row)
        return "-" if value is None or math.isnan(value) else f"{value * unit:{form}}{suffix}"

    return shown


def interval(
    read: Callable[[R], Interval | None], form: str = ".3f", to: str = " to "
) -> Callable[[R], str]:
    """The figure with its ends: 0.860 (0.850 to 0.870)."""

    def shown(row: R) -> str:
        value = read(row)
        return "-" if value is None else value.written(form, to)

    return shown


def with_error(
    read: Callable[[R], float | None], error: Callable[[R], float | None], form: str
) -> Callable[[R], str]:
    """The figure and its standard error, where that is known: 1.0089 ± 0.0008."""

    def shown(row: R) -> str:
        value, deviation = read(row), error(row)
        if value is None:
            return "-"
        return f"{value:{form}}" + ("" if deviation is None else f" ± {deviation:{form}}")

    return shown


def size(count: float | None) -> str:
    """1 GB is 1e9 bytes, as in the log."""
    return "-" if count is None else text.size(count)


def narrowed(columns: Columns[R], rows: Sequence[R]) -> tuple[Columns[R], str]:
    """The columns that differ between rows, and for the caption what all rows have in common."""
    cells = {number: {show(row) for row in rows} for number, (_, show) in enumerate(columns)}
    same = [n for n, shown in cells.items() if n and len(shown) == 1 and len(rows) > 1]
    left = [column for n, column in enumerate(columns) if n not in same]
    common = {columns[n][0]: min(cells[n]) for n in same}
    return left, "; ".join(f"{heading}: {cell}" for heading, cell in common.items() if cell != "-")


def aligned(columns: Columns[R], rows: Sequence[R]) -> str:
    """A line for each row, under a line of headings."""
    lines = [[heading for heading, _ in columns], *_cells(columns, rows)]
    left = [number for number, (heading, _) in enumerate(columns) if heading in LEFT]
    return text.aligned(lines, left)


def markdown(columns: Columns[R], rows: Sequence[R]) -> str:
    """A table of Markdown, without a line's end behind it."""
    return table([heading for heading, _ in columns], _cells(columns, rows))


def _cells(columns: Columns[R], rows: Sequence[R]) -> list[list[str]]:
    return [[show(row) for _, show in columns] for row in rows]
