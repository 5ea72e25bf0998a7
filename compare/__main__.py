"""python -m compare ab | roofline | peers | …: --help after each says more."""

import sys

import click

from cli import explained
from compare.commands.ab import ab
from compare.commands.growth import growth
from compare.commands.peers import peers
from compare.commands.quality import quality
from compare.commands.readme import readme
from compare.commands.replay import replay
from compare.commands.roofline import roofline
from run import environment


@click.group(no_args_is_help=False)
def commands() -> None:
    """Compare ways to run a model: speed, memory and quality, and how sure one may be."""


for command in (ab, roofline, growth, peers, quality, replay, readme):
    commands.add_command(command)


def main() -> None:
    """Every failure is one line on stderr, but with --debug."""
    environment.prepare()
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
