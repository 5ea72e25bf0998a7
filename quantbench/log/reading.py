"""Reading a log: its records, and its damaged lines.

for number, record in read("benchmarks.txt").records:
    config_of(record)           # the run that it repeats
"""

import contextlib
import os
from dataclasses import dataclass, field

from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.files import FilePath, lock, require_regular
from quantbench.log import config
from quantbench.log.config import RunConfig
from quantbench.log.log import (
    LONGEST_LINE,
    as_log_error,
    is_cut_short,
    shown_path,
    tries_to_be_record,
)
from quantbench.log.options import of_repro
from quantbench.log.record import Record, excerpt


@dataclass
class Reading:
    """What a log holds. Lines are numbered from 1."""

    records: list[tuple[int, Record]] = field(default_factory=list)  # (line number, record)
    bad: list[tuple[int, str]] = field(default_factory=list)  # (line number, what is wrong)
    mended: list[int] = field(default_factory=list)  # lines whose repro command lacked a space


def read(path: FilePath) -> Reading:
    """Every record of a log, and every damaged line with what is wrong with it.

    A line that begins with fourteen digits and a comma, or holds "tok/s=", should be a record; any
    other line is a heading. A record that renders differently, or whose repro command cannot be
    read, is in both lists.
    Raises LogError for a file that cannot be read, holds binary data, or holds only headings.
    """
    with as_log_error("read", path):
        require_regular(path)
        with open(path, "rb") as file:
            lock(file, shared=True)  # waits for a writer to finish its line
            data = file.read()
    if b"\0" in data:
        column = data.index(b"\0")
        raise LogError(
            f"{shown_path(path)} is no log: byte {column + 1} is zero, as in binary data"
        )
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    reading = Reading()
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_LINE:
            reading.bad.append((number, f"{len(line)} characters, which no run writes"))
            continue
        cut_short = number == len(lines) and is_cut_short(line)
        if cut_short or tries_to_be_record(line):
            _add(reading, number, line, cut_short)
    if data.strip() and not (reading.records or reading.bad):
        raise LogError(f"{os.fspath(path)} holds no line of a run")
    return reading


def _add(reading: Reading, number: int, line: str, cut_short: bool) -> None:
    reason = problem(line)
    if cut_short:
        reason = f"cut short, and removed by the next run; {reason or 'its repro line breaks off'}"
    if reason:
        reading.bad.append((number, reason))
    with contextlib.suppress(LogError, UsageError):  # it is in `bad` already
        entry = Record.parse(line)
        if not cut_short:
            reading.records.append((number, entry))
            if config.has_glued_option(entry.repro):
                reading.mended.append(number)


def config_of(record: Record) -> RunConfig:
    """The run that the repro command asks for. Raises UsageError if it cannot be read."""
    return of_repro(record.repro)


def problem(line: str) -> str | None:
    """Why a line is damaged; None if it renders the same again and its run can be repeated."""
    try:
        record = Record.parse(line)
        again = record.render()
        if again != line:
            column = len(os.path.commonprefix((line, again)))
            return (
                f"column {column + 1}: {excerpt(line, column)} is written "
                f"{excerpt(again, column)} by this format"
            )
        config_of(record)
    except QuantbenchError as error:
        return f"repro line: {error}" if isinstance(error, UsageError) else str(error)
    return None
