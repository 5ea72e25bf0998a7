"""What the commands of compare read from their command lines besides generate.py's options."""

import difflib
from collections.abc import Collection, Sequence

import click
from click.core import ParameterSource

from quantbench.errors import UsageError
from quantbench.text import shown


def given_options(context: click.Context) -> list[click.Parameter]:
    """The options and words that stand on the command line."""
    return [
        parameter
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    ]


def refuse_beside(context: click.Context, allowed: Collection[str], why: str) -> None:
    """Raise UsageError where an option was given that is not among `allowed` (click's names)."""
    refuse_given(context, [p.name for p in given_options(context) if p.name not in allowed], why)


def refuse_given(context: click.Context, names: Collection[str | None], why: str) -> None:
    """Raise UsageError, "--option: why", where one of these options (click's names) was given: it
    would have no effect."""
    for parameter in given_options(context):
        if parameter.name in names:
            is_word = isinstance(parameter, click.Argument)
            said = shown(context.params[parameter.name or ""]) if is_word else parameter.opts[0]
            raise UsageError(f"{said}: {why}")


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
