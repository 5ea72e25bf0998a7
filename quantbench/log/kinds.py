"""Kinds of option values: how each is read, checked and written."""

import math
import re
from dataclasses import dataclass
from typing import Any

import click

from quantbench.errors import UsageError
from quantbench.log import shell
from quantbench.text import bytes_in, shown

MAX_INT = 2**63 - 1  # the largest int64, with which torch indexes


class Kind(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """What an option accepts. Values are checked alike, whether they come as text or not."""

    name = "value"
    metavar = ""  # the placeholder for the value in --help, such as PATH
    accepts = ""  # what is accepted, in words, for an error message: "--top_k takes …"

    def read(self, value: object) -> object:
        """The value, from itself or from its text. Raises ValueError when it is not accepted."""
        raise NotImplementedError

    def write(self, value: Any) -> str:
        """The text that `read` turns back into the value."""
        return str(value)

    def convert(self, value: object, param: Any, ctx: object) -> object:
        """For click, of an option that is no field of RunConfig. Raises UsageError."""
        try:
            return self.read(value)
        except ValueError:
            given = shown(value)
            raise UsageError(f"{param.opts[0]} takes {self.accepts}; given: {given}") from None


class Switch(Kind):
    """An option without a value: present or absent."""

    accepts = "no value: it is there or not"

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True)
class Text(Kind):
    """Text that a command line can hold: without a NUL character."""

    metavar: str = "TEXT"
    may_be_empty: bool = False

    @property
    def accepts(self) -> str:  # type: ignore[override]
        if self.may_be_empty:
            return "text without NUL characters"
        return "a value that is not empty and has no NUL character"

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not (value or self.may_be_empty):
            raise ValueError
        if not shell.carries(value):
            raise ValueError
        return value


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from `minimum` to `maximum`, both included."""

    minimum: int
    maximum: int = MAX_INT
    metavar = "N"

    @property
    def accepts(self) -> str:  # type: ignore[override]
        most = "2**63-1" if self.maximum == MAX_INT else self.maximum
        return f"a whole number from {self.minimum} to {most}"

    def read(self, value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,40}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError
        if not self.minimum <= value <= self.maximum:
            raise ValueError
        return value


@dataclass(frozen=True)
class Number(Kind):
    """A finite number of at least 0, or above it."""

    positive: bool = False
    metavar = "X"

    @property
    def accepts(self) -> str:  # type: ignore[override]
        return f"a finite number {'above' if self.positive else 'of at least'} 0"

    def read(self, value: object) -> float:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ValueError
        try:
            number = float(value)
        except OverflowError:
            raise ValueError from None
        if not math.isfinite(number) or number < 0 or (self.positive and not number):
            raise ValueError
        return abs(number)  # -0.0 would be written with a dash


@dataclass(frozen=True)
class Between(Kind):
    """A number of something, above 0 and below a limit."""

    what: str
    most: str
    metavar = "X"

    @property
    def accepts(self) -> str:  # type: ignore[override]
        return f"{self.what}, above 0 and below {self.most}"

    def read(self, value: object) -> float:
        number = float(str(value))
        if not 0 < number < float(self.most):
            raise ValueError
        return number


class Share(Kind):
    """2%, 2 % or 0.02, as 0.02."""

    metavar = "X"
    accepts = "a share such as 2% or 0.02"

    def read(self, value: object) -> float:
        match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(%?)\s*", str(value))
        number = float(match[1]) / (100 if match[2] else 1) if match else math.nan
        if not 0 < number < 1:
            raise ValueError
        return number


@dataclass(frozen=True)
class Size(Kind):
    """A size in bytes, from `least` on."""

    least: float = 1.0
    metavar = "SIZE"
    accepts = "a size such as 8GB or 7.5GiB"

    def read(self, value: object) -> int:
        return round(bytes_in(str(value), self.least))


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few names."""

    choices: tuple[str, ...]
    prefix: str = ""  # always written before the name; optional when read
    former: tuple[str, ...] = ()  # names in old logs: readable, but a run refuses them
    metavar = "NAME"

    @property
    def accepts(self) -> str:  # type: ignore[override]
        return "one of " + ", ".join(self.choices)

    def read(self, value: object) -> str:
        name = value.removeprefix(self.prefix) if isinstance(value, str) else ""
        if name not in (*self.choices, *self.former):
            raise ValueError
        return name

    def write(self, value: str) -> str:
        return self.prefix + value


class Room(Kind):
    """Room in memory for some of many things: how many, or a size, or auto."""

    metavar = "ROOM"
    accepts = "a number from 1, a size such as 8GB or 500MB, or auto"

    def read(self, value: object) -> str:
        text = str(value).strip() if isinstance(value, str | int) else ""
        if re.fullmatch(r"[0-9]{1,12}", text) and int(text) > 0 and value is not True:
            return str(int(text))
        if text.lower() == "auto":
            return "auto"
        bytes_in(text)
        if text[-1:] not in "bB":
            raise ValueError
        return re.sub(r"\s", "", text).upper().replace("IB", "iB")


def room_bytes(value: str) -> float | None:
    """The bytes in a value of the kind Room; None for a number of things, and auto."""
    return bytes_in(value) if value[-1:] == "B" else None
