"""The options that limit what is recommended.

@limit_options
def command(max_memory, max_perplexity_increase, min_tok_s, …):
    asked = limits(max_memory, max_perplexity_increase, min_tok_s)
"""

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from quantbench.compare.arguments import fraction
from quantbench.compare.figures.choices import Limits
from quantbench.errors import UsageError

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
DEFAULT = Limits()
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def limit_options(function: Decorated) -> Decorated:
    """Decorate a click command's function with the three options, given to it as text."""
    for option in (
        click.option("--min_tok_s", metavar="N", help="Recommend nothing slower"),
        click.option(
            "--max_perplexity_increase",
            metavar="X",
            help="Recommend nothing that may predict worse by more "
            f"[{100 * DEFAULT.max_perplexity_increase:g}%]",
        ),
        click.option(
            "--max_memory",
            metavar="SIZE",
            help="Recommend nothing that takes more, as 8GB: the peak while generating",
        ),
    ):
        function = option(function)
    return function


def limits(
    max_memory: str | None,
    max_perplexity_increase: str | None,
    min_tok_s: str | None,
    unless: Limits = DEFAULT,
) -> Limits:
    """Limits from the options' texts; one that is not given is taken from `unless`. Raises
    UsageError for a text that is no limit."""
    return Limits(
        unless.max_memory if max_memory is None else size_of(max_memory),
        unless.max_perplexity_increase
        if max_perplexity_increase is None
        else fraction("--max_perplexity_increase", max_perplexity_increase),
        unless.min_tok_s if min_tok_s is None else _speed(min_tok_s),
    )


def size_of(text: str) -> int:
    """8GB, 8 GB, 7.5GiB or 8e9 as bytes. Raises UsageError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].upper()) if match else None
    value = _number(match[1]) if match else math.nan
    if unit is None or not 1 <= value * unit < 1e18:
        raise UsageError(f"--max_memory takes a size such as 8GB or 7.5GiB; given: {text!r}")
    return round(value * unit)


def _speed(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e9:
        raise UsageError(
            f"--min_tok_s takes tokens per second, above 0 and below 1e9; given: {text!r}"
        )
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
