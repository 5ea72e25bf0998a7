"""python -m benchlog check FILE: is every record in the log whole, and can it be run again?

python -m benchlog table FILE: the runs of a JSON lines file, side by side.
"""

import sys

import click

from benchlog import log
from benchlog import table as tables
from cli import Command, Group
from text import counted


@click.group(cls=Group)
def commands() -> None:
    """Look after the log of benchmark runs."""


@commands.command(cls=Command)
@click.argument("file", type=click.Path())
@click.option("--debug", is_flag=True, help="Show tracebacks")
def check(file: str, debug: bool) -> None:
    """Count the records of FILE and check that each re-renders byte for byte.

    Exits with 1 and names every line that does not, with its number and the reason.
    """
    reading = log.read(file)
    for number, reason in reading.bad:
        click.echo(f"{click.format_filename(file)}:{number}: {reason}")
    records = counted(len(reading.records), "record")
    if reading.bad:
        click.echo(f"{records}, {counted(len(reading.bad), 'bad line')}")
        sys.exit(1)
    mended = counted(len(reading.mended), "repro line")
    note = f"; {mended} had a missing space, understood" if reading.mended else ""
    click.echo(f"{records}, all re-render byte for byte{note}")


@commands.command(cls=Command)
@click.argument("file", type=click.Path())
@click.option("--debug", is_flag=True, help="Show tracebacks")
def table(file: str, debug: bool) -> None:
    """Show the runs that --output_json_path put into FILE, side by side."""
    click.echo(tables.table(tables.read(file)))


def main() -> None:
    commands.main(prog_name="python -m benchlog")


if __name__ == "__main__":
    main()
