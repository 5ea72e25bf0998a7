"""What an arm has to satisfy to be recommended, and the options that say so.

@limit_options
def command(…, **given):
    asked = limits(given)               # takes the options out of `given`
out, unclear = exceeded(row, asked)     # {"max_kl": "KL above 0.03"}, and what is uncertain
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from quantbench.cli import together
from quantbench.compare.row import Row
from quantbench.log.kinds import ByteSize, Kind, Number, Share
from quantbench.quality.thresholds import KL, MAX_KL
from quantbench.quality.types import Quality
from quantbench.run.run_table import SINCE_START
from quantbench.text import size

Z = 1.96  # standard errors to the ends of 95 %


@dataclass(frozen=True)
class Limits:
    """None: no limit."""

    max_kl: float | None = MAX_KL  # nats a token, to full precision
    max_perplexity_increase: float | None = None  # share of the baseline's
    min_top1: float | None = None  # share of tokens with the baseline's likeliest token
    max_memory: int | None = None  # bytes, the peak while generating
    min_tok_s: float | None = None  # as in the log, prompt included

    def words(self) -> dict[str, str]:
        """What an arm beyond each limit has, by the limit's name."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {name: OPTIONS[name][2](value) for name, value in given.items()}


# What each limit takes, which arms it keeps out in its help, and what an arm beyond it has.
OPTIONS: dict[str, tuple[Kind, str, Callable[[Any], str]]] = {
    "max_kl": (KL, f"whose KL divergence to full precision is above this [{MAX_KL:g}]",
               "KL above {:g}".format),
    "max_perplexity_increase": (Share(), "that may predict worse by more, as 2%",
                                "perplexity more than {:.3g} above the baseline's".format),
    "min_top1": (Share(), "that agrees less on the likeliest token, as 95%",
                 "top-1 below {:.3g}".format),
    "max_memory": (ByteSize(), "that takes more, as 8GB: the peak while generating",
                   lambda count: f"memory above {size(count)}"),
    "min_tok_s": (Number(what="tokens per second", most="1e9"), "slower",
                  "less than {:g} tok/s".format),
}  # fmt: skip

# The options of a click command that are limits.
limit_options = together(
    *(
        click.option(f"--{name}", name, type=kind, help=f"Recommend nothing {words}")
        for name, (kind, words, _) in OPTIONS.items()
    )
)


def limits(given: dict[str, Any], unless: Limits | None = None) -> Limits:
    """Limits from the options, which are taken out of `given`; one that is not given is taken from
    `unless`."""
    values = {name: given.pop(name) for name in OPTIONS}
    changes: Any = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(unless or Limits(), **changes)


def exceeded(row: Row, limits: Limits) -> tuple[dict[str, float], set[str]]:
    """The limits that the row is not shown to satisfy, each with the value that it would need, and
    those of them that it may satisfy: its interval contains the limit."""
    beyond: dict[str, float] = {}
    unclear = set()

    def most(name: str, value: float, low: float, limit: float) -> None:
        if value > limit:
            beyond[name] = value
            if low <= limit:
                unclear.add(name)

    memory = memory_bytes(row)
    if limits.max_memory is not None and memory is not None:
        most("max_memory", memory, memory, limits.max_memory)
    if limits.max_kl is not None and row.kl is not None:
        low, high = row.kl_interval or (0.0, row.kl)
        if row.kl_interval is None:  # too few tokens to tell
            beyond["max_kl"] = row.kl
            unclear.add("max_kl")
        # Less than the noise of full precision itself shows no damage.
        most("max_kl", high, low - (row.kl_noise or 0.0), limits.max_kl)
    if limits.max_perplexity_increase is not None and (ratio := row.perplexity_ratio):
        high, low = (ratio.high or math.inf) - 1, (ratio.low or 0.0) - 1
        most("max_perplexity_increase", high, low, limits.max_perplexity_increase)
    for name, value in (("min_tok_s", row.tok_s), ("min_top1", row.top1)):
        limit = getattr(limits, name)
        if limit is not None and value is not None:
            low, high = getattr(row, f"{name[4:]}_interval") or (value, value)
            if low < limit:
                beyond[name] = low
                if high >= limit:
                    unclear.add(name)
    return beyond, unclear


def ruled_out(quality: object, limits: Limits) -> str | None:
    """Why an arm cannot be recommended, whatever its speed: its quality is clearly beyond a limit;
    None where it may be."""
    if not isinstance(quality, Quality) or quality.kl is None:
        return None
    row = Row("", kl=quality.kl, kl_interval=quality.kl_interval, kl_noise=quality.noise)
    row.top1, row.top1_interval = quality.top1, quality.top1_interval
    beyond, unclear = exceeded(row, limits)
    words = limits.words()
    return next((words[name] for name in beyond if name not in unclear), None)


def memory_bytes(row: Row) -> int | None:
    """The one definition of an arm's memory: its peak while generating, of the kind that is logged;
    weights and KV cache where it was not measured."""
    peaks = (row.peak_memory_bytes or {}).get("generate")
    if peaks:
        return next(iter(peaks.values()))
    if row.weight_bytes is None:
        return None
    return row.weight_bytes + (row.kv_cache_bytes or 0)


def memory_said(row: Row) -> str:
    """1.31 GB, or ≤ 1.31 GB where the system counts only since the process started."""
    peaks: Mapping[str, int] = (row.peak_memory_bytes or {}).get("generate") or {}
    return f"{'≤ ' * (SINCE_START in peaks)}{size(memory_bytes(row) or 0)}"
