"""Reading JSON, and dataclasses to JSON and back by their own type hints.

    @dataclass
    class Row:
        name: str
        share: float | None = omitted()         # left out of the JSON while it is None

    to_json(Row("fp6"))                         # {"name": "fp6"}
    from_json(Row, {"name": "fp6"})             # Row("fp6", None)
    parsed('{"name": "fp6"}')                   # {"name": "fp6"}

A class whose JSON is not one key a field has a method `to_json` and a static method `from_json`.
"""

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from quantbench.errors import QuantbenchError

T = TypeVar("T")
OMITTED = "omitted"  # key of a field's metadata
LARGEST_MEASURED = 1e18  # seconds, bytes, tokens per second
MOST_DIGITS = 300  # of a whole number: float() takes no more
SCALARS: dict[Any, Any] = {str: str, bool: bool, int: int, float: (int, float)}


def parsed(text: str | bytes) -> Any:
    """The value that a JSON text holds. Raises ValueError, which says why and in which line,
    for a text that is no JSON."""
    try:
        whole = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(whole, parse_int=_whole)
    except RecursionError:
        why = "it is nested too deeply"
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except UnicodeDecodeError:
        why = "it is no UTF-8 text"
    raise ValueError(f"it is no JSON ({why})")


def omitted() -> Any:
    """The default, None, of a field that is left out of the JSON while it is None."""
    return dataclasses.field(default=None, metadata={OMITTED: True})


def _whole(digits: str) -> float:
    """A whole number beyond float's range is read as 1e400 is, as infinity: whoever reads the value
    can then say which one is wrong."""
    return int(digits) if len(digits) <= MOST_DIGITS else float(digits)


def require(what: str, *values: float | None, above: float = 0.0) -> None:
    """Raise ValueError for a measured value that is not above this and below LARGEST_MEASURED."""
    for value in values:
        if value is not None and not above < value < LARGEST_MEASURED:
            raise ValueError(f"{what} takes numbers above {above:g}; given: {value:.6g}")


def to_json(value: object) -> Any:
    """What json.dumps takes. Tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = getattr(value, "to_json", None)
        return own() if own else fields_to_json(value)
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def fields_to_json(value: Any) -> dict[str, object]:
    """A dataclass as a JSON object of one key a field."""
    return {
        field.name: to_json(item)
        for field in dataclasses.fields(value)
        if (item := getattr(value, field.name)) is not None or OMITTED not in field.metadata
    }


def from_json(kind: type[T], value: object) -> T:
    """A `kind` from parsed JSON: of str, int, float, bool, list, dict, tuple, unions, dataclasses.

    Unknown keys are passed over; a missing one takes the field's default, or None where the field
    may be None. Raises ValueError: which value, what it takes.
    """
    return cast(T, _read(kind, value, getattr(kind, "__name__", str(kind))))


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value, where)
    if origin is Literal and value in arguments or kind in (Any, object):
        return value
    if origin in (list, tuple) and isinstance(value, list | tuple):
        several = origin is list or arguments[-1] is Ellipsis
        kinds = arguments[:1] * len(value) if several else arguments
        if len(kinds) == len(value):
            pairs = zip(kinds, value, strict=True)
            return origin(_read(item_kind, item, f"{where}[]") for item_kind, item in pairs)
    if origin is dict and isinstance(value, dict):
        return {key: _read(arguments[1], value[key], f"{where}.{key}") for key in value}
    if dataclasses.is_dataclass(kind):
        if own := getattr(kind, "from_json", None):
            return _read_by(own, value, where)
        if isinstance(value, dict):
            return _read_fields(kind, value, where)
    scalar = isinstance(value, SCALARS.get(kind, ())) and isinstance(value, bool) == (kind is bool)
    if scalar or (kind is types.NoneType and value is None):
        return float(value) if kind is float else value
    raise ValueError(f"{where} takes {getattr(kind, '__name__', kind)}; given: {value!r:.80}")


def _read_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    wrong: list[ValueError] = []
    for kind in kinds:
        try:
            return _read(kind, value, where)
        except ValueError as error:
            wrong.append(error)
    raise wrong[0]


def _read_by(read: Callable[[Any], object], value: Any, where: str) -> object:
    """What a class's own `from_json` reads, which may meet any kind of value."""
    try:
        return read(value)
    except KeyError as error:
        raise ValueError(f"{where} lacks {error}") from None
    except (QuantbenchError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{where}: {error}") from None


_hints = cache(get_type_hints)


def _read_fields(kind: Any, value: Mapping[str, object], where: str) -> Any:
    arguments = {
        field.name: _read(_hints(kind)[field.name], value.get(field.name), f"{where}.{field.name}")
        for field in dataclasses.fields(kind)
        if field.name in value or field.default is field.default_factory is dataclasses.MISSING
    }
    return _read_by(lambda given: kind(**given), arguments, where)
