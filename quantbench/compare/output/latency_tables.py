"""Latency tables as Markdown: written in two styles, and read back.

    print(table_text(Table("latency", "correct", rows)))
    document = read(text)                   # its tables, each with the line where it begins
    document.tables[0].renders              # whether it is, byte for byte, what we would write

Kinds of tables: "parameters" (two columns of text), "latency", "throughput", and "estimates", which
stand beside what was measured and have only the correct style. Every column
is as wide as its widest cell, cells are aligned left with a space on either side. In the legacy
style a cell is left blank where it equals the one above, as text-generation-inference's benchmark
merges cells, so a blank cell reads as the one above. In the correct style, every cell is filled.
A table that lost rows may be wider than its cells: one of the rows that were lost may have been.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from quantbench.compare.figures.latency import (
    ESTIMATED,
    RATES,
    STEPS,
    Against,
    Rate,
    Row,
    Style,
    Summary,
)
from quantbench.text import counted, shown

Kind = Literal["parameters", "latency", "throughput", "estimates"]
INTERVAL = "95 % Interval"
NO_INTERVAL = "none"
_STEP = ("Step", "Batch Size")
_ENDS, _PERCENTILES = ("Lowest", "Highest"), ("p50", "p90", "p99")
HEADERS: dict[tuple[str, ...], tuple[Kind, Style]] = {
    ("Parameter", "Value"): ("parameters", "legacy"),
    (*_STEP, "Average", *_ENDS, *_PERCENTILES): ("latency", "legacy"),
    (*_STEP, "Average", INTERVAL, *_ENDS, *_PERCENTILES): ("latency", "correct"),
    (*_STEP, "Average", *_ENDS): ("throughput", "legacy"),
    (*_STEP, "Average", INTERVAL, *_ENDS): ("throughput", "correct"),
    (*_STEP, "Estimated", "Measured", "Error"): ("estimates", "correct"),
}
COLUMNS = {of: header for header, of in HEADERS.items()}
UNITS: dict[tuple[Kind, Style], tuple[str, ...]] = {
    ("latency", "legacy"): ("ms",),
    ("latency", "correct"): ("ms",),
    ("throughput", "legacy"): ("tokens/secs",),
    ("throughput", "correct"): ("tokens/s", "requests/s"),
    ("estimates", "correct"): ("ms",),
}
NUMBER = r"(NaN|inf|-?[0-9]{1,30}\.[0-9]{2})"
LONGEST = 32 << 20  # characters of a text that is read
BYTE_ORDER_MARK = "\ufeff"  # with which some editors begin a UTF-8 file
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """What a table says. rows: pairs for "parameters", else a Row for each line."""

    kind: Kind
    style: Style
    rows: tuple[Row, ...] = ()
    parameters: Pairs = ()

    def number(self, name: str) -> int | None:
        """The whole number that a parameter is; None where it is none."""
        text = dict(self.parameters).get(name, "")
        return int(text) if re.fullmatch("[0-9]{1,9}", text) else None

    @property
    def steps(self) -> list[tuple[str, str]]:
        """The steps that such a table has, each with its unit."""
        if self.kind == "latency":
            return [(step, "ms") for step in STEPS[self.style]]
        if self.kind == "estimates":
            return [(step, "ms") for step in ESTIMATED]
        return list(RATES[self.style]) if self.kind == "throughput" else []

    @property
    def missing(self) -> list[tuple[str, str, int]]:
        """Step, unit and batch size of the rows that other steps have, and that are not there."""
        there = {(row.step, row.unit, row.batch_size) for row in self.rows}
        sizes = dict.fromkeys(row.batch_size for row in self.rows)
        return [key for step in self.steps for n in sizes if (key := (*step, n)) not in there]


@dataclass(frozen=True)
class MarkdownTable:
    """A table in a text. `table` is None, and `problem` says why, where it cannot be read."""

    line: int  # of its header, from 1
    text: str
    newline: str
    table: Table | None
    problem: str | None = None

    @cached_property
    def rendered(self) -> str | None:
        """The table as we would write it; None where it cannot be read."""
        if self.table is None:
            return None
        dashes = self.text.split(self.newline)[1].rstrip()
        widths = [len(column) - 2 for column in dashes[1:-1].split("|")]
        return table_text(self.table, self.newline, widths if self.table.missing else None)

    @property
    def renders(self) -> bool:
        return self.rendered == self.text

    @property
    def difference(self) -> tuple[int, str, str] | None:
        """The first line that differs: its number, what stands there, what we would write."""
        if self.rendered is None or self.renders:
            return None
        ours, theirs = (text.split("\n") for text in (self.rendered, self.text))
        length = max(len(ours), len(theirs))
        ours, theirs = (lines + [""] * (length - len(lines)) for lines in (ours, theirs))
        first = next(n for n in range(length) if ours[n] != theirs[n])
        return self.line + first, theirs[first], ours[first]

    def line_of(self, row: int) -> int:
        """The line of the text in which this row stands."""
        return self.line + 2 + row


@dataclass(frozen=True)
class Document:
    """A text in parts: its tables, and what stands between them."""

    parts: tuple[str | MarkdownTable, ...]
    others: tuple[int, ...]  # lines at which tables of other kinds begin

    @property
    def tables(self) -> list[MarkdownTable]:
        return [part for part in self.parts if isinstance(part, MarkdownTable)]

    @property
    def rendered(self) -> str:
        """The whole text with every table written anew that can be read."""
        parts = [p if isinstance(p, str) else p.rendered or p.text for p in self.parts]
        return "".join(parts)


# ---------------------------------------------------------------------------------- writing


def table_text(table: Table, newline: str = "\n", least: Sequence[int] | None = None) -> str:
    """The table's lines, without a line end after the last one. least: widths of the columns,
    which wider cells widen."""
    header = COLUMNS[table.kind, table.style]
    if table.kind == "parameters":
        return newline.join(grid(header, table.parameters, False))
    rows = [_cells(row, table.style) for row in table.rows]
    return newline.join(grid(header, rows, table.style == "legacy", least))


def grid(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    merged: bool,
    least: Sequence[int] | None = None,
) -> list[str]:
    """Lines of a Markdown table. merged: blank where a cell equals the one above it."""
    columns = zip(header, *rows, strict=True)
    widths = [max(map(_width, column)) for column in columns]
    if least is not None and len(least) == len(widths):
        widths = [max(pair) for pair in zip(widths, least, strict=True)]
    lines = [_line(header, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    for above, row in zip([None, *rows[:-1]] if rows else [], rows, strict=True):
        cells = row
        if merged and above is not None:
            cells = ["" if cell == over else cell for cell, over in zip(row, above, strict=True)]
        lines.append(_line(cells, widths))
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        f" {cell}{' ' * (width - _width(cell))} " for cell, width in zip(cells, widths, strict=True)
    ]
    return f"|{'|'.join(padded)}|"


def _cells(row: Row, style: Style) -> list[str]:
    figures = row.figures
    if isinstance(figures, Against):
        times = [f"{_number(value)} {row.unit}" for value in (figures.estimated, figures.measured)]
        return [row.step, str(row.batch_size), *times, _signed(figures.error)]
    texts = [f"{_number(value)} {row.unit}" for value in figures.values.values()]
    if style == "correct":
        texts.insert(1, _interval(figures.interval, row.unit))
    return [row.step, str(row.batch_size), *texts]


def _interval(ends: tuple[float, float] | None, unit: str) -> str:
    if ends is None:
        return NO_INTERVAL
    return f"{_number(ends[0])} to {_number(ends[1])} {unit}"


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.2f}"


def _signed(share: float) -> str:
    return "NaN %" if math.isnan(share) else f"{100 * share:+.2f} %"


def _width(text: str) -> int:
    """How many columns a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


# ---------------------------------------------------------------------------------- reading


def read(text: str) -> Document:
    """The tables of a text, and what is between them; joined again they are the text.

    A damaged one is a MarkdownTable with a problem. Raises ValueError for a text of more
    than LONGEST characters.
    """
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters are more than the {LONGEST} of any such report")
    mark = BYTE_ORDER_MARK if text.startswith(BYTE_ORDER_MARK) else ""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text.removeprefix(mark))  # each with its end
    parts: list[str | MarkdownTable] = [mark]
    others: list[int] = []
    at = 0
    while at < len(lines):
        first, is_row = at, lines[at].startswith("|")
        while at < len(lines) and lines[at].startswith("|") == is_row:
            at += 1
        table = _table(lines[first:at], first + 1) if is_row else None
        if table is None:
            others += [first + 1] * is_row
            parts.append("".join(lines[first:at]))
        else:
            last = lines[at - 1]
            parts += [table, last[len(last.rstrip("\r\n")) :]]
    return Document(tuple(part for part in parts if part != ""), tuple(others))


def _table(lines: Sequence[str], number: int) -> MarkdownTable | None:
    """The table that begins in this line, and what is wrong with it; None for another kind."""
    text = "".join(lines).rstrip("\r\n")
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    # Spaces behind the last | keep a table from rendering, and not from being read.
    stripped = [line.rstrip(" \t\r\n") for line in lines]
    header = tuple(_split(stripped[0]) or ())
    if header not in HEADERS:
        if not stripped[0].startswith(("| Step ", "| Parameter ")):
            return None
        return MarkdownTable(
            number, text, newline, None, f"line {number}: unknown columns, {shown(stripped[0])}"
        )
    kind, style = HEADERS[header]
    try:
        table = _read_rows(kind, style, header, stripped, number)
    except ValueError as error:
        return MarkdownTable(number, text, newline, None, str(error))
    return MarkdownTable(number, text, newline, table)


def _read_rows(
    kind: Kind, style: Style, header: tuple[str, ...], lines: Sequence[str], number: int
) -> Table:
    if len(lines) < 2 or not re.fullmatch(r"\|(-+\|)+", lines[1]):
        raise ValueError(f"line {number + 1}: no line of dashes below the header")
    above = [""] * len(header)
    rows: list[Row] = []
    pairs: list[tuple[str, str]] = []
    for n, line in enumerate(lines[2:], number + 2):
        cells = _split(line)
        if cells is None or len(cells) != len(header):
            seen = "it does not end with |" if cells is None else counted(len(cells), "cell")
            raise ValueError(f"line {n}: {seen}; a row has {len(header)} cells between |")
        if kind == "parameters":
            pairs.append((cells[0], cells[1]))
            continue
        if style == "legacy":
            cells = [cell or over for cell, over in zip(cells, above, strict=True)]
        try:
            rows.append(_row(kind, style, cells))
        except ValueError as error:
            raise ValueError(f"line {n}: {error}") from None
        above = cells
    return Table(kind, style, tuple(rows), tuple(pairs))


def _row(kind: Kind, style: Style, cells: list[str]) -> Row:
    if not re.fullmatch("[0-9]{1,9}", cells[1]):
        raise ValueError(f"{shown(cells[1])} is no batch size")
    units = "|".join(UNITS[kind, style])
    values: list[float] = []
    interval, unit = None, ""
    for header, cell in zip(COLUMNS[kind, style][2:], cells[2:], strict=True):
        if header == INTERVAL:
            interval = _read_interval(cell, units)
            continue
        if header == "Error":
            values.append(_read_share(cell))
            continue
        match = re.fullmatch(f"{NUMBER} ({units})", cell)
        if not match or (unit and match[2] != unit):
            what = f"number with two decimals and {' or '.join(UNITS[kind, style])}"
            raise ValueError(f"{header} is {shown(cell)}, which is no {what}")
        unit = match[2]
        values.append(float(match[1]))
    if kind == "estimates":
        return Row(cells[0], int(cells[1]), unit, Against(*values))
    made = Summary if kind == "latency" else Rate
    return Row(cells[0], int(cells[1]), unit, made(*values, interval=interval))


def _read_share(cell: str) -> float:
    match = re.fullmatch(r"(NaN|[+-][0-9]{1,30}\.[0-9]{2}) %", cell)
    if not match:
        raise ValueError(f"Error is {shown(cell)}; it is as +1.00 % or -1.00 %")
    # A whole number of hundredths, so that the quotient is rounded once.
    return float(match[1].replace(".", "")) / 1e4


def _read_interval(cell: str, units: str) -> tuple[float, float] | None:
    if cell == NO_INTERVAL:
        return None
    match = re.fullmatch(f"{NUMBER} to {NUMBER} (?:{units})", cell)
    if not match:
        raise ValueError(f"{INTERVAL} is {shown(cell)}; it is as 1.00 to 2.00, or {NO_INTERVAL}")
    return float(match[1]), float(match[2])


def _split(line: str) -> list[str] | None:
    """A row's cells without the spaces around them; None where it does not end with |.

    A | within a cell is written \\|, and stays so.
    """
    if not line.endswith("|") or len(line) < 2:
        return None
    return [cell.strip(" ") for cell in re.split(r"(?<!\\)\|", line[1:-1])]
