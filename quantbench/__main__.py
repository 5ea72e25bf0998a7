"""quantbench: every command under one name.

    python generate.py --quantization int8wo --compile          # one run, the embedded model
    quantbench recommend --checkpoint_path DIR           # your own model: what to take
    quantbench ab --checkpoint_path DIR --arms all       # every scheme that runs here
    quantbench schemes --list                            # which schemes there are

Each command is a file of commands/, and only the file of the given command is imported.
"""

import ast
import importlib
import os
import pkgutil
from pathlib import Path

import click

import quantbench
from quantbench import completion
from quantbench.cli import Group

FIRST = ("generate", "ab", "recommend", "schemes")  # in this order before all others
COMMANDS = Path(__file__).parent / "commands"


class Commands(Group):
    """A command for each file of COMMANDS, which holds a click command of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {module.name for module in pkgutil.iter_modules([str(COMMANDS)])}
        return [*FIRST, *sorted(names - {*FIRST})]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"quantbench.commands.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        if "_QUANTBENCH_COMPLETE" in os.environ:
            completion.attach(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            names = self.list_commands(ctx)
            formatter.write_dl([(name, described(name)) for name in names])

    def spelled(self, example: str) -> str:
        generate = "python generate.py"
        if example.startswith(generate):
            return "quantbench generate" + example.removeprefix(generate)
        return example


def described(name: str) -> str:
    """One line about a command: the first line of its file's docstring, after the colon."""
    text = ast.get_docstring(ast.parse((COMMANDS / f"{name}.py").read_text(encoding="utf-8")))
    return (text or "").splitlines()[0].partition(": ")[2].rstrip(".")


def say_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"quantbench {quantbench.__version__}")
        ctx.exit()


COMPLETION = """\b
Completion with TAB: a line for ~/.bashrc (in ~/.zshrc with zsh_source instead)
eval "$(_QUANTBENCH_COMPLETE=bash_source quantbench)"
"""


@click.group(cls=Commands, epilog=COMPLETION)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=say_version,
              help="Show the version and exit.")  # fmt: skip
def commands() -> None:
    """Which quantization should I run here? Run a model, compare, and get an answer."""


def main() -> None:
    commands.main(prog_name="quantbench")


if __name__ == "__main__":
    main()
