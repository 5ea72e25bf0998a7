"""Tables in a text of reStructuredText or Markdown, as rows of cells.

    for block in blocks(text):
        print(block.line, block.title, block.rows)    # rows: (line number, texts of the cells)

Known are grids of | and +, Markdown's pipes, reStructuredText's simple tables between rules of =,
and its directives csv-table and list-table (https://docutils.sourceforge.io/docs/ref/rst/).
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

UNDERLINE = re.compile(r"([=\-~^\"'#*+])\1{2,}")
RULE = re.compile(r"=+(?: +=+)+")  # above, within and below a simple table
DIRECTIVE = re.compile(r"\.\. (csv-table|list-table)::\s*(.*)")
OPTION = re.compile(r":([\w-]+):\s*(.*)")
DELIMITERS = {"tab": "\t", "space": " "}

Rows = list[tuple[int, list[str]]]


@dataclass(frozen=True)
class Block:
    """A table. title: the heading above it and the directive's. above: lines of text since the last
    table."""

    line: int  # from 1
    title: str
    above: tuple[str, ...]
    rows: Rows


def blocks(text: str) -> Iterator[Block]:
    """The tables of a text, from the top."""
    lines = text.splitlines()
    at, title = 0, ""
    above: list[str] = []
    while at < len(lines):
        line = lines[at].strip()
        own = ""
        if directive := DIRECTIVE.match(line):
            kind, own = directive.groups()
            end = _end_of_directive(lines, at)
            rows = READERS[kind](lines[at + 1 : end], at + 2)
        elif is_row(line):
            rest = (i for i in range(at, len(lines)) if not is_row(lines[i].strip()))
            end = next(rest, len(lines))
            rows = _grid(lines[at:end], at + 1)
        elif RULE.fullmatch(line) and (closed := _end_of_simple(lines, at)):
            end = closed
            rows = _simple(lines[at:end], at + 1)
        else:
            if UNDERLINE.fullmatch(line) and at and lines[at - 1].strip():
                title = lines[at - 1].strip()
            elif line.startswith("#"):
                title = line.lstrip("# ")
            above.append(line)
            at += 1
            continue
        heading = ": ".join(filter(None, (title, own)))
        yield Block(at + 1, heading, (*above, own), rows)
        above = []
        at = end


def is_row(line: str) -> bool:
    return line.startswith(("|", "+-", "+="))


# ---------------------------------------------------------------------------------- kinds


def _grid(lines: Sequence[str], first: int) -> Rows:
    """Cells between |; where rules of + divide the rows, a cell may have several lines."""
    ruled = any(line.lstrip().startswith("+") for line in lines)
    rows: Rows = []
    open_row = False
    for number, line in enumerate(map(str.strip, lines), first):
        if line.startswith("+") or re.fullmatch(r"[|\s:\-=]+", line):
            open_row = False
            continue
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        if ruled and open_row and len(cells) == len(rows[-1][1]):  # a cell of two lines
            rows[-1] = rows[-1][0], _joined(rows[-1][1], cells)
        else:
            rows.append((number, cells))
        open_row = ruled
    return rows


def _end_of_simple(lines: Sequence[str], at: int) -> int | None:
    """The line behind the table whose first rule this is; None where it has no end."""
    rules = [i for i in range(at, len(lines)) if RULE.fullmatch(lines[i].strip())]
    ends = (i for i in rules[1:] if i + 1 == len(lines) or not lines[i + 1].strip())
    end = next(ends, None)
    return None if end is None else end + 1


def _simple(lines: Sequence[str], first: int) -> Rows:
    """Cells below the first rule's runs of =, or above the runs of - that underline a row."""
    rows: Rows = []
    for number, line in enumerate(lines):
        if not line.strip() or re.fullmatch(r"[\s=]+|[\s\-]+", line):
            continue
        below = lines[number + 1] if number + 1 < len(lines) else ""
        rule = below if re.fullmatch(r"[\s\-]*-[\s\-]*", below) else lines[0]
        starts: list[int | None] = [run.start() for run in re.finditer(r"[=\-]+", rule)]
        ends = [*starts[1:], None]
        cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        rows.append((first + number, cells))
    return rows


def _end_of_directive(lines: Sequence[str], at: int) -> int:
    """The line behind a directive: the next that is indented no further than it."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    own = indent(lines[at])
    inside = (i for i in range(at + 1, len(lines)) if lines[i].strip() and indent(lines[i]) <= own)
    return next(inside, len(lines))


def _csv(lines: Sequence[str], first: int) -> Rows:
    """The option header is the first row, if it is there; the option delim, what divides cells."""
    options, body = _options(lines)
    delimiter = DELIMITERS.get(options.get("delim", ","), options.get("delim", ","))
    numbered = [(first, options.get("header", "")), *enumerate(lines[body:], first + body)]
    rows: Rows = []
    try:
        for number, line in numbered:
            (cells,) = csv.reader([line.strip(" ")], delimiter=delimiter, skipinitialspace=True)
            rows += [(number, [cell.strip() for cell in cells])] if cells else []
    except (csv.Error, TypeError, ValueError):  # of a delimiter that csv does not take
        return []
    return rows


def _list(lines: Sequence[str], first: int) -> Rows:
    """A row begins with "* -", each of its further cells with "-"."""
    rows: Rows = []
    _, body = _options(lines)
    for number, line in enumerate(map(str.strip, lines[body:]), first + body):
        if line.startswith("* -"):
            rows.append((number, [line[3:].strip()]))
        elif rows and line[:2] in ("-", "- "):
            rows[-1][1].append(line[1:].strip())
        elif rows and line:
            rows[-1][1][-1] = f"{rows[-1][1][-1]} {line}".strip()
    return rows


def _options(lines: Sequence[str]) -> tuple[dict[str, str], int]:
    """A directive's options, and the number of the first line behind them."""
    options: dict[str, str] = {}
    name = ""
    for number, line in enumerate(map(str.strip, lines)):
        if found := OPTION.match(line):
            name = found[1]
            options[name] = found[2]
        elif not line:
            return options, number
        elif name:
            options[name] += f" {line}"
        else:
            return options, number
    return options, len(lines)


def _joined(above: Sequence[str], below: Sequence[str]) -> list[str]:
    return [" ".join(filter(None, pair)) for pair in zip(above, below, strict=True)]


READERS = {"csv-table": _csv, "list-table": _list}
