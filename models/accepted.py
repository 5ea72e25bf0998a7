"""What the keys of a checkpoint's JSON files may hold, and the one line where they hold another.

COUNT.check("mine/config.json", "hidden_size", "256")
# CheckpointError: mine/config.json: hidden_size is '256'; accepted is a whole number from 1 to …
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from errors import CheckpointError
from text import shown

LARGEST = 2**31 - 1  # of any size; two of them multiplied still fit into 64 bits
MOST_LAYERS = 10_000  # more than any model has; a damaged file's billion would never be built


@dataclass(frozen=True)
class Accepts:
    """What a key of a configuration file may hold: in words, and as a test."""

    words: str
    test: Callable[[Any], bool]

    def check(self, where: object, key: str, value: Any) -> None:
        """Raise CheckpointError, which names the file and the key, for anything else."""
        if not self.test(value):
            raise CheckpointError(f"{where}: {key} is {shown(value)}; accepted is {self.words}")


def whole(least: int, most: int = LARGEST) -> Accepts:
    """What takes whole numbers from `least` to `most`, and neither true nor 3.0."""

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
TRUTH = Accepts("true or false", lambda value: type(value) is bool)
NAME = Accepts("a text", lambda value: isinstance(value, str))
OBJECT = Accepts("an object with keys", lambda value: isinstance(value, Mapping))
NAMES = Accepts(
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
)
