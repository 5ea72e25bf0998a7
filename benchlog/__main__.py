"""python -m benchlog check FILE: is every record in the log whole, and can it be run again?"""

import sys

import click

from benchlog import log
from errors import QuantbenchError


@click.group(no_args_is_help=False)
def commands() -> None:
    """Look after the log of benchmark runs."""


@commands.command()
@click.argument("file", type=click.Path())
def check(file: str) -> None:
    """Count the records of FILE and check that each re-renders byte for byte.

    Exits with 1 and names every line that does not, with its number and the reason.
    """
    reading = log.read(file)
    for number, reason in reading.bad:
        click.echo(f"{click.format_filename(file)}:{number}: {reason}")
    records = _counted(len(reading.records), "record")
    if reading.bad:
        click.echo(f"{records}, {_counted(len(reading.bad), 'bad line')}")
        sys.exit(1)
    mended = _counted(len(reading.mended), "repro line")
    note = f"; {mended} had a missing space, understood" if reading.mended else ""
    click.echo(f"{records}, all re-render byte for byte{note}")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def main() -> None:
    try:
        commands.main(prog_name="python -m benchlog", standalone_mode=False)
    except (QuantbenchError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"error: {' '.join(message.split())}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
