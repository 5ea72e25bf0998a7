"""quantbench replay: run a log's lines again, and compare then with now.

    quantbench replay benchmarks.txt --where quant=int8wo --tolerance 5%
    quantbench replay benchmarks.txt --line 7
    quantbench replay old.txt --all --dummy --num_layers 1 --device cpu --dry_run

A line's command is read into a RunConfig, never given to a shell. Options of generate.py given here
take the place of the line's. Absolute speeds of different days say nothing: they drift by half. So
--tolerance holds memory and size to it, and no speed; `ab` compares speeds.
"""

import sys
import time
from functools import partial
from pathlib import Path

import click

from quantbench import files
from quantbench.cli import Command
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.help_text import given_options, refuse_given
from quantbench.log import log
from quantbench.log.config import RunConfig
from quantbench.log.kinds import Share, Whole
from quantbench.log.options import options
from quantbench.log.record import LINE
from quantbench.progress import duration, say
from quantbench.replay.answer import chosen, mapped
from quantbench.replay.plan import built, replayed

NOT_REPLAYED = ("output_json_path", "profile", "memory_profile", "save", "format")
OF_RUNNING = ("limit", "processes", "write_result")
NO_READING = (
    "--tolerance: a log line keeps no reading of the memory's speed, and speeds drift by half from "
    "day to day, so only memory and size are held to it; quantbench ab compares speeds"
)


class FileFirst(Command):
    """A Command whose first word is the file: given as --log, for a Command has only options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-"):
            args = [f"--log={args[0]}", *args[1:]]
        return super().parse_args(ctx, args)


@click.command(cls=FileFirst, options_metavar="FILE [OPTIONS]")
@click.option("--log", "path", metavar="FILE", help="The log; FILE without the option is the same")
@click.option("--line", "lines", type=Whole(1), multiple=True, metavar="N",
              help="Run line N again, counted from 1")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Run every line again")
@click.option("--where", "conditions", multiple=True, metavar="FIELD=VALUE",
              help="Run lines again that have this VALUE; FIELD: "
              f"{', '.join(name for name in LINE if name != 'repro')}")  # fmt: skip
@click.option("--tolerance", "limit", type=Share(),
              help="Exit with 1 if a line is shown to be worse by more, as 5%")  # fmt: skip
@click.option("--processes", type=Whole(1), default=1, help="Start each line N times [1]")
@click.option("--checkpoint_root", metavar="DIR", help="Look here for checkpoints that are missing")
@click.option("--dummy", is_flag=True, help="Take random weights where a checkpoint is missing")
@options(without=("interactive",))
def replay(
    path: str | None,
    lines: tuple[int, ...],
    everything: bool,
    conditions: tuple[str, ...],
    limit: float | None,
    processes: int,
    checkpoint_root: str | None,
    dummy: bool,
    config: RunConfig,
) -> None:
    """Run lines of a log FILE again, and compare with what they say."""
    if path is None:
        raise UsageError("which log? quantbench replay FILE --all")
    given = given_options()
    changes = {name: value for name, value in vars(config).items() if name in given}
    written = config.write_result
    refuse_given(NOT_REPLAYED, "a replay prints figures, and writes log lines alone: "
                 "leave it out")  # fmt: skip
    if "checkpoint_path" in changes:
        refuse_given(("checkpoint_root", "dummy"), "--checkpoint_path says which one")
    if changes.get("dry_run"):
        refuse_given(OF_RUNNING, "--dry_run runs nothing: leave it out")
    if "write_result" in changes:
        log.check(written)
    if checkpoint_root is not None and not Path(checkpoint_root).is_dir():
        why = files.missing(checkpoint_root) or "it is no folder"
        raise UsageError(f"--checkpoint_root {checkpoint_root}: {why}")
    how = partial(mapped, changes=changes, checkpoint_root=checkpoint_root, dummy=dummy)
    chosen_lines, problems = chosen(path, lines, everything, conditions, how)
    if not chosen_lines and len(problems) == 1:
        raise LogError(f"{path}: {problems[0]}")
    for problem in problems:
        say(f"refused: {problem}")
    if not chosen_lines:
        raise LogError(f"{path}: none of the lines asked for can be run")
    dry_run, write_result = bool(changes.get("dry_run")), changes.get("write_result", "none")
    if limit is not None and not dry_run:
        say(NO_READING)
    worse, started, every = [], time.monotonic(), len(chosen_lines)
    for done, line in enumerate(chosen_lines):
        if not dry_run:
            left = (time.monotonic() - started) * (every - done) / max(1, done)
            about = f"; about {duration(left)} left" if done else ""
            say(f"{done + 1} of {every}: {line.name}{about}")
        try:
            if dry_run:
                click.echo(built(line))
            else:
                worse += replayed(line, processes, limit, write_result)
        except QuantbenchError as error:
            problems.append(f"{line.name}: {error}")
            say(f"failed: {problems[-1]}")
    for text in worse:
        click.echo(f"worse: {text}")
    sys.exit(1 if problems or worse else 0)
