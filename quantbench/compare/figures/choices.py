"""A recommendation as data, in JSON and in words: compare/figures/recommendation.py makes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantbench.compare.figures.interval import Interval, SpeedUp
from quantbench.quality.thresholds import MAX_KL
from quantbench.text import counted, size

What = Literal["fastest", "smallest", "compromise"]
Limit = Literal["max_memory", "min_tok_s", "max_kl", "max_perplexity_increase", "min_top1"]
NAMED = 4  # arms that are listed by name; the rest are counted
HEADINGS: dict[What, str] = {
    "fastest": "fastest that keeps quality",
    "smallest": "smallest",
    "compromise": "best compromise",
}


@dataclass(frozen=True)
class Limits:
    """What an arm has to satisfy."""

    max_memory: int | None = None  # bytes
    max_perplexity_increase: float | None = None  # share of the baseline's
    min_tok_s: float | None = None  # as in the log, prefill included
    max_kl: float = MAX_KL  # nats per token, to the baseline
    min_top1: float | None = None  # share of tokens whose likeliest stays

    def said(self, limit: Limit) -> str:
        """What an arm that it rules out does, in words."""
        match limit:
            case "max_memory":
                return f"memory above {size(self.max_memory or 0)}"
            case "min_tok_s":
                return f"less than {self.min_tok_s:g} tok/s"
            case "max_perplexity_increase":
                return f"perplexity more than {_percent(self.most)} above the baseline's"
            case "max_kl":
                return f"KL divergence above {self.max_kl:g}"
            case "min_top1":
                return f"the likeliest token kept less often than {_percent(1 + self.top1)}"

    @property
    def most(self) -> float:
        """The highest ratio of perplexities."""
        increase = self.max_perplexity_increase
        return math.inf if increase is None else 1 + increase

    @property
    def top1(self) -> float:
        """The least share of tokens whose likeliest stays."""
        return self.min_top1 or 0.0


@dataclass(frozen=True)
class Choice:
    """One arm that is recommended, and for what."""

    what: list[What]
    arm: str
    speed_up: SpeedUp | None  # over the baseline; None for the baseline itself
    memory_bytes: int
    perplexity: float | None
    perplexity_ratio: Interval | None  # to the baseline's
    quality_model: str | None  # where that is another model than the arm's
    tied: list[str]  # arms, this one too, that may be the fastest
    as_good: list[str]  # other arms that may be as good a compromise
    command: str

    def line(self) -> str:
        """The answer in one line, without the command."""
        *others, last = (HEADINGS[what] for what in self.what)
        what = f"{', '.join(others)} and {last}" if others else last
        parts = [self._speed(), size(self.memory_bytes), self._quality()]
        line = f"{what[:1].upper()}{what[1:]}: {self.arm}, {', '.join(parts)}"
        if len(self.tied) > 1:
            line += f"; these {len(self.tied)} cannot be told from the fastest: {_names(self.tied)}"
        if self.as_good:
            line += f"; may be as good a compromise: {_names(self.as_good)}"
        return line

    def _speed(self) -> str:
        if self.speed_up is None:
            return "the baseline"
        ratio = self.speed_up
        ends = f"{ratio.word} {ratio.low:.2f} to {ratio.high:.2f}"
        if ratio.confidence is None and ratio.low == ratio.high:
            ends = "a single process, no range"
        return f"{ratio.value:.2f} × as fast ({ends})"

    def _quality(self) -> str:
        on = f" on the model {self.quality_model}" if self.quality_model else ""
        if self.perplexity is None:
            return "quality not measured"
        if self.speed_up is None or self.perplexity_ratio is None:
            return f"perplexity {self.perplexity:.2f}{on}"
        ratio = self.perplexity_ratio
        ends = "no interval"
        if ratio.low is not None and ratio.high is not None:
            ends = f"{_change(ratio.low)} to {_change(ratio.high)}"
        return f"perplexity {_change(ratio.value)} ({ends}){on}"


@dataclass(frozen=True)
class RuledOut:
    """The arms that one limit excludes. An arm that breaks two is in both."""

    limit: Limit
    arms: list[str]
    unclear: list[str]  # of them, those whose interval contains the limit: they may be within

    def words(self, limits: Limits) -> str:
        """ "3 arms by memory above 8.00 GB"."""
        words = f"{counted(len(self.arms), 'arm')} by {limits.said(self.limit)}"
        if not self.unclear:
            return words
        which = "all" if len(self.unclear) == len(self.arms) > 1 else str(len(self.unclear))
        return f"{words} ({which} of them not shown to be)"


@dataclass(frozen=True)
class Recommendation:
    """The answer: at most three choices. Where there is none, `nothing` says why and what to do."""

    limits: Limits
    choices: list[Choice]
    ruled_out: list[RuledOut]
    failed: list[str]
    unmeasured: list[str]
    quality_measured: bool
    nothing: str | None = None
    note: str | None = None  # why quality limits more than it should

    def lines(self) -> list[str]:
        """The answers, at most three lines."""
        return [self.nothing] if self.nothing else [choice.line() for choice in self.choices]

    def text(self) -> str:
        """The recommendation for a terminal: limits, answers, their commands, what is ruled out."""
        lines = [self.conditions()]
        if self.nothing:
            lines.append(f"  {self.nothing}")
        for choice in self.choices:
            lines += [f"  {choice.line()}", f"      {choice.command}"]
        lines += [f"  {remark}" for remark in (self.exclusions(), self.note) if remark]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The recommendation for report.md, as a list."""
        lines = ["## Recommendation", "", self.conditions(), ""]
        lines += [f"- {self.nothing}"] if self.nothing else []
        lines += [f"- {choice.line()}: `{choice.command}`" for choice in self.choices]
        lines += [f"- {remark}" for remark in (self.exclusions(), self.note) if remark]
        return "\n".join([*lines, ""])

    def conditions(self) -> str:
        """The limits that hold, in a line."""
        limits = self.limits
        parts = [f"KL divergence at most {limits.max_kl:g}"]
        if limits.max_perplexity_increase is not None:
            parts.append(f"perplexity at most {_percent(limits.most)} above the baseline's")
        if limits.min_top1 is not None:
            parts.append(f"the likeliest token kept by {_percent(1 + limits.top1)}")
        if not self.quality_measured:
            parts = ["no limit of quality, as it was not measured"]
        if limits.max_memory is not None:
            parts.append(f"memory at most {size(limits.max_memory)}")
        if limits.min_tok_s is not None:
            parts.append(f"at least {limits.min_tok_s:g} tok/s")
        return f"Recommendation: {', '.join(parts)} (memory: the peak while generating)"

    def exclusions(self) -> str:
        """What was ruled out by which limit; empty where nothing was."""
        parts = [out.words(self.limits) for out in self.ruled_out]
        parts += [f"{counted(len(self.failed), 'arm')} failed"] if self.failed else []
        if self.unmeasured:
            parts.append(f"{counted(len(self.unmeasured), 'arm')} not measured")
        return f"Ruled out: {', '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class TuneAnswer:
    """The answer of a tune: which setting to take, or why to keep the default."""

    limits: Limits
    lines: list[str]  # at most two
    command: str | None  # that runs the setting to take; None where nothing was measured

    def all_lines(self) -> list[str]:
        """At most three lines, the command last."""
        return [*self.lines, *([self.command] if self.command else [])]

    def text(self) -> str:
        """For a terminal."""
        return "\n".join(["Answer:", *(f"  {line}" for line in self.all_lines())])

    def markdown(self) -> str:
        """For report.md."""
        command = [f"- `{self.command}`"] if self.command else []
        return "\n".join(["## Answer", "", *(f"- {line}" for line in self.lines), *command, ""])


def _change(ratio: float) -> str:
    """A ratio as a change in percent: 1.004 gives +0.4 %."""
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"  # + 0.0: no -0.0


def _percent(ratio: float) -> str:
    """A ratio as an increase in percent: 1.02 gives 2 %."""
    return f"{100 * (ratio - 1):.3g} %"


def _names(arms: Sequence[str]) -> str:
    shown = ", ".join(arms[:NAMED])
    return shown if len(arms) <= NAMED else f"{shown} and {len(arms) - NAMED} more"
