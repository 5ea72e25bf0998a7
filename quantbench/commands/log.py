"""quantbench log: check a log of runs.

quantbench log check benchmarks.txt     # names each damaged line; then exits with 1
"""

import os
import sys

import click

from quantbench.cli import Command, Group
from quantbench.log.log import read as read_log
from quantbench.text import counted, plain


@click.group(cls=Group)
def log() -> None:
    """Check the log of benchmark runs."""


@log.command(cls=Command)
@click.argument("file", type=click.Path())
def check(file: str) -> None:
    """Check that every line of FILE is intact and that its run can be repeated.

    Names each damaged line, with its number and the reason, and then exits with 1.
    """
    reading = read_log(file)
    for number, reason in reading.bad:
        click.echo(f"{plain(os.fspath(file))}:{number}: {reason}")
    count = len(reading.records)
    if reading.bad:
        click.echo(f"{counted(count, 'record')}, {counted(len(reading.bad), 'damaged line')}")
        sys.exit(1)
    mended = counted(len(reading.mended), "repro command")
    note = f"; {mended} lacked a space, which was inserted" if reading.mended else ""
    click.echo(f"{counted(count, 'record')}, {'all ' * (count > 1)}intact{note}")
