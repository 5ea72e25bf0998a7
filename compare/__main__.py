"""python -m compare ab | roofline | peers | …: --help after each says more."""

import sys

import click

from compare.ab import ab
from compare.growth import growth
from compare.peers import peers
from compare.quality import quality
from compare.readme import readme
from compare.replay import replay
from compare.roofline import roofline
from generate import explained


@click.group(no_args_is_help=False)
def commands() -> None:
    """Compare ways to run a model: speed, memory and quality, and how sure one may be."""


for command in (ab, roofline, growth, peers, quality, replay, readme):
    commands.add_command(command)


def main() -> None:
    """Every failure is one line on stderr, but with --debug."""
    try:
        commands.main(prog_name="python -m compare", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in sys.argv:
            raise
        message, code = explained(error)
        click.echo(f"error: {' '.join(message.split())}", err=True)
        sys.exit(code)


if __name__ == "__main__":
    main()
