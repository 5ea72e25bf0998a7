"""Checks of the values in a checkpoint's JSON files, and the error message for a wrong one.

COUNT.check("model/config.json", "hidden_size", "256")
# CheckpointError: model/config.json: hidden_size is '256'; accepted is a whole number from 1 to …
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.text import shown

LARGEST = 2**31 - 1  # largest accepted size; the product of two of them still fits into 64 bits
MOST_LAYERS = 10_000  # more than any model has; building a damaged file's billion would not end


@dataclass(frozen=True)
class Accepts:
    """What a key of a configuration file may hold."""

    words: str  # for error messages: "accepted is …"
    test: Callable[[Any], bool]  # whether a value is accepted

    def check(self, where: object, key: str, value: Any) -> None:
        """Raise CheckpointError with the file `where` and the key for a value not accepted."""
        if not self.test(value):
            raise CheckpointError(f"{where}: {key} is {shown(value)}; accepted is {self.words}")


def whole(least: int, most: int = LARGEST) -> Accepts:
    """Accepts whole numbers from `least` to `most`; neither true nor 3.0."""

    def test(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return Accepts(f"a whole number from {least} to {most}", test)


def _is_positive(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value) and value > 0
    except OverflowError:  # a whole number beyond the largest float
        return False


COUNT, LAYERS = whole(1), whole(1, MOST_LAYERS)
POSITIVE = Accepts("a number above 0", _is_positive)
STRETCH = Accepts("a number of at least 1", lambda value: _is_positive(value) and value >= 1)
TRUTH = Accepts("true or false", lambda value: type(value) is bool)
NAME = Accepts("a text", lambda value: isinstance(value, str))
OBJECT = Accepts("an object with keys", lambda value: isinstance(value, Mapping))
NUMBERS = Accepts(
    "a list of layers' numbers, from 0",
    lambda value: isinstance(value, list | tuple) and all(whole(0).test(layer) for layer in value),
)
FACTORS = Accepts(
    "a list of numbers above 0",
    lambda value: isinstance(value, list) and all(map(_is_positive, value)),
)
NAMES = Accepts(
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
)
