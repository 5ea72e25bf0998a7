"""Points of growth: decoding at one number of layers, batch size or depth, and their file.

points = merged(read("growth.json").points, [Point(**vars(row), axis="batch", value=4)])
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from quantbench import files
from quantbench.answer.json_rows import DecodeRow
from quantbench.arguments import names_of
from quantbench.errors import LogError, UsageError
from quantbench.log.about import About
from quantbench.typed_json import from_json


@dataclass(frozen=True)
class Axis:
    """The option of generate.py that grows along an axis, and the values measured."""

    option: str  # of generate.py
    least: int  # that the option takes
    values: tuple[int, ...]  # measured unless --values says otherwise
    model: str  # measured, with random weights, unless --checkpoint_path says otherwise


AXES = {
    "layers": Axis("num_layers", 1, (4, 8, 16, 22), "TinyLlama-1.1B-Chat-v1.0"),
    "batch": Axis("batch_size", 1, (1, 2, 4, 8, 16), "TinyLlama-1.1B-Chat-v1.0"),
    "depth": Axis("context_depth", 0, (0, 4096, 16384, 32768, 65536), "Llama-3.2-1B"),
}  # fmt: skip


@dataclass(kw_only=True)
class Point(DecodeRow):
    """One measurement: its place on an axis, and its row. Old files have no arm and no cycles."""

    arm: str = ""
    axis: str
    value: int
    model: str | None = None  # None: the axis's own

    @property
    def place(self) -> tuple[int, str | None, int]:
        return list(AXES).index(self.axis), self.scheme, self.value

    def check(self) -> None:
        """Raise ValueError, with the value, for what cannot be drawn."""
        if self.axis not in AXES:
            raise ValueError(f"a point's axis is one of {', '.join(AXES)}; given: {self.axis!r}")
        for value in (self.value, self.decode_tok_s, self.limit_tok_s):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"a point's figures are at least 0 and finite; given: {value}")


@dataclass(frozen=True)
class Points:
    """What the JSON file holds."""

    points: list[Point]
    about: About | None = None  # where the newest points come from


def whole_numbers(text: str | None, name: str, axes: Sequence[str]) -> tuple[int, ...]:
    """The values to measure along one axis. Raises UsageError for what are none."""
    axis = AXES[name]
    if text is None:
        return axis.values
    if len(axes) != 1:
        raise UsageError("--values are those of one axis: name it with --over")
    words = names_of("--values", text, ())
    if not all(re.fullmatch("[0-9]{1,18}", word) and int(word) >= axis.least for word in words):
        takes = f"whole numbers from {axis.least}, such as 1,4, for --over {name}"
        raise UsageError(f"--values takes {takes}; given: {text!r}")
    return tuple(map(int, words))


def read(path: str) -> Points:
    """What the file holds; no points if the file is missing."""
    if not os.path.lexists(path):
        return Points([])
    try:
        kept = from_json(Points, files.read_json("--json", path, LogError))
        for point in kept.points:
            point.check()
    except ValueError as error:
        raise UsageError(f"--json {path} is not what this command writes: {error}") from None
    return kept


def merged(old: Sequence[Point], new: Sequence[Point]) -> list[Point]:
    """All of them, a new point in the place of an old one of the same axis, value and scheme."""
    by_place = {point.place: point for point in (*old, *new)}
    return [by_place[place] for place in sorted(by_place)]
