"""One line of the log as a value: `Record.parse(line).render() == line`, byte for byte."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from benchlog import config
from benchlog.config import RunConfig
from errors import LogError, QuantbenchError, UsageError


@dataclass(frozen=True)
class Part:
    """One field in the line: the words before it, how it is written, and what may stand there."""

    label: str
    style: str
    pattern: str
    accepts: str


_NUMBER = r" *[0-9]+\.[0-9]{2}"
_TRUTH = "True|False"
# The line, from left to right; numbers are padded to a width and grow beyond it.
LINE = {
    "timestamp": Part("", "s", "[0-9]{14}", "fourteen digits, YYYYmmddHHMMSS"),
    "tok_s": Part(", tok/s=", "6.2f", _NUMBER, "a number with two decimals"),
    "mem_s": Part(", mem/s=", "7.2f", _NUMBER, "a number with two decimals"),
    "peak_mem": Part(" GB/s, peak_mem=", "5.2f", _NUMBER, "a number with two decimals"),
    "model_size": Part(" GB, model_size=", "5.2f", _NUMBER, "a number with two decimals"),
    "quant": Part(" GB quant: ", "s", "[^ ,]+", "a scheme, without spaces or commas"),
    "mod": Part(", mod: ", "s", ".+?(?=, kv_quant: )", "a model's name"),
    "kv_quant": Part(", kv_quant: ", "", _TRUTH, "True or False"),
    "compile": Part(", compile: ", "", _TRUTH, "True or False"),
    "compile_prefill": Part(", compile_prefill: ", "", _TRUTH, "True or False"),
    "dtype": Part(", dtype: ", "s", "[^ ,]+", "a dtype, without spaces or commas"),
    "device": Part(", device: ", "s", "[^ ,]+", "a device, without spaces or commas"),
    "repro": Part(" repro: ", "s", ".+", "the command that repeats the run"),
}
# What one reader or another takes for the end of a line, and other control characters.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class Record:
    """What one run measured. Rates are per second of wall time, prefill included; GB are 1e9 bytes.

    `timestamp` is local time, YYYYmmddHHMMSS; `quant` is "None" for full precision; `mod` is the
    model's name; `dtype` is written torch.bfloat16; `repro` is the command that repeats the run.
    """

    timestamp: str
    tok_s: float
    mem_s: float
    peak_mem: float
    model_size: float
    quant: str
    mod: str
    kv_quant: bool
    compile: bool
    compile_prefill: bool
    dtype: str
    device: str
    repro: str

    def render(self) -> str:
        """The line, without a newline at its end.

        Raises LogError for what no line can hold: a number that is negative or not finite, a
        control character, a name that would read back as something else.
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
        """The record in a line without its newline. Raises LogError: which column, what was due."""
        control = _CONTROL.search(line)
        if control:
            raise LogError(f"column {control.start() + 1}: control character {control[0]!r}")
        values: dict[str, Any] = {}
        position = 0
        for name, part in LINE.items():
            if not line.startswith(part.label, position):
                raise _unexpected(line, position, repr(part.label))
            position += len(part.label)
            found = re.compile(part.pattern).match(line, position)
            if not found:
                raise _unexpected(line, position, f"{name}, {part.accepts}")
            values[name] = _READ.get(part.pattern, str)(found[0])
            position = found.end()
        if not _is_date(values["timestamp"]):
            raise LogError(f"column 1: {values['timestamp']} is not a date and time")
        return Record(**values)

    def config(self) -> RunConfig:
        """The run that the repro line asks for. Raises UsageError where it is not understood."""
        words = config.split(self.repro)
        if len(words) < 2 or words[1].rpartition("/")[2] != "generate.py":
            raise UsageError("the repro line does not begin with python generate.py")
        return config.parse(words[2:])


def held_name(name: str) -> bool:
    """Whether a log line can hold a model of this name: it has to read back as the same."""
    label, end = LINE["mod"].label, LINE["kv_quant"].label
    found = re.compile(LINE["mod"].pattern).match(f"{name}{end}True")
    return not _CONTROL.search(f"{label}{name}") and found is not None and found[0] == name


def problem(line: str) -> str | None:
    """Why a line is no good record; None where it re-renders the same and can be run again."""
    try:
        record = Record.parse(line)
        again = record.render()
        if again != line:
            pairs = zip(line, again, strict=False)
            column = next(
                (index for index, pair in enumerate(pairs) if pair[0] != pair[1]),
                min(len(line), len(again)),
            )
            return (
                f"column {column + 1}: {_excerpt(line, column)} is written "
                f"{_excerpt(again, column)} by this format"
            )
        record.config()
    except QuantbenchError as error:
        return f"repro line: {error}" if isinstance(error, UsageError) else str(error)
    return None


_READ: dict[str, Callable[[str], Any]] = {_NUMBER: float, _TRUTH: "True".__eq__}


def _is_date(digits: str) -> bool:
    try:
        datetime.fromisoformat(f"{digits[:8]}T{digits[8:]}")
    except ValueError:
        return False
    return True


def _unexpected(line: str, position: int, due: str) -> LogError:
    return LogError(f"column {position + 1}: expected {due}; found {_excerpt(line, position)}")


def _excerpt(line: str, position: int) -> str:
    rest = line[position : position + 24]
    return repr(rest) if rest else "the end of the line"
