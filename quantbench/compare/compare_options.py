"""Options that commands share: how long to measure, what else to measure, and what to keep."""

import dataclasses
from typing import Any

import click

from quantbench.bench.store import Settings
from quantbench.cli import Command, together
from quantbench.compare.limits import Limits
from quantbench.errors import UsageError
from quantbench.log.config import NOT_IN_ARMS, RunConfig
from quantbench.log.kinds import Number, OneOf, Share, Whole

UNUSED = tuple(name for name in NOT_IN_ARMS if name not in ("write_result", "debug"))
DEFAULT = Settings()
STOPS = ("half_width", "max_minutes", "processes")
# Options that --resume takes, by click's names, and the error for any other option.
OF_RESUMED = ("resume", *STOPS, "form", "show", *vars(Limits()), "debug")
RESUMED = (
    "--resume goes on with what that folder holds: the only other options are --half_width, "
    "--processes, --max_minutes, --format, --open and the limits of the answer"
)
# Fewer than generate.py's: a difference shows in many short turns, not in long ones.
MAX_NEW_TOKENS = 32


class ShortOutput(Command):
    """A Command that takes -o for --format."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--format" if word == "-o" else word for word in args])


# Of ab and recommend: when to stop, and what else to measure.
measuring_options = together(
    click.option("--half_width", type=Share(),
                 help=f"Stop when intervals are this narrow [{DEFAULT.half_width:.0%}]"),
    click.option("--max_minutes", type=Number(),
                 help=f"Stop after so long, loading included [{DEFAULT.max_minutes:g}]"),
    click.option("--processes", type=Whole(1),
                 help=f"Start each arm at most N times [{DEFAULT.processes}]"),
    click.option("--text", help="A text file to measure quality on, instead of the usual ones"),
    click.option("--tokens", type=Whole(0),
                 help=f"Measure quality on at most so many tokens; 0: not [{DEFAULT.tokens}]"),
    click.option("--output", metavar="DIR", help="Put results, report and picture here, a new "
                 "folder; quantized arms, too, until the run has ended"),
)  # fmt: skip
# Of ab: what --output keeps, and what is printed.
result_options = together(
    click.option("--resume", metavar="DIR", help="Go on with what --output DIR left"),
    click.option("--open", "show", is_flag=True,
                 help="Show report.html of --output in the browser"),
    click.option("--format", "form", type=OneOf(("md", "csv", "json", "answer")),
                 metavar="md|csv|json|answer", help="Print this instead of the table; -o, too"),
)  # fmt: skip


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """The options of `measuring_options` that were given, as Settings has them; they are taken out
    of `given`."""
    taken = {name: given.pop(name) for name in (*STOPS, "tokens", "text")}
    return {name: value for name, value in taken.items() if value is not None}


# The options of peers that say how long to measure.
turn_options = together(
    click.option("--cycles", type=Whole(1), default=24,
                 help="Turns of each process [24]; intervals need 8"),
    click.option("--max_minutes", type=Number(), default=10.0,
                 help="Stop whole models after N minutes, loading included [10]"),
    click.option("--processes", type=Whole(1), default=2,
                 help="Start every scheme and program N times [2]"),
)  # fmt: skip


def turn_settings(given: dict[str, Any]) -> Settings:
    """The settings by `turn_options`, which are taken out of `given`: speed, and no quality."""
    return Settings(tokens=0, **{n: given.pop(n) for n in ("cycles", "max_minutes", "processes")})


def decoding(config: RunConfig) -> RunConfig:
    """The same run compiled, greedy, and in no log. Raises UsageError where it decodes nothing."""
    config = dataclasses.replace(config, compile=True, temperature=0, write_result="none")
    if config.max_new_tokens < 2:
        raise UsageError("--max_new_tokens takes 2 or more: the first is the prompt's")
    return config
