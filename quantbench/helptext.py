"""Help in words: the layout of --help, and what to say of an option's value that click refuses.

--help has a command's own options, then those of generate.py by group, then examples.

The examples are those of the docstring at the top of the command's file: every line that begins
with "quantbench " or "python ", except the docstring's first.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import click

from quantbench.text import shown

OWN = "Options"
LARGEST = 2**63 - 1  # of a whole number: torch indexes with 64 bits
# What a word without an option probably is, by the option that takes it.
GIVEN = {"checkpoint_path": "a model", "quantization": "a scheme", "prompt": "text"}
SPACES = "in quotes where it has spaces"


def write_options(formatter: click.HelpFormatter, parameters: Sequence[click.Parameter]) -> None:
    """Write the options in sections. One without a `group` is the command's own."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for option in parameters:
        if isinstance(option, click.Option) and not option.hidden:
            rows = sections.setdefault(getattr(option, "group", OWN), [])
            rows.append((f"{option.opts[0]} {placeholder(option)}".rstrip(), option.help or ""))
    shared = next(iter(sections)) == OWN  # generate.py itself has no options but these
    for group, rows in sections.items():
        with formatter.section(f"{group}, as in generate" if shared and group != OWN else group):
            formatter.write_dl(rows)


def placeholder(option: click.Option) -> str:
    """The placeholder of the option's value."""
    kinds = {click.types.IntParamType: "N", click.types.FloatParamType: "X"}
    usual = next((name for kind, name in kinds.items() if isinstance(option.type, kind)), "TEXT")
    return "" if option.is_flag else option.metavar or usual


def write_examples(formatter: click.HelpFormatter, lines: Sequence[str]) -> None:
    """Write the lines as they are, their comments in one column."""
    parts = [re.split(" +# ", line, maxsplit=1) for line in lines]
    width = max((len(command) for command, *comment in parts if comment), default=0)
    if lines:
        with formatter.section("Examples"):
            for command, *comment in parts:
                text = f"{command:<{width}}  # {comment[0]}" if comment else command
                formatter.write(f"{'':>{formatter.current_indent}}{text}\n")


def examples(callback: Callable[..., object] | None) -> list[str]:
    """The examples of the file that defines this command's function."""
    module = sys.modules.get(getattr(callback, "__module__", ""))
    lines = inspect.cleandoc((module and module.__doc__) or "").splitlines()[1:]
    taken: list[str] = []
    for line in map(str.strip, lines):
        if line.startswith(("quantbench ", "python ")):
            taken.append(line)
        elif taken and taken[-1].endswith("\\"):
            taken.append(f"  {line}")
    return taken


def stray(word: str, options: Collection[str]) -> str:
    """One line for a word that belongs to no option: which of these options it may be meant for."""
    meant = ", ".join(f"{what} as --{name}" for name, what in GIVEN.items() if name in options)
    hint = f"{meant} ({SPACES})" if "prompt" in options else meant
    return f"{shown(word)} belongs to no option; {f'give {hint}; ' if hint else ''}see --help"


def refusal(error: click.UsageError, given: Mapping[str, Any]) -> str:
    """One line for what click refuses. given: the texts of the values by name."""
    match error:
        case click.NoSuchOption(option_name=name, possibilities=near):
            hint = f"did you mean {near[0]}?" if near else "--help lists them all"
            return f"no such option: {shown(name)}; {hint}"
        case click.MissingParameter(param=click.Option() as option):
            return f"{option.opts[0]} is missing; it takes {placeholder(option)}; see --help"
        case click.BadParameter(param=click.Option() as option):
            value = given[option.name or ""]
            value = value[-1] if isinstance(value, list) else value
            return f"{option.opts[0]} takes {accepted(option.type)}; given: {shown(value)}"
        case click.BadParameter(param=param):
            return f"{param.human_readable_name if param else 'a word'} is missing; see --help"
    return error.format_message()


def accepted(kind: click.ParamType) -> str:
    """What an option of this kind takes, in words."""
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(kind.choices)}"
    whole = isinstance(kind, click.types.IntParamType)
    noun = "a whole number" if whole else "a finite number"
    if not isinstance(kind, click.IntRange | click.FloatRange) or kind.min is None:
        return f"{noun} up to 2**63-1" if whole else noun
    most = "2**63-1" if whole and kind.max is None else kind.max
    if most is None:
        return f"{noun} {'above' if kind.min_open else 'of at least'} {kind.min:g}"
    return f"{noun} {'above' if kind.min_open else 'from'} {kind.min:g} to {most}"


def check_numbers(context: click.Context, parameters: Sequence[click.Parameter]) -> None:
    """Raise BadParameter for nan, infinity and numbers beyond 64 bits, which click reads."""
    for parameter in parameters:
        value = context.params.get(parameter.name or "")
        if isinstance(value, float) and not math.isfinite(value):
            raise click.BadParameter("not finite", context, parameter)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise click.BadParameter("too large", context, parameter)
