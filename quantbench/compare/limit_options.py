"""The options that limit what is recommended.

@limit_options
def command(limited, …):
    asked = limits(limited)
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from quantbench.compare.arguments import fraction
from quantbench.compare.figures.choices import Limits
from quantbench.errors import UsageError
from quantbench.text import bytes_in

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
DEFAULT = Limits()


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
    return _number("--max_kl", "nats per token, above 0 and below 100", 100, text)


def _number(option: str, what: str, most: float, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < most:
        raise UsageError(f"{option} takes {what}; given: {text!r}")
    return value


# By the limit's name: what stands for its value, help, and how its text is read.
OPTIONS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "max_memory": (
        "SIZE",
        "Recommend nothing that takes more, as 8GB: the peak while generating",
        size_of,
    ),
    "max_kl": (
        "NATS",
        "Recommend nothing whose predictions may be further from full precision's: KL divergence "
        f"per token [{DEFAULT.max_kl:g}]",
        kl_of,
    ),
    "max_perplexity_increase": (
        "X",
        "Recommend nothing whose perplexity may rise by more, as 2%",
        functools.partial(fraction, "--max_perplexity_increase"),
    ),
    "min_top1": (
        "X",
        "Recommend nothing that keeps the likeliest token less often, as 95%",
        functools.partial(fraction, "--min_top1"),
    ),
    "min_tok_s": (
        "N",
        "Recommend nothing slower",
        functools.partial(_number, "--min_tok_s", "tokens per second, above 0 and below 1e9", 1e9),
    ),
}


def limit_options(function: Decorated) -> Decorated:
    """Decorate a click command's function with these options; it gets their texts as `limited`."""

    @functools.wraps(function)
    def limited(*arguments: Any, **given: Any) -> Any:
        return function(*arguments, limited={name: given.pop(name) for name in OPTIONS}, **given)

    for name, (metavar, words, _) in reversed(OPTIONS.items()):
        limited = click.option(f"--{name}", metavar=metavar, help=words)(limited)
    return limited  # type: ignore[return-value]


def limits(limited: Mapping[str, str | None], unless: Limits = DEFAULT) -> Limits:
    """Limits from the options' texts; one that is not given is taken from `unless`. Raises
    UsageError for a text that is no limit."""
    given = {name: OPTIONS[name][2](text) for name, text in limited.items() if text is not None}
    return dataclasses.replace(unless, **given)
