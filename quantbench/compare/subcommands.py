"""A command that does something itself, and has subcommands, too.

@click.command(cls=WithSubcommands)
def latency(…): …                           # quantbench latency --runs 10

@latency.subcommand
@click.command(cls=Command)
def tables(…): …                            # quantbench latency tables DIR
"""

import difflib
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from quantbench.cli import Command, key
from quantbench.errors import UsageError
from quantbench.text import shown


class WithSubcommands(Command):
    """The first word decides: a subcommand's name, or this command's own options."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.subcommands: dict[str, Command] = {}

    def subcommand(self, command: Command) -> Command:
        """Add it; a decorator."""
        self.subcommands[command.name or ""] = command
        return command

    def _asked_for(self, args: Sequence[str]) -> Command | None:
        return self.subcommands.get(key(args[0])) if args else None

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if (command := self._asked_for(args)) is None:
            close = difflib.get_close_matches(key(args[0]), self.subcommands, n=1) if args else []
            if close and not args[0].startswith("-"):
                raise UsageError(f"no such command {shown(args[0])}; did you mean {close[0]}?")
            return super().make_context(info_name, args, parent, **extra)
        name = f"{info_name} {command.name}"
        return command.make_context(name, args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def asks_for_debug(self, ctx: click.Context, args: Sequence[str]) -> bool:
        if (command := self._asked_for(args)) is None:
            return super().asks_for_debug(ctx, args)
        return command.asks_for_debug(click.Context(command, parent=ctx), args[1:])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands, each with its own --help"):
            formatter.write_dl(
                [(name, sub.get_short_help_str(90)) for name, sub in self.subcommands.items()]
            )
        super().format_epilog(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.subcommands if incomplete and name.startswith(incomplete)]
        return [*map(CompletionItem, names), *super().shell_complete(ctx, incomplete)]
