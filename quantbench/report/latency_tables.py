"""Latency tables as Markdown.

    print(rows_text("latency", rows))       # a Row for each line
    print(pairs_text([("Model", "tiny")]))  # the table of parameters

Every column is as wide as its widest cell, cells are aligned left with a space on either side.
"""

import math
import unicodedata
from collections.abc import Sequence
from typing import Literal

from quantbench.compare.figures.latency import Against, Row

Kind = Literal["latency", "throughput", "estimates"]
Pairs = tuple[tuple[str, str], ...]
INTERVAL = "95 % Interval"
NO_INTERVAL = "none"
_STEP = ("Step", "Batch Size")
_ENDS, _PERCENTILES = ("Lowest", "Highest"), ("p50", "p90", "p99")
COLUMNS: dict[Kind, tuple[str, ...]] = {
    "latency": (*_STEP, "Average", INTERVAL, *_ENDS, *_PERCENTILES),
    "throughput": (*_STEP, "Average", INTERVAL, *_ENDS),
    "estimates": (*_STEP, "Estimated", "Measured", "Error"),
}


def rows_text(kind: Kind, rows: Sequence[Row]) -> str:
    """The table's lines, without a line end after the last one."""
    return _grid(COLUMNS[kind], [_cells(row) for row in rows])


def pairs_text(pairs: Pairs) -> str:
    """The table of parameters, as `rows_text`."""
    return _grid(("Parameter", "Value"), pairs)


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = zip(header, *rows, strict=True)
    widths = [max(map(_width, column)) for column in columns]
    dashes = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([_line(header, widths), dashes, *(_line(row, widths) for row in rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        f" {cell}{' ' * (width - _width(cell))} " for cell, width in zip(cells, widths, strict=True)
    ]
    return f"|{'|'.join(padded)}|"


def _cells(row: Row) -> list[str]:
    figures = row.figures
    if isinstance(figures, Against):
        times = [f"{_number(value)} {row.unit}" for value in (figures.estimated, figures.measured)]
        return [row.step, str(row.batch_size), *times, _signed(figures.error)]
    average, *others = [f"{_number(value)} {row.unit}" for value in figures.values.values()]
    interval = _interval(figures.interval, row.unit)
    return [row.step, str(row.batch_size), average, interval, *others]


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
