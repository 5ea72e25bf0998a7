"""What a run tells on stderr while it works: lines, and the progress of what takes long."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

Report = Callable[[int, int], None]
SECONDS_BETWEEN_LINES = 2.0  # of progress, where no line can be erased


def say(line: str) -> None:
    """Print a line to stderr; stdout is for results. A failure to write it is ignored."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


@contextlib.contextmanager
def progress(what: str, lasting: bool = True, unit: str = "GB") -> Iterator[Report]:
    """Show `what` and the time that passes; yields report(done, total), in bytes for "GB".

    On a terminal that can erase a line, this line moves; elsewhere a new one comes every few
    seconds. lasting: whether to leave a line with the seconds that it took. unit: of the report.
    """
    started = time.perf_counter()
    with _moving(what, unit) if can_erase() else _lines(what, unit) as report:
        yield report
    if lasting:
        say(f"{what}: {time.perf_counter() - started:.1f} s")


def can_erase() -> bool:
    """Whether stderr is a terminal on which a line can move."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@contextlib.contextmanager
def _moving(what: str, unit: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, description=_line(what, done, total, unit))


@contextlib.contextmanager
def _lines(what: str, unit: str) -> Iterator[Report]:
    spoken = time.perf_counter()

    def report(done: int, total: int) -> None:
        nonlocal spoken
        if done < total and time.perf_counter() >= spoken + SECONDS_BETWEEN_LINES:
            spoken = time.perf_counter()
            say(_line(what, done, total, unit))

    yield report


def _line(what: str, done: int, total: int, unit: str) -> str:
    part = f"{done / 1e9:.2f} of {total / 1e9:.2f}" if unit == "GB" else f"{done} of {total}"
    return f"{what}: {part} {unit}"


class Progress:
    """What a command is doing: one line that moves on a terminal; elsewhere a line for each change.

    with Progress() as progress:
        progress("int8wo: loading", "arm 3 of 26")  # what, and how far
        progress("measuring", "cycle 12")
        progress("measuring", "cycle 13")           # the same thing: no new line
    """

    def __init__(self) -> None:
        self.what = ""
        self.status: Any = None

    def __enter__(self) -> "Progress":
        if can_erase():
            from rich.console import Console

            self.status = Console(stderr=True).status("")
            self.status.start()
        return self

    def __exit__(self, *of_error: object) -> None:
        if self.status:
            self.status.stop()

    def __call__(self, what: str, how_far: str = "") -> None:
        line = "; ".join(filter(None, (what, how_far)))
        if self.status:
            from rich.markup import escape

            self.status.update(escape(line))
        elif what != self.what:
            say(line)
        self.what = what

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.status:
            self.status.console.print(line, markup=False, highlight=False)
        else:
            say(line)


def duration(seconds: float) -> str:
    """A time for people: 8 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
