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

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.cells import cell_len

from quantbench import text
from quantbench.report.interval import Interval

R = TypeVar("R")
F = TypeVar("F")
Columns = Sequence[tuple[str, Callable[[R], str]]]  # a heading, and the text of a row's cell
# Headings of columns that are aligned left.
LEFT = {"", "machine", "model", "arm", "kernel", "verdict", "scheme", "peer", "layer", "over"}
LEFT |= {"setting", "by text", "by depth", "tokens of", "target is"}


def number(
    read: Callable[[R], float | None], form: str, unit: float = 1, suffix: str = ""
) -> Callable[[R], str]:
    """The figure times `unit`, in this format, with the suffix behind it: 27.69 tok/s."""
    return _known(read, lambda value: f"{value * unit:{form}}{suffix}")


def interval(
    read: Callable[[R], Interval | None], form: str = ".3f", to: str = " to "
) -> Callable[[R], str]:
    """The figure with its ends: 0.860 (0.850 to 0.870)."""
    return _known(read, lambda value: value.written(form, to))


def _known(read: Callable[[R], F | None], write: Callable[[F], str]) -> Callable[[R], str]:
    def shown(row: R) -> str:
        value = read(row)
        return "-" if value is None or value != value else write(value)  # NaN is not itself

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
    left = [number for number, (heading, _) in enumerate(columns) if heading in LEFT]
    return text.aligned(cells(columns, rows), left)


def markdown(columns: Columns[R], rows: Sequence[R]) -> str:
    """A table of Markdown, without a line's end behind it and without HTML."""
    headings, *others = cells(columns, rows)
    return table(headings, [[cell.replace("<", "&lt;") for cell in row] for row in others])


def cells(columns: Columns[R], rows: Sequence[R]) -> list[list[str]]:
    """The headings, then a list of cells for each row."""
    return [[heading for heading, _ in columns], *([show(r) for _, show in columns] for r in rows)]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], padded: bool = False) -> str:
    """Markdown, without a line's end behind it. A | in a cell is escaped, unless it was, and a
    line's end is a space. padded: a column is as wide as its widest cell."""
    rows = [[re.sub(r"(?<!\\)\|", r"\|", re.sub(r"[\r\n]+", " ", c)) for c in row] for row in rows]
    widths = [0] * len(headings)
    if padded:
        widths = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [
        " | ".join(cell + " " * (w - cell_len(cell)) for cell, w in zip(row, widths, strict=True))
        for row in (headings, *rows)
    ]
    rule = "|".join("-" * (w + 2) if padded else " --- " for w in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])
