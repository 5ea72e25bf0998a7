"""What an audit of a published table finds, and what its parts share."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.estimate.tables import Number, Row, Table

LEAST, NAMED = 3, 3  # rows that make a rule with exceptions; rows that are listed by name
Pair = tuple[Row, Number, Number]  # a row, its figure of a quantity and its seconds


@dataclass(frozen=True)
class Finding:
    column: str  # as the table has it: "Energy (J/token), Measured"
    wrong: bool  # or only worth knowing
    text: str
    device: str | None = None  # of whose rows it is, where it is not of all of them


def name_of(table: Table, quantity: str, column: str) -> str:
    return f"{table.titles[quantity]}, {column.capitalize()}"


def pairs_of(table: Table, quantity: str, column: str) -> list[Pair]:
    """Each row's figure of a quantity, with the seconds of the same column."""
    pairs = []
    for row in table.rows:
        value = getattr(row.cell(quantity), column)
        time = getattr(row.cell("runtime"), column)
        if value is not None and time is not None and time.low > 0:
            pairs.append((row, value, table.seconds(time)))
    return pairs


def is_most(rows: int, of: int) -> bool:
    return rows >= LEAST and 2 * rows > of


def named(pairs: Sequence[Pair]) -> str:
    names = [row.model for row, *_ in pairs]
    return ", ".join(names[:NAMED]) + ", …" * (len(names) > NAMED)


def common(spans: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The interval that all of the given ones share; None if they share none."""
    low, high = max(low for low, _ in spans), min(high for _, high in spans)
    return (low, high) if low <= high else None
