"""Tables inside Markdown, between two markers, written by a function of its name.

    <!-- readme: speeds docs/data/speeds.json -->
    | scheme | …
    <!-- end -->

    rewritten("README.md", text, BLOCKS)

A block is rewritten whole; what stands outside of blocks is never touched.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from rich.cells import cell_len

from quantbench.errors import UsageError

Block = Callable[[Sequence[str]], str]  # from the words behind the block's name to Markdown
BEGIN = re.compile(r"^<!-- readme: (?P<words>[^\n]*?) -->$", re.M)
END = "<!-- end -->"


def rewritten(name: str, text: str, blocks: Mapping[str, Block]) -> str:
    """The text, every block as its function writes it today.

    Raises UsageError, with the document's name and line, for a block of an unknown name, one that
    has no end, and one inside another.
    """
    written: list[str] = []
    place = 0
    for begin in BEGIN.finditer(text):
        line = text.count("\n", 0, begin.start()) + 1
        end = text.find(f"\n{END}", begin.end())
        following = BEGIN.search(text, begin.end())
        if end < 0 or (following and following.start() < end):
            raise UsageError(f"{name}, line {line}: {begin[0]} needs a line {END} after it")
        kind, *words = begin["words"].split() or [""]
        if kind not in blocks:
            raise UsageError(
                f"{name}, line {line}: no table {kind!r}; there are {', '.join(blocks)}"
            )
        try:
            block = blocks[kind](words)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise UsageError(
                f"{name}, line {line}: {begin[0]}: its data do not fit this table: {error}"
            ) from error
        written += [text[place : begin.end()], "\n\n", block, "\n"]
        place = end
    return "".join([*written, text[place:]])


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], padded: bool = False) -> str:
    """Markdown, without a line's end behind it. padded: a column is as wide as its widest cell."""
    widths = [0] * len(headings)
    if padded:
        widths = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [
        " | ".join(cell + " " * (w - cell_len(cell)) for cell, w in zip(row, widths, strict=True))
        for row in (headings, *rows)
    ]
    rule = "|".join("-" * (w + 2) if padded else " --- " for w in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])
