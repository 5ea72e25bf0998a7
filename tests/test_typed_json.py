"""Dataclasses read from JSON are what was written, or a ValueError that names the value."""

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest

from quantbench.typed_json import from_json, omitted, to_json


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
