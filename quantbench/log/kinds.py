"""Kinds of option values: how each is read, checked and written."""

import math
import re
from typing import Any

import click
from click.shell_completion import CompletionItem

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

    def of(self, option: str, value: object) -> object:
        """The value of this option. Raises UsageError, one line, when it is not accepted."""
        try:
            return self.read(value)
        except ValueError:
            raise UsageError(f"{option} takes {self.accepts}; given: {shown(value)}") from None

    def convert(self, value: object, param: Any, ctx: object) -> object:
        """For click, of an option that is no field of RunConfig."""
        return self.of(param.opts[0], value)


class Switch(Kind):
    """An option without a value: present or absent."""

    accepts = "no value: it is there or not"

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


class Text(Kind):
    """Text that a command line can hold: without a NUL character."""

    def __init__(self, metavar: str = "TEXT", may_be_empty: bool = False) -> None:
        self.metavar, self.may_be_empty = metavar, may_be_empty
        self.accepts = "a value that is not empty and has no NUL character"
        if may_be_empty:
            self.accepts = "text without NUL characters"

    def read(self, value: object) -> str:
        if isinstance(value, str) and (value or self.may_be_empty) and shell.carries(value):
            return value
        raise ValueError


class Whole(Kind):
    """A whole number from `minimum` to `maximum`, both included."""

    metavar = "N"

    def __init__(self, minimum: int, maximum: int = MAX_INT) -> None:
        self.minimum, self.maximum = minimum, maximum
        most = "2**63-1" if maximum == MAX_INT else maximum
        self.accepts = f"a whole number from {minimum} to {most}"

    def read(self, value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,40}", value):
            value = int(value)
        if type(value) is int and self.minimum <= value <= self.maximum:
            return value
        raise ValueError


class Number(Kind):
    """A finite number of at least 0; or one above 0, and below `most` if that is given.

    what: the number's unit, in words, where it has a `most`.
    """

    metavar = "X"

    def __init__(self, positive: bool = False, what: str = "", most: str = "") -> None:
        self.positive, self.most = positive or bool(most), float(most or math.inf)
        self.accepts = f"a finite number {'above' if positive else 'of at least'} 0"
        if most:
            self.accepts = f"{what}, above 0 and below {most}"

    def read(self, value: object) -> float:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ValueError
        try:
            number = float(value)
        except OverflowError:
            raise ValueError from None
        if not 0 <= number < self.most or (self.positive and not number):
            raise ValueError
        return abs(number)  # -0.0 would be written with a dash


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


class ByteSize(Kind):
    """A size in bytes, from `least` on: fewer are a unit that was forgotten."""

    metavar = "SIZE"
    accepts = "a size such as 8GB or 7.5GiB"

    def __init__(self, least: float = 1e3) -> None:
        self.least = least

    def read(self, value: object) -> int:
        return round(bytes_in(str(value), self.least))


class OneOf(Kind):
    """One of a few names.

    prefix: always written before the name; optional when read.
    former: names in old logs: readable, but a run refuses them.
    """

    metavar = "NAME"

    def __init__(
        self, choices: tuple[str, ...], prefix: str = "", former: tuple[str, ...] = ()
    ) -> None:
        self.choices, self.prefix, self.former = choices, prefix, former
        self.accepts = "one of " + ", ".join(choices)

    def read(self, value: object) -> str:
        name = value.removeprefix(self.prefix) if isinstance(value, str) else ""
        if name not in (*self.choices, *self.former):
            raise ValueError
        return name

    def write(self, value: str) -> str:
        return self.prefix + value

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self.choices if name.startswith(incomplete)]


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
