"""The options of generate.py for click, and the reading of command lines.

config = parse(["--quantization", "int8wo", "--compile"])
of_repro(repro(config)) == config

@click.command(cls=cli.Command)
@options()                          # every field of RunConfig
def command(config: RunConfig): …
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import click

from quantbench.cli import Command, TableOption, together
from quantbench.errors import UsageError
from quantbench.log.config import ALIASES, RunConfig, option_table, split
from quantbench.log.kinds import Switch
from quantbench.text import key

NAMES = tuple(option_table())


def options(
    *only: str,
    without: Collection[str] = (),
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a click command's function with the options in `only`, those in `defaults`, whose
    default is another in this command, and --debug; without `only`, with all but those in
    `without`.

    The function receives them as `config`, a RunConfig. Use it below
    `@click.command(cls=cli.Command)`.
    """
    wanted = {*only, *defaults, "debug"} if only else {*NAMES} - {*without}
    names = [name for name in NAMES if name in wanted]
    usual = {**vars(RunConfig()), **defaults}
    each = [_click_option(name, usual[name]) for name in names]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def configured(*arguments: Any, **values: Any) -> Any:
            config = RunConfig(**{name: values.pop(name) for name in names})
            return function(*arguments, config=config, **values)

        return together(*each)(configured)

    return decorate


def _click_option(name: str, default: object) -> Callable[[Any], Any]:
    option = option_table()[name]
    names = [each for each in (name, ALIASES.get(name)) if each]
    spellings = dict.fromkeys(f"--{way}" for n in names for way in (n, n.replace("_", "-")))
    text = f"{option.help}{''.join(f' (or --{other})' for other in names[1:])}"
    settings: dict[str, Any] = {"is_flag": True}
    if not isinstance(option.kind, Switch):
        settings = {"type": click.UNPROCESSED, "metavar": option.kind.metavar}
        text += "" if default is None else f" [{default}]"
    return click.option(name, *spellings, cls=TableOption, group=option.group, help=text,
                        default=default, **settings)  # fmt: skip


def parse(argv: Sequence[str]) -> RunConfig:
    """The run that these arguments of generate.py ask for. An option given twice counts as last
    given.

    Raises UsageError, one line, for an unknown option, a missing value or one out of range.
    """
    command = _command()
    context = click.Context(command, **command.context_settings)
    return RunConfig(**command.texts(context, argv))


@functools.cache
def _command() -> Command:
    """A command of these options alone."""
    return click.command(cls=Command, add_help_option=False)(options()(lambda **given: None))


def of_repro(command: str) -> RunConfig:
    """The run that a repro command asks for. Raises UsageError if it cannot be read."""
    program, *words = split(command) or [""]
    ranks: str | None = None
    if program.rpartition("/")[2] == "torchrun":
        match [*words[0].split("=", 1), *words[1:]] if words else []:
            case [option, ranks, *words] if key(option) == "nproc_per_node":
                pass
            case _:
                raise UsageError("torchrun takes --nproc_per_node N, and then generate.py")
    if not words or words[0].rpartition("/")[2] != "generate.py":
        raise UsageError("the repro line does not start with python generate.py, or torchrun")
    config = parse(words[1:])
    if ranks is None:
        return config
    if config.tp != 1:
        raise UsageError("torchrun --nproc_per_node says how many ranks there are, not --tp")
    return RunConfig(**{**vars(config), "tp": ranks})
