"""The options of generate.py for click, and the reading of command lines.

config = parse(["--quantization", "int8wo", "--compile"])
of_repro(repro(config)) == config

@click.command(cls=cli.Command)
@options()                          # every field of RunConfig
def command(**given: str): …
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import click

from quantbench.cli import Command, Decorated, TableOption, together
from quantbench.errors import UsageError
from quantbench.log.config import ALIASES, Option, RunConfig, is_switch, split
from quantbench.text import key


def options(
    without: Collection[str] = (), defaults: Mapping[str, object] = MappingProxyType({})
) -> Callable[[Decorated], Decorated]:
    """Decorate a click command's function with every option but those in `without`.

    defaults: of options whose default is another in this command.

    The function receives RunConfig's arguments as text; RunConfig checks them. Use it below
    `@click.command(cls=cli.Command)`.
    """
    return together(
        *(
            _click_option(field, defaults.get(field.name, field.default))
            for field in dataclasses.fields(RunConfig)
            if field.name not in without
        )
    )


def _click_option(field: "dataclasses.Field[Any]", default: object) -> Callable[[Any], Any]:
    option: Option = field.metadata["option"]
    names = [name for name in (field.name, ALIASES.get(field.name)) if name]
    spellings = dict.fromkeys(f"--{way}" for n in names for way in (n, n.replace("_", "-")))
    also = "".join(f" (or --{name})" for name in names[1:])
    usual = "" if is_switch(option) or default is None else f" [{default}]"
    settings: dict[str, Any] = {"default": default, "help": f"{option.help}{also}{usual}"}
    if is_switch(option):
        settings["is_flag"] = True
    else:
        settings |= {"type": click.UNPROCESSED, "metavar": option.kind.metavar}
    return click.option(field.name, *spellings, cls=TableOption, group=option.group, **settings)


def parse(argv: Sequence[str]) -> RunConfig:
    """The run that these arguments of generate.py ask for. An option given twice counts as last
    given.

    Raises UsageError, one line, for an unknown option, a missing value or one out of range.
    """
    command = _command()
    context = click.Context(command, **command.context_settings)
    return RunConfig(**command.texts(context, argv))


@cache
def _command() -> Command:
    """A command of these options alone."""
    return click.command(cls=Command, add_help_option=False)(options()(lambda **given: None))


def of_repro(command: str) -> RunConfig:
    """The run that a repro command asks for. Raises UsageError if it cannot be read."""
    program, *words = split(command) or [""]
    ranks = None
    if program.rpartition("/")[2] == "torchrun":
        ranks, words = _ranks(words)
    if not words or words[0].rpartition("/")[2] != "generate.py":
        raise UsageError("the repro line does not begin with python generate.py, or torchrun")
    config = parse(words[1:])
    if ranks is None:
        return config
    if config.tp != 1:
        raise UsageError("torchrun --nproc_per_node says how many ranks there are, not --tp")
    return RunConfig(**{**vars(config), "tp": ranks})


def _ranks(words: list[str]) -> tuple[str, list[str]]:
    """The value of torchrun's --nproc_per_node, and the words after it."""
    option, equals, value = (words or [""])[0].partition("=")
    rest = words[1:]
    if not equals and rest:
        value, *rest = rest
    if key(option) != "nproc_per_node":
        raise UsageError("torchrun takes --nproc_per_node N, and then generate.py")
    return value, rest
