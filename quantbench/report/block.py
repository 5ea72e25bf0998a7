"""Blocks of documents: a table of a command's JSON, with a caption.

block = block_of(PeerRow, COLUMNS)      # a block FILE of the rows that `peers --json` wrote
block(["docs/data/peers.json"])         # Markdown
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from quantbench import files
from quantbench.errors import LogError, UsageError
from quantbench.log.origin import Origin
from quantbench.report.columns import Columns, markdown
from quantbench.typed_json import from_json

Block = Callable[[Sequence[str]], str]  # the words behind its name -> Markdown
R = TypeVar("R")
T = TypeVar("T")


def read(kind: type[T], path: str, key: str | None = None) -> T:
    """The JSON in a file, or its value of that key, as a `kind`. Raises LogError, one line."""
    value = files.read_json("cannot read", path, LogError)
    try:
        return from_json(kind, value if key is None else value[key])
    except (ValueError, TypeError, KeyError) as error:
        raise LogError(f"{path} is not what its command writes: {error}") from None


def block_of(
    row: type[R], columns: Columns[R], key: str = "rows", may_be_missing: bool = False
) -> Block:
    """A block FILE: the rows in a command's JSON, with a caption. may_be_missing: the file, as the
    command takes programs that not every machine has; then there is no table."""

    def block(words: Sequence[str]) -> str:
        path = file_of(words)
        if may_be_missing and not Path(path).exists():
            return ""
        rows = read(list[row], path, key)  # type: ignore[valid-type]
        return captioned(columns, rows, read(Origin, path, "about"))

    return block


def file_of(words: Sequence[str]) -> str:
    if not words:
        raise UsageError("this table needs the name of a file behind its own")
    return words[0]


def captioned(
    columns: Columns[R], rows: Sequence[R], about: Origin, notes: str = "", elsewhere: str = ""
) -> str:
    """elsewhere: the document that has the command."""
    return "\n\n".join(filter(None, [markdown(columns, rows), notes, about.caption(elsewhere)]))
