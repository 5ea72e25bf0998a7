"""python -m compare ab | roofline | peers | …: --help after each says more.

Every file in compare/commands/ is a command of its name, which holds a click command of that name,
too. It is imported when it is asked for: --help reads the first line of each file's docstring.
"""

import ast
import importlib
import pkgutil
from pathlib import Path

import click

from cli import Group

COMMANDS = Path(__file__).parent / "commands"


class Commands(Group):
    """The commands that lie in a folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules([str(COMMANDS)]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if not (COMMANDS / f"{cmd_name}.py").exists():
            return None
        module = importlib.import_module(f"{__package__}.commands.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            rows = [(name, self.described(name)) for name in self.list_commands(ctx)]
            formatter.write_dl(rows)

    def described(self, name: str) -> str:
        """One line about a command: its docstring's first line, after the colon."""
        text = ast.get_docstring(ast.parse((COMMANDS / f"{name}.py").read_text(encoding="utf-8")))
        return (text or "").splitlines()[0].partition(": ")[2].rstrip(".")


@click.group(cls=Commands)
def commands() -> None:
    """Compare ways to run a model: speed, memory and quality, and how sure one may be."""


def main() -> None:
    commands.main(prog_name="python -m compare")


if __name__ == "__main__":
    main()
