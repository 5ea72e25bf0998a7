"""What every command has in common: failures of one line, progress, and quiet libraries."""

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import click

from benchlog.config import Command
from errors import QuantbenchError

Report = Callable[[int, int], None]


class OneLineErrors(Command):
    """A command whose every failure is one line on stderr: what was given, what would work."""

    def main(self, *args: Any, **extra: Any) -> Any:
        extra["standalone_mode"] = False
        given = args[0] if args and args[0] is not None else extra.get("args") or sys.argv[1:]
        try:
            return super().main(*args, **extra)
        except (Exception, KeyboardInterrupt) as error:
            if "--debug" in given:
                raise
            message, code = explained(error)
        click.echo(f"error: {' '.join(message.split())}", err=True)
        sys.exit(code)


def explained(error: BaseException) -> tuple[str, int]:
    """What to say about a failure, and the exit code; the last line of defence says so."""
    if isinstance(error, QuantbenchError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "interrupted; nothing was logged", 130
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or "can't allocate memory" in str(error):  # torch's words for it on the CPU
        return "out of memory; try a smaller --cache_size, --batch_size or a --quantization", 1
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line} (--debug shows where; please report it)", 1


def quiet(debug: bool) -> None:
    """Keep the compiler's and the libraries' remarks out of the way of ours."""
    if not debug:
        warnings.filterwarnings("ignore")
        for name in ("torch._inductor", "torch._dynamo", "torchao", "bitsandbytes"):
            logging.getLogger(name).setLevel(logging.ERROR)


def say(line: str) -> None:
    """What the person should know while waiting: on stderr, so that stdout is the result."""
    click.echo(line, err=True)


@contextlib.contextmanager
def progress(what: str, lasting: bool = True) -> Iterator[Report]:
    """Show that something is going on, and for how long; yields report(bytes_done, bytes_total).

    What is not `lasting` is shown to a person who waits, and leaves no line.
    """
    started = time.perf_counter()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(
                task, description=f"{what}: {done / 1e9:.2f} of {total / 1e9:.2f} GB"
            )
    else:
        if lasting:
            say(f"{what} …")
        yield lambda done, total: None
    if lasting:
        say(f"{what}: {time.perf_counter() - started:.1f} s")
