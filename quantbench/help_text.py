"""Arguments in words: the layout of --help, and what is said of those that click or a command
refuses.

--help has a command's own options, then those of generate.py by group, then examples.

The examples are those of the docstring at the top of the command's file: every line that starts
with "quantbench " or "python ", except the docstring's first.
"""

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Sequence

import click
from click.core import ParameterSource

from quantbench.errors import UsageError
from quantbench.text import shown

OWN = "Options"
# What a word without an option probably is, by the option that takes it.
GIVEN = {"checkpoint_path": "a model", "quantization": "a scheme", "prompt": "text"}
# What the last release had, and what to use instead: a command, or an option as "command --option".
REMOVED: dict[str, str] = {
    "show --output": "experts show prints the same figures",
    "growth": "quantbench ab --allow_different compares batch sizes, depths and numbers of layers",
    "caches": 'quantbench ab --context_depth 65536 --arm "" --arm "--kv_cache int8" compares them',
    "roofline": "quantbench ab has the column of the limit",
    "replay --against": "python -m benchmarks.against, in a checkout, compares with another commit",
    "replay --history": "quantbench ab compares speeds, in turns",
    "tune": "quantbench ab --over threads=1,2 compares values of any option",
    "frontier --chart": "recipe frontier prints its points, and --json FILE keeps them",
    "peers --gptqmodel_python": "peers compares with transformers, llama.cpp and ik_llama.cpp",
}


def sections(parameters: Sequence[click.Parameter]) -> dict[str, list[tuple[str, str]]]:
    """The options with their help by `group`; OWN has those of the command alone."""
    by_group: dict[str, list[tuple[str, str]]] = {}
    for option in parameters:
        if isinstance(option, click.Option) and not option.hidden:
            rows = by_group.setdefault(getattr(option, "group", OWN), [])
            rows.append((f"{option.opts[0]} {placeholder(option)}".rstrip(), option.help or ""))
    return by_group


def write_options(formatter: click.HelpFormatter, parameters: Sequence[click.Parameter]) -> None:
    """Write the options in sections."""
    by_group = sections(parameters)
    shared = next(iter(by_group)) == OWN  # generate.py itself has no options but these
    for group, rows in by_group.items():
        with formatter.section(f"{group}, as in generate" if shared and group != OWN else group):
            formatter.write_dl(rows)


def placeholder(option: click.Option) -> str:
    """The placeholder of the option's value."""
    usual = option.metavar or getattr(option.type, "metavar", "TEXT")
    return "" if option.is_flag else str(usual)


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
    hint = f"{meant} (in quotes where it has spaces)" if "prompt" in options else meant
    return f"{shown(word)} belongs to no option; {f'give {hint}; ' if hint else ''}see --help"


def refusal(error: click.UsageError) -> str:
    """One line for what click refuses."""
    match error:
        case click.NoSuchOption(option_name=name, possibilities=near):
            hint = f"did you mean {near[0]}?" if near else "--help lists them all"
            return f"no such option: {shown(name)}; {hint}"
        case click.MissingParameter(param=click.Option() as option):
            return f"{option.opts[0]} is missing; it takes {placeholder(option)}; see --help"
        case click.BadParameter(param=param):
            return f"{param.human_readable_name if param else 'a word'} is missing; see --help"
    return error.format_message()


def given_options(context: click.Context | None = None) -> dict[str, click.Parameter]:
    """The options and words that stand on the command line of the running command, by their names
    in click."""
    context = context or click.get_current_context()
    by_name = {parameter.name or "": parameter for parameter in context.command.params}
    source = context.get_parameter_source
    return {n: p for n, p in by_name.items() if source(n) is ParameterSource.COMMANDLINE}


def refuse_beside(allowed: Collection[str], why: str) -> None:
    """Raise UsageError where an option was given that is not among `allowed` (click's names)."""
    refuse_given(given_options().keys() - allowed, why)


def refuse_given(names: Collection[str], why: str) -> None:
    """Raise UsageError, "--option: why", where one of these options (click's names) was given: it
    would have no effect."""
    for name, parameter in given_options().items():
        if name in names:
            is_word = isinstance(parameter, click.Argument)
            value = click.get_current_context().params[name]
            raise UsageError(f"{shown(value) if is_word else parameter.opts[0]}: {why}")


def names_of(
    option: str, text: str | None, default: Sequence[str], known: Sequence[str] | None = None
) -> list[str]:
    """The names in "A,B"; `default` without a text. Raises UsageError for none at all, for one that
    is not among `known`, and for one given twice."""
    names = [name.strip() for name in text.split(",")] if text is not None else list(default)
    for name in names:
        if not name or (known is not None and name not in known):
            what = ", ".join(known) if known is not None else "names with commas between them"
            given = repr(name) if name == text else f"{name!r} in {text!r}"
            raise UsageError(f"{option} takes {what}; given: {given}")
        if names.count(name) > 1:
            raise UsageError(f"{option} names {name} twice; name it once")
    return names


def nearest(name: str, known: Sequence[str]) -> str:
    """What to write in the place of a name that nothing has: "did you mean threads?"."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
