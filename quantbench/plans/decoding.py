"""What roofline, growth and peers share: a run that decodes, and how often it takes its turns."""

import dataclasses
from typing import Any

import click

from quantbench.bench.store import Settings
from quantbench.cli import together
from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.log.kinds import Number, Whole

# The options of roofline and peers that say how long to measure.
turn_options = together(
    click.option("--cycles", type=Whole(1), default=24,
                 help="Turns of each process [24]; intervals need 8"),
    click.option("--max_minutes", type=Number(), default=10.0,
                 help="Stop whole models after N minutes, loading included [10]"),
    click.option("--processes", type=Whole(1), default=2,
                 help="Start every scheme and program N times [2]"),
)  # fmt: skip


def settings_of(given: dict[str, Any]) -> Settings:
    """The settings by `turn_options`, which are taken out of `given`: speed, and no quality."""
    return Settings(tokens=0, **{n: given.pop(n) for n in ("cycles", "max_minutes", "processes")})


def decoding(config: RunConfig) -> RunConfig:
    """The same run compiled, greedy, and in no log. Raises UsageError where it decodes nothing."""
    config = dataclasses.replace(config, compile=True, temperature=0, write_result="none")
    if config.max_new_tokens < 2:
        raise UsageError("--max_new_tokens takes 2 or more: the first is the prompt's")
    return config
