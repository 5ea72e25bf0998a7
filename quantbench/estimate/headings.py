"""The headings of published tables: which column holds which quantity, and whether it was measured.

header = header_of([["Model", "Runtime (ms)"], ["", "Measured", "Estimated"]], "t.rst, line 3")
header.places[1]            # ("runtime", "measured")
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.errors import QuantbenchError
from quantbench.text import shown

# The first words that a quantity's title may begin with.
QUANTITIES = {
    "runtime": ("runtime", "run time", "latency", "time"),
    "memory": ("memory", "peak memory"),
    "energy": ("energy",),
    "throughput": ("throughput", "speed"),
}
COLUMNS = ("measured", "estimated", "error")
# Other words for these.
ALIKE = {
    "actual": "measured",
    "real": "measured",
    "predicted": "estimated",
    "estimate": "estimated",
}


@dataclass(frozen=True)
class Header:
    """What the columns of a table are, by their number."""

    rows: int  # of headings
    width: int  # columns
    model: int
    device: int | None
    places: dict[int, tuple[str, str]]  # (quantity, measured or estimated or error)
    columns: dict[int, str]  # the headings of these
    titles: dict[str, str]  # of the quantities


def header_of(rows: Sequence[Sequence[str]], where: str) -> Header | None:
    """The headings at the top of a table; None for a table of other columns.

    Either a row of quantities stands above one of Measured, Estimated and Error, or each heading
    names both: "Runtime measured (ms)". Raises QuantbenchError where they do not fit together.
    """
    at = next((i for i, cells in enumerate(rows) if _leaves(cells)), None)
    if at:
        return _in_two_rows(rows[0], rows[at], at + 1, where)
    return _in_one_row(rows[0]) if rows else None


def _in_two_rows(above: Sequence[str], leaves: Sequence[str], rows: int, where: str) -> Header:
    groups = [cell for cell in above if cell]
    named = {i: leaf for i, leaf in enumerate(leaves) if _column(leaf)}
    free = [i for i in range(len(leaves)) if i not in named]
    titles = [group for group in groups if _quantity(group)]
    others = [group for group in groups if not _quantity(group)]
    columns = _by_group([_column(leaf) for leaf in named.values()])
    if len(others) > len(free):
        raise QuantbenchError(
            f"{where}: {shown(others[-1])} is no quantity that is known; known: "
            f"{', '.join(QUANTITIES)}"
        )
    if len(columns) != len(titles) or len(others) < len(free):
        raise QuantbenchError(
            f"{where}: the table's first line has {len(groups)} titles, and the columns below it "
            f"are {len(columns)} groups behind {len(free)}; they do not agree"
        )
    by_name = {str(_quantity(title)): title for title in titles}
    if len(by_name) < len(titles):
        raise QuantbenchError(f"{where}: two of {', '.join(titles)} are the same quantity")
    pairs = [(q, column) for q, group in zip(by_name, columns, strict=True) for column in group]
    places = dict(zip(named, pairs, strict=True))
    model, device = _identity(dict(zip(free, others, strict=True)))
    return Header(rows, len(leaves), model, device, places, named, by_name)


def _in_one_row(cells: Sequence[str]) -> Header | None:
    places: dict[int, tuple[str, str]] = {}
    last = ""  # quantity: "Error" behind "Runtime, estimated" is that of runtimes
    for i, cell in enumerate(cells):
        quantity, column = _both(cell)
        last = quantity or last
        if column and last and (last, column) not in places.values():
            places[i] = (last, column)
    if not {"measured", "estimated"} <= {column for _, column in places.values()}:
        return None
    named = {i: cells[i] for i in places}
    words = "|".join([*COLUMNS, *ALIKE])
    titles: dict[str, str] = {}
    for i, (quantity, _) in sorted(places.items(), key=lambda one: one[1][1] == "error"):
        title = re.sub(rf"\s*,?\s*\b({words})\b\s*,?", " ", cells[i], flags=re.IGNORECASE)
        titles.setdefault(quantity, title.strip())
    model, device = _identity({i: cell for i, cell in enumerate(cells) if i not in places})
    return Header(1, len(cells), model, device, places, named, titles)


def _quantity(title: str) -> str | None:
    return next(
        (name for name, begins in QUANTITIES.items() if title.lower().startswith(begins)), None
    )


def _both(heading: str) -> tuple[str, str]:
    """The quantity and the column that one heading names: "Memory, estimated (GB)"; "" for what it
    does not name."""
    plain = heading.lower()
    column = next((c for w in re.findall("[a-z]+", plain) if (c := _column(w))), "")
    quantity = next(
        (q for q, begins in QUANTITIES.items() if any(word in plain for word in begins)), ""
    )
    return quantity, column


def _column(leaf: str) -> str:
    """measured, estimated or error, for the heading of a column such as "Error (%)"; or ""."""
    words = re.findall(r"[a-z]+", leaf.lower())
    word = ALIKE.get(words[0], words[0]) if words else ""
    return word if word in COLUMNS else ""


def _leaves(cells: Sequence[str]) -> bool:
    return {"measured", "estimated"} <= {_column(cell) for cell in cells}


def _by_group(names: Sequence[str]) -> list[list[str]]:
    """measured, estimated, error, measured, … cut before each name that a group already has."""
    groups: list[list[str]] = []
    for name in names:
        if not groups or name in groups[-1]:
            groups.append([])
        groups[-1].append(name)
    return groups


def _identity(free: dict[int, str]) -> tuple[int, int | None]:
    """The columns of the model and of the device among those without figures."""
    words = {i: title.lower() for i, title in free.items()}
    model = next((i for i, word in words.items() if "model" in word), next(iter(words), 0))
    named = ("device", "gpu", "card", "hardware")
    device = next((i for i, word in words.items() if any(name in word for name in named)), None)
    return model, device
