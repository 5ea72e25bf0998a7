"""One line of the log as a value: `Record.parse(line).render() == line`, byte for byte."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from quantbench.errors import LogError

# Why a run has no joules, where only their upper bound can be said.
NO_COUNTER = "no counter; power limit × time is an upper bound"


@dataclass(frozen=True)
class LineField:
    """One field of the line."""

    label: str  # the text before the value
    style: str  # format specification that the value is written with
    pattern: str  # regular expression that the written value matches
    accepts: str  # what is accepted, in words, for error messages


_NUMBER = r" *[0-9]+\.[0-9]{2}"
_TRUTH = "True|False"
# The line, from left to right. Numbers are padded to a width, and longer ones exceed it.
LINE = {
    "timestamp": LineField("", "s", "[0-9]{14}", "fourteen digits, YYYYmmddHHMMSS"),
    "tok_s": LineField(", tok/s=", "6.2f", _NUMBER, "a number with two decimals"),
    "mem_s": LineField(", mem/s=", "7.2f", _NUMBER, "a number with two decimals"),
    "peak_mem": LineField(" GB/s, peak_mem=", "5.2f", _NUMBER, "a number with two decimals"),
    "model_size": LineField(" GB, model_size=", "5.2f", _NUMBER, "a number with two decimals"),
    "quant": LineField(" GB quant: ", "s", "[^ ,]+", "a scheme, without spaces or commas"),
    "mod": LineField(", mod: ", "s", ".+?(?=, kv_quant: )", "a model's name"),
    "kv_quant": LineField(", kv_quant: ", "", _TRUTH, "True or False"),
    "compile": LineField(", compile: ", "", _TRUTH, "True or False"),
    "compile_prefill": LineField(", compile_prefill: ", "", _TRUTH, "True or False"),
    "dtype": LineField(", dtype: ", "s", "[^ ,]+", "a dtype, without spaces or commas"),
    "device": LineField(", device: ", "s", "[^ ,]+", "a device, without spaces or commas"),
    "repro": LineField(" repro: ", "s", ".+", "the command that repeats the run"),
}
# Control characters, and all that some program or other reads as the end of a line.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class Record:
    """One line of the log: what one run measured. 1 GB is 1e9 bytes."""

    timestamp: str  # local time, YYYYmmddHHMMSS
    tok_s: float  # new tokens per second of wall time, prefill included; mean over samples
    mem_s: float  # tok_s · model_size, in GB/s
    peak_mem: float  # GB
    model_size: float  # GB, embeddings excluded
    quant: str  # the scheme; "None" for full precision
    mod: str  # the model's name
    kv_quant: bool  # whether the KV cache is quantized
    compile: bool
    compile_prefill: bool
    dtype: str  # with prefix: torch.bfloat16
    device: str  # cpu, cuda, …
    repro: str  # the command that repeats the run

    def render(self) -> str:
        """The line, without a newline at its end.

        Raises LogError for what a line cannot hold: a number that is negative or not finite, a
        control character, a name that `parse` would read differently.
        """
        line = "".join(
            f"{part.label}{getattr(self, name):{part.style}}" for name, part in LINE.items()
        )
        back = Record.parse(line)
        for name, part in LINE.items():
            if part.style == "s" and getattr(back, name) != getattr(self, name):
                raise LogError(f"a log line cannot hold {name} {getattr(self, name)!r}")
        return line

    @staticmethod
    def parse(line: str) -> "Record":
        """The record in a line without its newline.

        Raises LogError with the column of the first mistake and what was expected there.
        """
        control = _CONTROL.search(line)
        if control:
            raise LogError(f"column {control.start() + 1}: control character {control[0]!r}")
        values: dict[str, Any] = {}
        position = 0
        for name, part in LINE.items():
            if not line.startswith(part.label, position):
                raise _unexpected(line, position, repr(part.label))
            position += len(part.label)
            match = re.compile(part.pattern).match(line, position)
            if not match:
                raise _unexpected(line, position, f"{name}, {part.accepts}")
            values[name] = _READ.get(part.pattern, str)(match[0])
            position = match.end()
        digits = values["timestamp"]
        try:
            datetime.fromisoformat(f"{digits[:8]}T{digits[8:]}")
        except ValueError:
            raise LogError(f"column 1: {digits} is not a date and time") from None
        return Record(**values)


def held_name(name: str) -> bool:
    """Whether a log line can hold a model of this name, so that `parse` reads the same name."""
    label, end = LINE["mod"].label, LINE["kv_quant"].label
    match = re.compile(LINE["mod"].pattern).match(f"{name}{end}True")
    return not _CONTROL.search(f"{label}{name}") and match is not None and match[0] == name


_READ: dict[str, Callable[[str], Any]] = {_NUMBER: float, _TRUTH: "True".__eq__}


def _unexpected(line: str, position: int, expected: str) -> LogError:
    return LogError(f"column {position + 1}: expected {expected}; found {excerpt(line, position)}")


def excerpt(line: str, position: int) -> str:
    rest = line[position : position + 24]
    return repr(rest) if rest else "the end of the line"
