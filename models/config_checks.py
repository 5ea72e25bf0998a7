"""Checks of the values in a checkpoint's JSON files, and the error message for a wrong one.

COUNT.check("model/config.json", "hidden_size", "256")
# CheckpointError: model/config.json: hidden_size is '256'; accepted is a whole number from 1 to …
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

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


def list_of(accepts: Accepts, words: str, length: int | None = None) -> Accepts:
    """Accepts lists whose every item is accepted; words: for error messages."""

    def test(value: Any) -> bool:
        fits = isinstance(value, list | tuple) and length in (None, len(value))
        return fits and all(map(accepts.test, value))

    return Accepts(words, test)


NUMBERS = list_of(whole(0), "a list of layers' numbers, from 0")
FACTORS = list_of(POSITIVE, "a list of numbers above 0")
NAMES = list_of(NAME, "a list of texts")
_BY_TYPE: dict[Any, Accepts] = {
    **{int: COUNT, float: POSITIVE, bool: TRUTH, str: NAME},
    **{tuple[int, ...]: NUMBERS, tuple[float, ...]: FACTORS},
}


def by_field(kind: type, **others: Accepts) -> dict[str, Accepts]:
    """What each field of a dataclass may hold by its type, except for those in `others`. A field
    that may be None accepts that, too."""
    return {name: _of_type(hint) for name, hint in get_type_hints(kind).items()} | others


def _of_type(hint: Any) -> Accepts:
    if NoneType in get_args(hint):
        (some,) = (_of_type(part) for part in get_args(hint) if part is not NoneType)
        return Accepts(some.words, lambda value: value is None or some.test(value))
    of_class = Accepts(f"a {hint.__name__}", lambda value: isinstance(value, hint))
    return _BY_TYPE.get(hint, of_class)


def check_fields(where: object, accepted: Mapping[str, Accepts], value: object) -> None:
    """Raise CheckpointError for a field that holds what `by_field` does not accept; lists, which
    JSON has for tuples, become tuples."""
    for key, accepts in accepted.items():
        accepts.check(where, key, getattr(value, key))
        if isinstance(getattr(value, key), list):
            object.__setattr__(value, key, tuple(getattr(value, key)))
