"""python -m benchlog check FILE: is every record in the log whole, and can it be run again?

python -m benchlog table FILE: the runs of a JSON lines file, side by side.
"""

import json
import sys
from pathlib import Path

import click

from benchlog import log
from benchlog import table as tables
from errors import LogError, QuantbenchError


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


@commands.command()
@click.argument("file", type=click.Path())
def table(file: str) -> None:
    """Show the runs that --output_json_path put into FILE, side by side."""
    try:
        runs = [json.loads(line) for line in Path(file).read_text().splitlines()]
        click.echo(tables.table(runs))
    except OSError as error:
        raise LogError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise LogError(f"{file} is not what generate.py --output_json_path writes") from None


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
