"""What a run tells on stderr while it works: lines, and the progress of what takes long."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from quantbench.text import printed

Report = Callable[[int, int], None]
Say = Callable[[str], None]
SECONDS_BETWEEN_LINES = 2.0  # of progress, where no line can be erased
SECONDS_BEFORE_ESTIMATE = 3.0  # of work, before the time left is shown


def say(line: str) -> None:
    """Print a line to stderr; stdout is for results. A failure to write it is ignored."""
    with contextlib.suppress(OSError):
        click.echo(printed(line), err=True)


class Progress:
    """What a command is doing: one line that moves on a terminal; elsewhere a line for each change.

    with Progress() as progress:
        progress("int8wo: loading", "arm 3 of 26")  # what, and how far
        progress("measuring", "cycle 12")
        progress("measuring", "cycle 13")           # the same thing: no new line
    """

    def __init__(self) -> None:
        self.what = ""
        self.bar: Any = None  # on a terminal; of rich, which takes 40 ms to import

    def __enter__(self) -> "Progress":
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        if on_terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = SpinnerColumn(), TextColumn("{task.description}", markup=False)
            console = Console(stderr=True)
            self.bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self.bar.add_task("")
            self.bar.start()
        return self

    def __exit__(self, *of_error: object) -> None:
        if self.bar:
            self.bar.stop()

    def __call__(self, what: str, how_far: str = "") -> None:
        line = "; ".join(filter(None, (what, how_far)))
        if self.bar:
            self.bar.update(self.bar.task_ids[0], description=printed(line))
        elif what != self.what:
            say(line)
        self.what = what

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.bar:
            self.bar.console.print(printed(line), markup=False, highlight=False)
        else:
            say(line)


@contextlib.contextmanager
def progress(what: str, lasting: bool = True, unit: str = "GB") -> Iterator[Report]:
    """Show `what`, how far it is and the time left; yields report(done, total), bytes for "GB".

    Where no line can move, a new one comes every few seconds. lasting: whether to leave a line with
    the seconds that it took. unit: of the report.
    """
    started = spoken = time.perf_counter()

    def report(done: int, total: int) -> None:
        nonlocal spoken
        part = f"{done / 1e9:.2f} of {total / 1e9:.2f}" if unit == "GB" else f"{done} of {total}"
        part, now = f"{part} {unit}", time.perf_counter()
        if started + SECONDS_BEFORE_ESTIMATE < now and 0 < done < total:
            part += f", {duration((now - started) * (total / done - 1))} left"
        if shown.bar:
            shown(f"{what}: {part}")
        elif done < total and now >= spoken + SECONDS_BETWEEN_LINES:
            spoken = now
            say(f"{what}: {part}")

    with Progress() as shown:
        if shown.bar:
            shown(what)
        yield report
    if lasting:
        say(f"{what}: {time.perf_counter() - started:.1f} s")


def duration(seconds: float) -> str:
    """A time for people: 8 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
