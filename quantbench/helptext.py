"""Help in words: the layout of --help, and what to say of an option's value that click refuses.

--help has a command's own options, then those of generate.py by group, then examples.

The examples are those of the docstring at the top of the command's file: every line that begins
with "quantbench " or "python ", except the docstring's first.
"""

import difflib
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import click

from quantbench.text import shown

OWN = "Options"
LAST = ("--debug", "--help")  # rows at the very end
LARGEST = 2**63 - 1  # of a whole number: torch indexes with 64 bits
# What stands for the value of an option that declares no metavar, by the kind of its value.
PLACEHOLDERS = ((click.types.IntParamType, "N"), (click.types.FloatParamType, "X"))

# What people give as a word of its own, by the option that takes it.
GIVEN = {"checkpoint_path": "a model", "quantization": "a scheme", "prompt": "text"}
SPACES = "in quotes where it has spaces"

NOTHING: Mapping[str, Any] = MappingProxyType({})
Row = tuple[str, str]  # an option with its placeholder, and what it does


def write_options(
    context: click.Context, formatter: click.HelpFormatter, parameters: Sequence[click.Parameter]
) -> None:
    """Write the options in sections. One without a `group` is the command's own."""
    sections: dict[str, list[Row]] = {OWN: []}
    last: dict[str, Row] = {}
    for option in parameters:
        if not isinstance(option, click.Option) or option.hidden:
            continue
        group = getattr(option, "group", None)
        row = _row(option) if group is None else option.get_help_record(context)
        if option.opts[0] in LAST:
            last[option.opts[0]] = row or ("", "")
        elif row:
            sections.setdefault(group or OWN, []).append(row)
    filled = {group: rows for group, rows in sections.items() if rows} or {OWN: []}
    filled[list(filled)[-1]] += [last[name] for name in LAST if name in last]
    shared = OWN in filled  # generate.py itself has no options but these
    for group, rows in filled.items():
        with formatter.section(f"{group}, as in generate" if shared and group != OWN else group):
            formatter.write_dl(rows)


def _row(option: click.Option) -> Row:
    """One spelling, a short placeholder, and the help text, which says the default."""
    if option.is_flag:
        return option.opts[0], option.help or ""
    kinds = (name for kind, name in PLACEHOLDERS if isinstance(option.type, kind))
    return f"{option.opts[0]} {option.metavar or next(kinds, 'TEXT')}", option.help or ""


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


def refusal(
    error: click.UsageError,
    options: Mapping[str, click.Option],
    words: Sequence[str] = (),
    given: Mapping[str, Any] = NOTHING,
) -> str:
    """One line for what click refuses. options: by name; words: of the command line; given: the
    texts of the values by name."""
    match error:
        case click.NoSuchOption(option_name=spelling):
            first = spelling.lstrip("-")  # of -compile, click names -c
            typed = [word.partition("=")[0] for word in words if word.startswith("-")]
            names = {word: word.lstrip("-").replace("-", "_") for word in typed}
            word = next((word for word in typed if names[word].startswith(first)), spelling)
            close = difflib.get_close_matches(names.get(word, ""), options, n=1, cutoff=0.6)
            hint = f"did you mean --{close[0]}?" if close else "--help lists them all"
            return f"no such option: {shown(word)}; {hint}"
        case click.BadOptionUsage(option_name=spelling):
            if options[spelling.removeprefix("--")].is_flag:
                return f"{spelling} takes no value; leave out what follows the ="
            return f"{spelling} takes a value, and none is given"
        case click.MissingParameter(param=click.Option() as option):
            return (
                f"{option.opts[0]} is missing; it takes {_row(option)[0].split()[-1]}; see --help"
            )
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
    if whole:
        return f"{noun} from {kind.min} to {'2**63-1' if kind.max is None else kind.max}"
    if kind.max is None:
        return f"{noun} {'above' if kind.min_open else 'of at least'} {kind.min:g}"
    return f"{noun} {'above' if kind.min_open else 'from'} {kind.min:g} to {kind.max:g}"


def check_numbers(context: click.Context, parameters: Sequence[click.Parameter]) -> None:
    """Raise BadParameter for nan, infinity and numbers beyond 64 bits, which click reads."""
    for parameter in parameters:
        value = context.params.get(parameter.name or "")
        if isinstance(value, float) and not math.isfinite(value):
            raise click.BadParameter("not finite", context, parameter)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise click.BadParameter("too large", context, parameter)
