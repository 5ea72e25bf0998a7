"""Reading the committed JSON that the documents' tables and pictures are made of, and captions."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from quantbench import files
from quantbench.answer.row import Row
from quantbench.bench.answers import ArmFacts
from quantbench.errors import LogError, UsageError
from quantbench.log.about import About
from quantbench.report import html
from quantbench.report.columns import Columns, markdown
from quantbench.typed_json import from_json

T = TypeVar("T")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of an arm what a picture's title says."""

    facts: ArmFacts | None = None


@dataclasses.dataclass(frozen=True)
class Compared:
    """What the documents take from a results.json of `ab --output`."""

    about: About
    rows: list[Row]
    arms: list[Measured] = dataclasses.field(default_factory=list)


def read(kind: type[T], path: str) -> T:
    """The JSON in a file, as a `kind`. Raises LogError, one line, for anything else."""
    return _typed(kind, files.read_json("cannot read", path, LogError), path)


def rows_and_title(path: str) -> tuple[list[Row], str]:
    """The rows of a results.json, and the title of a picture of them. Raises LogError."""
    value = files.read_json("cannot read", path, LogError)
    kept = _typed(Compared, value, path)
    run = next((arm.facts.run for arm in kept.arms if arm.facts and arm.facts.run), None)
    return kept.rows, html.title(run, kept.about)


def _typed(kind: type[T], value: object, path: str) -> T:
    try:
        return from_json(kind, value)
    except ValueError as error:
        raise LogError(f"{path} is not what its command writes: {error}") from None


def one_file(words: Sequence[str]) -> str:
    if not words:
        raise UsageError("this table needs the name of a file behind its own")
    return words[0]


def captioned(columns: Columns[R], rows: Sequence[R], about: About) -> str:
    return f"{markdown(columns, rows)}\n\n{about.caption()}"
