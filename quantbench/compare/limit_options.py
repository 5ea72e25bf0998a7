"""The options that limit what is recommended.

@limit_options
def command(max_memory, max_perplexity_increase, min_tok_s, …):
    asked = limits(max_memory, max_perplexity_increase, min_tok_s)
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from quantbench.compare.arguments import fraction
from quantbench.compare.figures.choices import Limits
from quantbench.errors import UsageError
from quantbench.text import bytes_in

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
DEFAULT = Limits()


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
    """The bytes in 8GB or 7.5GiB. Raises UsageError for what is no size."""
    try:
        return round(bytes_in(text))
    except ValueError:
        raise UsageError(
            f"--max_memory takes a size such as 8GB or 7.5GiB; given: {text!r}"
        ) from None


def kl_of(text: str) -> float:
    """The nats in 0.03. Raises UsageError for what is no KL divergence."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 100:
        raise UsageError(f"--max_kl takes nats per token such as 0.03; given: {text!r}")
    return value


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise UsageError(
            f"--min_tok_s takes tokens per second, above 0 and below 1e9; given: {text!r}"
        )
    return value
