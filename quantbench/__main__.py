"""quantbench: every command under one name.

`generate` is generate.py, `log` is benchlog, and all others are the files of compare/commands/.
Nothing is imported but the command that was asked for.
"""

import click

import quantbench
from compare.__main__ import Commands

# Commands that are no file of compare/commands/, and what --help says about them.
OTHERS = {
    "generate": "generate text, and log speed and memory",
    "log": "check a log of runs, or show runs as a table",
}


class Everything(Commands):
    """The commands of compare, and the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*OTHERS, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None
        match cmd_name:
            case "generate":
                from generate import main as command
            case "log":
                from benchlog.__main__ import commands as command
            case _:
                command = super().get_command(ctx, cmd_name)
        return command

    def described(self, name: str) -> str:
        return OTHERS[name] if name in OTHERS else super().described(name)


def say_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"quantbench {quantbench.__version__}")
        ctx.exit()


@click.group(cls=Everything)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=say_version,
              help="Show the version and exit.")  # fmt: skip
def commands() -> None:
    """Which quantization should I run here? Run a model, compare, and get an answer."""


def main() -> None:
    commands.main(prog_name="quantbench")


if __name__ == "__main__":
    main()
