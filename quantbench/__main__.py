"""quantbench: every command under one name.

    python generate.py --quantization int8wo --compile          # one run, the embedded model
    quantbench recommend --checkpoint_path DIR           # your own model: what to take
    quantbench ab --checkpoint_path DIR --arms all       # every scheme that runs here
    quantbench schemes --list                            # which schemes there are

Each command is a file of commands/ or of a room's commands/, and only the file of the given command
is imported.
"""

import ast
import os
from collections.abc import Callable
from functools import partial

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

import quantbench
from quantbench.cli import Group
from quantbench.command_files import command as loaded
from quantbench.command_files import command_files
from quantbench.log.config import option_table
from quantbench.log.kinds import OneOf
from quantbench.models.presets import PRESETS
from quantbench.quantize.spec import MEASURED, SHOWN

# Headings of --help, with their commands; those of no heading come under the second.
SECTIONS = {
    "Commands": ("generate", "ab", "recommend", "quality", "estimate", "latency"),
    "More": (),
    "For those who change quantbench": ("readme",),
}


class Commands(Group):
    """A command for each of command_files()."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self.sections().values() for name in names]

    def sections(self) -> dict[str, list[str]]:
        """Names of commands by the headings of --help."""
        files = command_files()
        found = {
            head: [name for name in names if name in files] for head, names in SECTIONS.items()
        }
        placed = {name for names in found.values() for name in names}
        return found | {"More": sorted(files.keys() - placed)}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = loaded(cmd_name)
        if "_QUANTBENCH_COMPLETE" in os.environ:
            for parameter in command.params:
                offered = partial(offer, parameter, parameter.shell_complete)
                vars(parameter)["shell_complete"] = offered
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in self.sections().items():
            if names:  # a checkout may lack rooms
                with formatter.section(heading):
                    formatter.write_dl([(name, described(name)) for name in names])

    def spelled(self, example: str) -> str:
        generate = "python generate.py"
        if example.startswith(generate):
            return "quantbench generate" + example.removeprefix(generate)
        return example


def described(name: str) -> str:
    """One line about a command: the first line of its file's docstring, after the colon."""
    text = ast.get_docstring(ast.parse(command_files()[name].read_text(encoding="utf-8")))
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


# --------------------------------------------------------------------------------- completion

# click asks for it while a person types, in a new process for each TAB: no torch here.
# What is offered for an option or argument of that name.
VALUES: dict[str, tuple[str, ...]] = {
    "quantization": (*SHOWN, *MEASURED),
    "schemes": SHOWN,
    "names": (*SHOWN, *MEASURED),
    "checkpoint_path": ("tiny", "tiny_moe", *(f"dummy:{name}" for name in PRESETS)),
    "device": ("auto", "cpu", "cuda", "mps", "xpu"),
    "arms": ("all",),
    "expert_memory": ("auto",),
    "expert_placement": ("popularity", "uniform", "first"),
    **{name: o.kind.choices for name, o in option_table().items() if isinstance(o.kind, OneOf)},
}
LISTS = {"schemes"}  # their values are several, with commas between
FOLDERS = {"checkpoint_path"}  # and options whose placeholder is DIR
FILES = {"expert_placement"}  # which may be a file, and the options of PATHS
PATHS = {"PATH", "FILE"}  # placeholders of options whose values are files
Offered = Callable[[click.Context, str], list[CompletionItem]]


def offer(
    parameter: click.Parameter, usual: Offered, context: click.Context, incomplete: str
) -> list[CompletionItem]:
    """Values of an option or argument: schemes, caches, models, files. usual: what click itself
    offers, such as the names of a click.Choice."""
    name = parameter.name or ""
    before, comma, last = incomplete.rpartition(",") if name in LISTS else ("", "", incomplete)
    values = [value for value in VALUES.get(name, ()) if value.startswith(last)]
    items = [CompletionItem(f"{before}{comma}{value}") for value in values]
    if items:  # bash forgets them where folders or files are offered, too
        return items
    if name in FOLDERS or parameter.metavar == "DIR":
        return [CompletionItem(incomplete, type="dir")]
    if parameter.metavar in PATHS or name in FILES:
        return [CompletionItem(incomplete, type="file")]
    return usual(context, incomplete)


class Bash(BashComplete):
    """bash would end a word at a colon, and `dummy:Llama-2-7b` is one word."""

    source_template = f"COMP_WORDBREAKS=${{COMP_WORDBREAKS//:}}\n{BashComplete.source_template}"


add_completion_class(Bash)


def main() -> None:
    commands.main(prog_name="quantbench")


if __name__ == "__main__":
    main()
