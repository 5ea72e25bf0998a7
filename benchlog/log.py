"""The log file: appended to under a lock, one whole line at a time; read back with line numbers.

Parallel runs and kills lose no line: a writer holds an exclusive flock on the file itself, writes
its line with one write and ends with fsync. What a killed writer left of a line is removed by the
next one; a write that fails is taken back.
"""

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from benchlog import config, record
from benchlog.record import Record
from errors import LogError, UsageError
from files import FilePath, require_regular

MAX_HEADINGS = 10  # lines of a text that may still become a log
LONGEST_LINE = 1 << 20  # characters; a command line itself is shorter
HEAD = 1 << 20  # bytes that are looked at to see what a file holds


@dataclass
class Reading:
    """What a log holds. Line numbers count from 1."""

    records: list[tuple[int, Record]] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)  # and why
    mended: list[int] = field(default_factory=list)  # repro lines with a missing space


def append(path: FilePath, line: str) -> None:
    """Add one line; the file is made where it is missing, its folder is not.

    A last line without newline gets one, or is removed where it is a record cut short.
    Raises LogError where the line cannot be written in full; but for that removal, the log is
    then as it was.
    """
    _append(path, line, _is_cut_short)


def append_json(path: FilePath, value: Mapping[str, Any]) -> None:
    """Add one JSON object as a line, as safely as `append`. Raises LogError for NaN as well."""
    try:
        line = json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise LogError(f"cannot append to {_shown(path)}: {error}") from None
    _append(path, line, _is_json_cut_short)


def check_writable(path: FilePath) -> None:
    """Raise LogError where `append` would fail; neither makes nor changes the file.

    For asking before a long run. A disk that fills up meanwhile is found by `append`.
    """
    with _as_log_error("append to", path):
        try:
            require_regular(path)
        except FileNotFoundError:
            _refuse_folder(path)
        else:
            os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))


def check_kind(path: FilePath) -> None:
    """Raise UsageError where `path` holds something else than a log: binary data, JSON, or a text
    of more than a few lines without a run among them."""
    head = _head(path)
    text = head.decode("utf-8", "surrogateescape")
    lines = text.splitlines()
    runs = any(_tries_to_be_record(line) or _is_cut_short(line) for line in lines)
    if b"\0" in head or text[:1] in ("{", "[") or (len(lines) > MAX_HEADINGS and not runs):
        raise UsageError(f"{_shown(path)} holds something that is no log of runs; give another")


def check_json_kind(path: FilePath) -> None:
    """Raise UsageError where `path` holds something else than lines of JSON objects."""
    head = _head(path)
    first, whole, _ = head.partition(b"\n")
    try:
        alike = isinstance(json.loads(first), dict) if whole else not head or head[:1] == b"{"
    except (ValueError, RecursionError):
        alike = False
    if not alike:
        raise UsageError(f"{_shown(path)} holds something that is no JSON lines; give another")


def _head(path: FilePath) -> bytes:
    with _as_log_error("read", path), suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read(HEAD)
    return b""


def read(path: FilePath) -> Reading:
    """Every record of a log, and every line that tries to be one and is not.

    A line tries where it begins with fourteen digits and a comma, or holds "tok/s="; any other
    is a heading. A record that re-renders differently, or whose repro line is not understood, is
    in both lists.
    Raises LogError where the file cannot be read, holds binary data, or holds text and no such
    line.
    """
    with _as_log_error("read", path):
        require_regular(path)
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # so that no line is seen half written
            data = file.read()
    if b"\0" in data:
        column = data.index(b"\0")
        raise LogError(f"{_shown(path)} is no log: byte {column + 1} is zero, as in binary data")
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    reading = Reading()
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_LINE:
            reading.bad.append((number, f"{len(line)} characters, which no run writes"))
            continue
        cut_short = number == len(lines) and _is_cut_short(line)
        if cut_short or _tries_to_be_record(line):
            _add(reading, number, line, cut_short)
    if data.strip() and not (reading.records or reading.bad):
        raise LogError(f"{os.fspath(path)} holds no line of a run")
    return reading


def _add(reading: Reading, number: int, line: str, cut_short: bool) -> None:
    reason = record.problem(line)
    if cut_short:
        reason = f"cut short, and removed by the next run; {reason or 'its repro line breaks off'}"
    if reason:
        reading.bad.append((number, reason))
    try:
        entry = Record.parse(line)
        if not cut_short:
            reading.records.append((number, entry))
            if config.has_glued_option(entry.repro):
                reading.mended.append(number)
    except (LogError, UsageError):
        pass  # it is in `bad` already


def _tries_to_be_record(line: str) -> bool:
    return bool(re.match("[0-9]{14},", line)) or "tok/s=" in line


def _is_cut_short(tail: str) -> bool:
    """Whether a last line without newline is what a killed writer left of its record."""
    if re.fullmatch("[0-9]{1,14}", tail):
        return True
    if not re.match("[0-9]{14},", tail):
        return False
    try:
        return config.breaks_off(Record.parse(tail).repro)
    except LogError:
        return True


def _is_json_cut_short(tail: str) -> bool:
    if not tail.startswith("{"):
        return False
    try:
        json.loads(tail)
    except ValueError:
        return True
    return False


def _append(path: FilePath, line: str, is_cut_short: Callable[[str], bool]) -> None:
    if "\n" in line or "\r" in line:
        raise LogError(f"cannot append to {_shown(path)}: {line[:40]!r}… is more than one line")
    data = line.encode("utf-8", "surrogateescape") + b"\n"
    with _as_log_error("append to", path):
        with suppress(FileNotFoundError):
            require_regular(path)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # closing gives it back
            tail = _tail(descriptor)
            if tail and is_cut_short(tail.decode("utf-8", "surrogateescape")):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - len(tail))
            elif tail:
                data = b"\n" + data
            _write(descriptor, data)
        finally:
            os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    """All of it, on the disk, or nothing. One write is enough, but for a disk that fills up."""
    size = os.fstat(descriptor).st_size
    try:
        while data:  # after a short write, the next one says what is wrong
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except BaseException:
        os.ftruncate(descriptor, size)
        raise


def _tail(descriptor: int, block: int = 1 << 16) -> bytes:
    """What follows the last newline."""
    tail = b""
    position = os.fstat(descriptor).st_size
    while position and b"\n" not in tail:
        start = max(0, position - block)
        tail = os.pread(descriptor, position - start, start) + tail
        position = start
    return tail.rpartition(b"\n")[2]


def _refuse_folder(path: FilePath) -> None:
    """Raise where a file that is not there could not be made."""
    if os.fspath(path).endswith(os.sep):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    # A link that leads nowhere yet is made where it points to.
    folder = os.path.dirname(os.path.realpath(path))
    if not os.fspath(path) or not os.path.exists(folder):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _as_log_error(verb: str, path: FilePath) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        folder = os.path.dirname(os.path.realpath(path))
        missing = "no such file" if os.path.isdir(folder) else f"there is no folder {folder!r}"
        raise LogError(f"cannot {verb} {_shown(path)}: {missing}") from None
    except OSError as error:
        raise LogError(f"cannot {verb} {_shown(path)}: {error.strerror or error}") from None


def _shown(path: FilePath) -> str:
    return repr(os.fspath(path))
