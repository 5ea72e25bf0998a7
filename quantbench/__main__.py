"""quantbench: every command under one name.

    python generate.py --quantization int8wo --compile          # one run, the embedded model
    python -m compare recommend --checkpoint_path DIR           # your own model: what to take
    python -m compare ab --checkpoint_path DIR --arms all       # every scheme that runs here
    python -m compare schemes --list                            # which schemes there are

`generate` is generate.py, `log` is benchlog, and all others are the files of compare/commands/.
Nothing is imported but the command that was asked for.
"""

import os

import click

import quantbench
from compare.__main__ import Commands
from quantbench import completion

# Commands that are no file of compare/commands/, and what --help says about them.
OTHERS = {
    "generate": "generate text, and log speed and memory",
    "log": "check a log of runs, or show runs as a table",
}
FIRST = ("generate", "ab", "recommend", "schemes")  # in this order before all others
# How the programs of a checkout begin, and how the same command begins here.
PROGRAMS = {
    "python generate.py": "quantbench generate",
    "python -m quantize": "quantbench schemes",
    "python -m kv_cache": "quantbench caches",
    "python -m benchlog": "quantbench log",
    "python -m compare": "quantbench",
}


class Everything(Commands):
    """The commands of compare, and the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {*OTHERS, *super().list_commands(ctx)}
        return [*(name for name in FIRST if name in names), *sorted(names - {*FIRST})]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None
        match cmd_name:
            case "generate":
                from generate import main as command
            case "log":
                from benchlog.__main__ import commands as command
            case _:
                command = super().get_command(ctx, cmd_name)
        if command is not None and "_QUANTBENCH_COMPLETE" in os.environ:
            completion.attach(command)
        return command

    def spelled(self, example: str) -> str:
        for program, ours in PROGRAMS.items():
            if example.startswith(program):
                return ours + example.removeprefix(program)
        return example

    def described(self, name: str) -> str:
        return OTHERS[name] if name in OTHERS else super().described(name)


def say_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"quantbench {quantbench.__version__}")
        ctx.exit()


COMPLETION = """\b
Completion with TAB: a line for ~/.bashrc (in ~/.zshrc with zsh_source instead)
eval "$(_QUANTBENCH_COMPLETE=bash_source quantbench)"
"""


@click.group(cls=Everything, epilog=COMPLETION)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=say_version,
              help="Show the version and exit.")  # fmt: skip
def commands() -> None:
    """Which quantization should I run here? Run a model, compare, and get an answer."""


def main() -> None:
    commands.main(prog_name="quantbench")


if __name__ == "__main__":
    main()
