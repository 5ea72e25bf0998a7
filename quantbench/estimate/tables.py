"""Published tables of measured and estimated runs: reading them, and writing a grid.

    tables = read("published_a5000.rst")
    tables[0].rows[0].cell("runtime").measured      # Number(693.77, 0.005): ms, as it is printed

A table has a row for each model and device, and for each quantity the columns Measured, Estimated
and Error. What a quantity is called decides which it is; its unit stands in brackets behind it.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantbench import files
from quantbench.errors import QuantbenchError
from quantbench.estimate.blocks import Block, blocks
from quantbench.estimate.datasheets import DATASHEETS
from quantbench.estimate.headings import Header, header_of

LONGEST = 10_000_000  # bytes of a file
SUFFIXES = {".rst", ".md"}  # of files that hold published tables
SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3,
           "millisecond": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "µs": 1e-6}  # fmt: skip
JOULES = {"j": 1.0, "joule": 1.0, "joules": 1.0, "mj": 1e-3, "uj": 1e-6, "µj": 1e-6, "kj": 1e3,
          "wh": 3600.0, "mwh": 3.6, "kwh": 3.6e6}  # fmt: skip
BYTES = {"GB": 1e9, "GiB": float(1 << 30), "MB": 1e6, "MiB": float(1 << 20)}
UNNAMED = "unnamed card"  # of a table that names none


@dataclass(frozen=True)
class Number:
    """A figure as it is printed. half: half a unit of its last digit, by which it may be off."""

    value: float
    half: float

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half


@dataclass(frozen=True)
class Cell:
    """A quantity of a row; a column that is empty, or holds words, is None. Errors are shares."""

    measured: Number | None = None
    estimated: Number | None = None
    error: Number | None = None


@dataclass(frozen=True)
class Row:
    model: str
    device: str
    cells: dict[str, Cell]
    line: int  # in the file, from 1

    def cell(self, quantity: str) -> Cell:
        return self.cells.get(quantity, Cell())


@dataclass(frozen=True)
class Table:
    """title: the heading above it. units: of each quantity, as its title has it in brackets."""

    title: str
    line: int
    titles: dict[str, str]  # of the quantities, as they are printed
    units: dict[str, str]
    rows: tuple[Row, ...]
    batch: int | None  # sequences, where the text above says so
    length: int | None  # tokens of each
    path: str = "table"  # the file, for messages
    columns: frozenset[tuple[str, str]] = frozenset()  # (quantity, measured or estimated or error)

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.line}"

    @property
    def tokens(self) -> int | None:
        return self.batch * self.length if self.batch and self.length else None

    def seconds(self, number: Number) -> Number:
        """A runtime in seconds. Raises QuantbenchError for a unit that is none of time."""
        return scaled(number, self._unit("runtime", SECONDS))

    def gibibytes(self, number: Number) -> Number:
        """A memory in units of 2**30 bytes, which is what torch's users print as GB."""
        unit = self.units.get("memory", "GB")
        factor = 1.0 if unit.lower() in ("gb", "gib") else self._unit("memory", BYTES) / (1 << 30)
        return scaled(number, factor)

    def joules(self, number: Number) -> Number:
        """An energy in joules, of whatever its title says it is of: J/token, mJ/token, J."""
        unit = re.split(r"/| per ", self.units.get("energy", "J"))[0].strip().lower()
        if unit not in JOULES:
            raise QuantbenchError(
                f"{self.where}: {self.titles['energy']!r} has no unit that is known; known: "
                f"{', '.join(JOULES)}, each by itself or per token"
            )
        return scaled(number, JOULES[unit])

    @property
    def energy_share(self) -> str:
        """What an energy is of by its title: "tokens", also where it does not say; "sequences"; ""
        for the whole pass."""
        unit = self.units.get("energy", "J/token").lower()
        _, divided, below = unit.replace(" per ", "/").partition("/")
        if not divided:
            return ""
        one = ("seq", "sample", "prompt", "request", "sentence")
        return "sequences" if below.strip().startswith(one) else "tokens"

    def _unit(self, quantity: str, known: dict[str, float]) -> float:
        unit = self.units.get(quantity, "")
        factor = next((value for name, value in known.items() if name.lower() == unit.lower()), 0.0)
        if not factor:
            raise QuantbenchError(
                f"{self.where}: {self.titles[quantity]!r} has no unit that is known; known: "
                f"{', '.join(known)}"
            )
        return factor


def scaled(number: Number, factor: float) -> Number:
    return Number(number.value * factor, number.half * factor)


# ---------------------------------------------------------------------------------- reading


def is_table(path: str) -> bool:
    """Whether a file is a published table, by its name."""
    return Path(path).suffix.lower() in SUFFIXES


def read(path: str | Path) -> tuple[Table, ...]:
    """The tables of measured and estimated rows in a file.

    Raises QuantbenchError, one line, for a file without any, or one that does not fit together.
    """
    data = files.read_bytes("cannot read", str(path), QuantbenchError)
    if len(data) > LONGEST:
        raise QuantbenchError(f"cannot read {path}: {len(data)} bytes are too many for a table")
    with files.named("cannot read", path, QuantbenchError):
        return parse(data.decode("utf-8"), str(path))


def parse(text: str, path: str = "table") -> tuple[Table, ...]:
    tables: list[Table] = []
    size = None
    for block in blocks(text):
        size = _named_size(" ".join(block.above)) or size
        for line in block.above:
            size = _input_size(line) or size
        table = _table(block, size, path)
        tables += [table] if table else []
    if not tables:
        raise QuantbenchError(
            f"{path}: there is no table in it with the columns Measured, Estimated and Error; "
            "expected is one as reStructuredText or Markdown has it"
        )
    return tuple(tables)


def _input_size(text: str) -> tuple[int, int] | None:
    """The sequences and the tokens of each, from a line such as "Input size = 16 \\times 1024", or
    "batch size 16, sequence length 1024"."""
    if not re.search("input|sequence|batch|token|shape", text, re.IGNORECASE):
        return None
    if named := _named_size(text):
        return named
    number = r"(\d[\d,]*)"
    found = re.search(rf"{number}\s*(?:\\times|×|x|\*|by)\s*{number}", text) or re.search(
        rf"batch[^\d]*{number}.*?(?:length|tokens|sequence|context)[^\d]*{number}",
        text,
        re.IGNORECASE,
    )
    if not found:
        return None
    return _whole(found[1]), _whole(found[2])


def _named_size(text: str) -> tuple[int, int] | None:
    """The same, where each number has its name: "sequence length 1024, batch_size=16"."""
    number = r"(\d[\d,]*)"
    batch = re.search(rf"batch(?:[ _-]?size)?\W*{number}", text, re.IGNORECASE)
    long = rf"(?:sequence|seq|context|prompt|input)[ _-]?len(?:gth)?\W*{number}"
    if batch and (length := re.search(long, text, re.IGNORECASE)):
        return _whole(batch[1]), _whole(length[1])
    each = re.search(rf"{number} (?:sequences|samples|prompts) of {number}", text)
    return (_whole(each[1]), _whole(each[2])) if each else None


def _whole(digits: str) -> int:
    return int(digits.replace(",", ""))


def _table(block: Block, size: tuple[int, int] | None, path: str) -> Table | None:
    """A block as a table; None for one with other columns."""
    header = header_of([cells for _, cells in block.rows], f"{path}, line {block.line}")
    if header is None:
        return None
    percent = {i for i, text in header.columns.items() if "%" in text}
    made: list[Row] = []
    for number, cells in block.rows[header.rows :]:
        if len(cells) != header.width:
            raise QuantbenchError(
                f"{path}, line {number}: {len(cells)} cells, and the table has {header.width} "
                "columns"
            )
        figures: dict[str, dict[str, Number | None]] = {}
        for i, (quantity, column) in header.places.items():
            value = _number(f"{cells[i]}{'%' * (i in percent)}")
            figures.setdefault(quantity, {})[column] = value
        above = made[-1] if made else None  # a merged cell stands in the first of its rows alone
        name, where = (
            "" if at is None else _name(cells[at]) or (getattr(above, kind) if above else "")
            for kind, at in (("model", header.model), ("device", header.device))
        )
        if any(cells):
            by_quantity = {quantity: Cell(**each) for quantity, each in figures.items()}
            made.append(Row(name, where or card_in(block.title) or UNNAMED, by_quantity, number))
    if not made:
        raise QuantbenchError(f"{path}, line {block.line}: the table has no rows")
    if not any("%" in text for text in (*header.columns.values(), *_printed(block, header))):
        made = _in_per_cent(made)
    units = {
        quantity: found.group(1).strip()
        for quantity, text in header.titles.items()
        if (found := re.search(r"[(\[](.*?)[)\]]", text))
    }
    batch, length = size or (None, None)
    columns = frozenset(header.places.values())
    about = (header.titles, units, tuple(made), batch, length, path, columns)
    return Table(block.title, block.line, *about)


def _name(cell: str) -> str:
    """A model's or device's name without what makes it bold or a link."""
    linked = re.fullmatch(r"\[(.*?)\]\(.*\)", cell) or re.fullmatch(r"`(.*?)\s*<.*>`__?", cell)
    return (linked[1] if linked else cell).strip("*` ")


def _printed(block: Block, header: Header) -> list[str]:
    """The errors as they are printed."""
    at = [i for i, (_, column) in header.places.items() if column == "error"]
    return [cells[i] for _, cells in block.rows[header.rows :] for i in at]


def _in_per_cent(rows: Sequence[Row]) -> list[Row]:
    """The rows with errors as shares, where no per cent sign says whether 5 is 5 % or 500 %: they
    are per cent if most are more than ten times what follows from the other figures."""
    times = []
    for cell in (cell for row in rows for cell in row.cells.values()):
        m, e, error = cell.measured, cell.estimated, cell.error
        if m and e and error and m.value and e.value != m.value:
            times.append(abs(error.value / (e.value / m.value - 1)))
    if not times or statistics.median(times) < 10:
        return list(rows)
    return [
        replace(row, cells={quantity: replace(cell, error=cell.error and scaled(cell.error, 0.01))
                            for quantity, cell in row.cells.items()})
        for row in rows
    ]  # fmt: skip


def card_in(title: str) -> str:
    """The card that a heading names; "" if it names none."""
    found = [sheet.name for sheet in DATASHEETS.values() if sheet.name.lower() in title.lower()]
    return max(found, key=len, default="")


def _number(text: str) -> Number | None:
    """A figure, with whatever stands around it: **12.5**, 12.5 ms, 12.5 ± 0.2, −8.40 %."""
    plain = text.replace("\\", "").strip("*`() ")
    found = re.fullmatch(
        r"([+\-−–]?)\s*(\d[\d,]*\.?\d*|\.\d+)(?:[eE]([+-]?\d\d?))?\s*(?:±\s*[\d.]+)?\s*(%{0,2}|[A-Za-zµ/]+%?)",
        plain,
    )
    if not found:
        return None
    sign, digits, exponent, percent = found.groups()
    digits = digits.replace(",", "")
    places = len(digits.partition(".")[2])
    unit = (0.01 if percent.endswith("%") else 1.0) * 10.0 ** int(exponent or 0)
    value = float(digits) * unit * (-1 if sign in "-−–" and sign else 1)
    return Number(value, 0.5 * 10.0**-places * unit)


# ---------------------------------------------------------------------------------- writing


def grid(head: Sequence[tuple[str, Sequence[str]]], rows: Sequence[Sequence[str]]) -> str:
    """A grid table with a title above each group of columns. head: (title, its columns); a title
    without columns is a column of its own."""
    leaves = [leaf for title, names in head for leaf in (names or [""])]
    columns = list(zip(leaves, *rows, strict=True))
    widths = [max(map(len, column)) + 2 for column in columns]
    at, tops = 0, []
    for title, names in head:
        count = max(1, len(names))
        room = sum(widths[at : at + count]) + count - 1
        if len(title) + 2 > room:
            widths[at + count - 1] += len(title) + 2 - room
            room = len(title) + 2
        tops.append((title, room, count))
        at += count

    def rule(mark: str) -> str:
        return "+" + "+".join(mark * width for width in widths) + "+"

    def line(cells: Sequence[str], wide: Sequence[int]) -> str:
        return (
            "|" + "|".join(f" {cell:<{w - 1}}" for cell, w in zip(cells, wide, strict=True)) + "|"
        )

    top = line([title for title, _, _ in tops], [room for _, room, _ in tops])
    out = [rule("-"), top, rule("="), line(leaves, widths), rule("-")]
    for row in rows:
        out += [line(row, widths), rule("-")]
    return "\n".join(out)
