"""The log file: lines are appended under a lock, each as a whole, and read with their numbers.

    append("benchmarks.txt", record.render())
    for number, record in read("benchmarks.txt").records:
        config_of(record)       # the run that it repeats

Neither parallel runs nor killed ones lose a line. A writer holds an exclusive flock on the file
itself, writes its line with one write and ends with fsync. A partial line that a killed writer left
is removed by the next writer, once its own line is written. A write that fails is undone: the bytes
are what they were, and a new file is removed.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.files import FilePath, lock, require_regular, require_writable
from quantbench.log import config
from quantbench.log.config import RunConfig
from quantbench.log.record import Record, excerpt
from quantbench.typed_json import parsed

MAX_HEADINGS = 10  # lines of text without a run that a file may hold and still be used as a log
LONGEST_LINE = 1 << 20  # characters of a log line; every command line is shorter
HEAD = 1 << 20  # bytes read from a file's beginning to see what the file holds


def append(path: FilePath, line: str) -> None:
    """Add one line. A missing file is created, a missing folder is not.

    If the last line lacks its newline, it gets one, or is removed if it is a record cut short.
    Raises LogError if the line cannot be written in full. The log is then unchanged.
    """
    _append(path, line, is_cut_short)


def append_json(path: FilePath, value: object) -> None:
    """Add one JSON object as a line, as safely as `append`. Raises LogError for NaN, too."""

    def is_json_cut_short(tail: str) -> bool:
        try:
            return tail.startswith("{") and parsed(tail) is None
        except ValueError:
            return True

    try:
        line = json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise LogError(f"cannot append to {shown_path(path)}: {error}") from None
    _append(path, line, is_json_cut_short)


def check(write_result: str) -> None:
    """Raise UsageError or LogError unless lines can be appended to what --write_result names, or it
    is "none"."""
    if write_result == "none":
        return
    if write_result.lower() == "none":
        raise UsageError(
            f"--write_result {write_result}: none is written small; for a file of that name give "
            f"./{write_result}"
        )
    check_writable(write_result)
    check_kind(write_result)


def check_writable(path: FilePath) -> None:
    """Raise LogError if `append` would fail. The file is neither created nor changed.

    Call it before a long run. Only `append` notices a disk that has become full since.
    """
    with as_log_error("append to", path):
        try:
            require_regular(path)
        except FileNotFoundError:
            require_writable(path)
        else:
            os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))


def check_kind(path: FilePath) -> None:
    """Raise UsageError if `path` holds anything but a log: binary data, JSON, or a text without a
    run that has more than MAX_HEADINGS lines."""
    head = _head(path)
    text = head.decode("utf-8", "surrogateescape")
    lines = text.splitlines()
    runs = any(tries_to_be_record(line) or is_cut_short(line) for line in lines)
    if b"\0" in head or text[:1] in ("{", "[") or (len(lines) > MAX_HEADINGS and not runs):
        raise UsageError(f"{shown_path(path)} holds something that is no log of runs; give another")


def check_json_kind(path: FilePath) -> None:
    """Raise UsageError if `path` holds anything but lines of JSON objects."""
    head = _head(path)
    first, newline, _ = head.partition(b"\n")
    try:
        accepted = isinstance(parsed(first), dict) if newline else not head or head[:1] == b"{"
    except ValueError:
        accepted = False
    if not accepted:
        raise UsageError(f"{shown_path(path)} holds something that is no JSON lines; give another")


def _head(path: FilePath) -> bytes:
    with as_log_error("read", path), suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read(HEAD)
    return b""


def tries_to_be_record(line: str) -> bool:
    return bool(re.match("[0-9]{14},", line)) or "tok/s=" in line


def is_cut_short(tail: str) -> bool:
    """Whether a last line without newline is what a killed writer left of its record."""
    if re.fullmatch("[0-9]{1,14}", tail):
        return True
    if not re.match("[0-9]{14},", tail):
        return False
    try:
        return config.breaks_off(Record.parse(tail).repro)
    except LogError:
        return True


def _append(path: FilePath, line: str, is_cut_short: Callable[[str], bool]) -> None:
    if "\n" in line or "\r" in line:
        raise LogError(f"cannot append to {shown_path(path)}: {line[:40]!r}… is more than one line")
    data = line.encode("utf-8", "surrogateescape") + b"\n"
    with as_log_error("append to", path):
        with suppress(FileNotFoundError):
            require_regular(path)
        is_new = not os.path.exists(path)
        descriptor = _locked(path)
        try:
            tail = _tail(descriptor)
            is_cut = bool(tail) and is_cut_short(tail.decode("utf-8", "surrogateescape"))
            _write(descriptor, b"\n" + data if tail else data)
            if is_cut:  # only now, when the new line is safe
                _move_back(path, data, os.fstat(descriptor).st_size - len(data) - len(tail) - 1)
        except BaseException:
            if is_new and os.fstat(descriptor).st_size == 0:
                os.unlink(os.path.realpath(path))
            raise
        finally:
            os.close(descriptor)


def _locked(path: FilePath) -> int:
    """The log, made if it is missing, with a lock on it that os.close releases."""
    while True:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        lock(descriptor)
        with suppress(FileNotFoundError):  # removed by who made it, for want of space
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def _move_back(path: FilePath, data: bytes, place: int) -> None:
    """Put the last line `data` where a line that was cut short begins. The file becomes shorter, so
    the disk has the room."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, data, place)
        os.ftruncate(descriptor, place + len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    """Write all of `data` and wait until it is on the disk, or restore the file's length and raise.

    One os.write is enough unless the disk is full.
    """
    size = os.fstat(descriptor).st_size
    try:
        while data:  # after a short write, the next call raises the reason
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except BaseException:
        os.ftruncate(descriptor, size)
        raise


def _tail(descriptor: int) -> bytes:
    """The bytes after the last newline, read backwards."""
    tail = b""
    position = os.fstat(descriptor).st_size
    while position and b"\n" not in tail:
        start = max(0, position - (1 << 16))
        tail = os.pread(descriptor, position - start, start) + tail
        position = start
    return tail.rpartition(b"\n")[2]


@contextmanager
def as_log_error(verb: str, path: FilePath) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        folder = os.path.dirname(os.path.realpath(path))
        missing = "no such file" if os.path.isdir(folder) else f"there is no folder {folder!r}"
        raise LogError(f"cannot {verb} {shown_path(path)}: {missing}") from None
    except OSError as error:
        raise LogError(f"cannot {verb} {shown_path(path)}: {error.strerror or error}") from None


def shown_path(path: FilePath) -> str:
    return repr(os.fspath(path))


# ------------------------------------------------------------------------------------- reading


@dataclass
class LogContent:
    """What a log holds. Lines are numbered from 1."""

    records: list[tuple[int, Record]] = field(default_factory=list)  # (line number, record)
    bad: list[tuple[int, str]] = field(default_factory=list)  # (line number, what is wrong)
    mended: list[int] = field(default_factory=list)  # lines whose repro command lacked a space


def read(path: FilePath) -> LogContent:
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
    text = data.decode("utf-8-sig", "surrogateescape").replace("\r\n", "\n")  # as Windows writes it
    lines = text.split("\n")
    reading = LogContent()
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


def _add(reading: LogContent, number: int, line: str, cut_short: bool) -> None:
    reason = problem(line)
    if cut_short:
        reason = f"cut short, and removed by the next run; {reason or 'its repro line breaks off'}"
    if reason:
        reading.bad.append((number, reason))
    with suppress(LogError, UsageError):  # it is in `bad` already
        entry = Record.parse(line)
        if not cut_short:
            reading.records.append((number, entry))
            if config.has_glued_option(entry.repro):
                reading.mended.append(number)


def config_of(record: Record) -> RunConfig:
    """The run that the repro command asks for. Raises UsageError if it cannot be read."""
    from quantbench.log.options import of_repro  # click, which a run does not need

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
