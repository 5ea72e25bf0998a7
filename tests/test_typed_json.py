"""Dataclasses read from JSON are what was written, or a ValueError that names the value."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Literal

import pytest

from quantbench.errors import UsageError
from quantbench.typed_json import from_json, omitted, parsed, require, to_json
from tests.test_refusals import BAD_JSON


@dataclass(frozen=True)
class Part:
    seconds: float
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Whole:
    name: str
    count: int | None
    parts: list[Part] = field(default_factory=list)
    by_name: dict[str, Part | None] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    why: str | None = omitted()


@pytest.mark.parametrize(
    "value",
    [
        Whole("x", None),
        Whole("x", 3, [Part(1.5), Part(2.0, "b")], {"p": Part(1.0), "q": None}, (1, 2), "because"),
    ],
)
def test_what_is_written_is_read_back(value):
    assert from_json(Whole, json.loads(json.dumps(to_json(value)))) == value


def test_what_is_left_out():
    assert to_json(Whole("x", None)) == {
        "name": "x", "count": None, "parts": [], "by_name": {}, "shape": []}  # fmt: skip
    assert from_json(Whole, {"name": "x", "more": 1}) == Whole("x", None)
    assert from_json(Part, {"seconds": 1}).seconds == 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "Whole takes Whole"),
        ({}, "Whole.name takes str; given: None"),
        ({"name": "x", "count": "3"}, "Whole.count takes int; given: '3'"),
        ({"name": "x", "count": True}, "Whole.count takes int; given: True"),
        ({"name": "x", "parts": [{}]}, r"Whole.parts\[\].seconds takes float; given: None"),
        ({"name": "x", "parts": [{"seconds": 1, "kind": "c"}]}, "kind takes .*; given: 'c'"),
        ({"name": "x", "by_name": []}, "Whole.by_name takes dict"),
    ],
)
def test_what_is_no_such_value(value, message):
    with pytest.raises(ValueError, match=message):
        from_json(Whole, value)


def test_a_number_of_thousands_of_digits_is_infinite():
    """As 1e400 is: the reader of the value refuses it by its key."""
    assert parsed(BAD_JSON["digits"]) == [math.inf] and parsed(b"-" + b"9" * 400) == -math.inf


def test_measured_values_are_finite_and_above_a_limit():
    require("seconds", 1.0, None, 1e9)
    for value in (0.0, -1.0, float("nan"), float("inf"), 10**200):
        with pytest.raises(ValueError, match="seconds takes numbers above 0; given: "):
            require("seconds", 1.0, value)


def test_a_class_that_cannot_take_a_value_names_it():
    @dataclasses.dataclass
    class Even:
        number: int

        def __post_init__(self):
            if self.number % 2:
                raise UsageError(f"{self.number} is odd")

    assert from_json(Even, {"number": 2}) == Even(2)
    with pytest.raises(ValueError, match="^Even: 3 is odd$"):
        from_json(Even, {"number": 3})
