"""One line of a log run again, for `quantbench replay`: what is measured, printed, and worse."""

import dataclasses
from pathlib import Path

import click

from quantbench.answer.history import History
from quantbench.answer.interval import Interval
from quantbench.answer.replayed import Line, Replayed, beside, measured
from quantbench.bench.old_commit import OldCommit
from quantbench.log import log
from quantbench.log.config import repro
from quantbench.log.record import Record
from quantbench.quality.block_errors import LEAST_BLOCKS

# What is compared, and its unit.
FIGURES = {
    "tok_s": ("tok/s", ""),
    "mem_s": ("mem/s", " GB/s"),
    "peak_mem": ("peak memory", " GB"),
    "model_size": ("model size", " GB"),
}
GATED = ("peak_mem", "model_size")  # speeds of different days cannot be compared


def built(line: Line) -> str:
    """The model's size then and now, and the kernel that would run. Loads nothing."""
    from quantbench.run.plan import make_plan
    from quantbench.run.sizes import size_of

    plan = make_plan(dataclasses.replace(line.config, tp=1))  # the whole model
    then = f"{line.name}: model size then {line.record.model_size:.2f} GB"
    scheme = plan.spec.scheme
    if scheme is None:
        return f"{then}; {plan.spec} measures before it chooses"
    size = size_of(plan.architecture, scheme, plan.device, plan.precision, plan.config.kernel)
    layers = plan.architecture.num_layers
    now = f"now {size.model_bytes / 1e9:.2f} GB ({layers} layer{'s' * (layers != 1)})"
    return f"{then}, {now}, kernel {size.kernel or f'none: {size.reason}'}"


def replayed(
    line: Line,
    old: OldCommit | None,
    history: History | None,
    processes: int,
    limit: float | None,
    write_result: str,
) -> list[str]:
    """Measure the line, beside the old commit if there is one; print then and now, and what that
    commit or earlier days say. Returns what is worse by more than `limit`."""
    if old:
        now = beside(line.config, old, limit / 2 if limit else None)
    else:
        now = measured(line.config, processes, history is not None)
    if write_result != "none":
        log.append(Path(write_result), now.record.render())
    worse = _figures(line, now.record, limit)
    if old and now.speed:
        what, few = f"speed now ÷ commit {old.name}", "too few turns"
        worse += _judged(line, what, now.speed, limit, few)
    elif history:
        worse += _since_the_last_day(line, now, history, limit)
    return worse


def _figures(line: Line, now: Record, limit: float | None) -> list[str]:
    click.echo(line.name)
    worse = []
    for name, (heading, unit) in FIGURES.items():
        values = getattr(line.record, name), getattr(now, name)
        ratio = values[1] / values[0] if values[0] else None
        shown = "-" if ratio is None else f"{ratio:.3f} ×"
        then, now_shown = (f"{value:>9.2f}{unit:<5}" for value in values)
        click.echo(f"  {heading:<12} then {then}  now {now_shown}  {shown}")
        if name in GATED and limit is not None and ratio is not None and ratio > 1 + limit:
            worse.append(f"{line.name}: {heading} {shown} (--tolerance {limit:.1%})")
    return worse


def _since_the_last_day(
    line: Line, now: Replayed, history: History, limit: float | None
) -> list[str]:
    if now.caveat is not None:
        click.echo(f"  no limit to compare with earlier days: {now.caveat}")
        return []
    key = repro(line.config)
    change = history.against(key, now.relative)
    history.append(key, now.relative)
    if change is None:
        click.echo(f"  no earlier day of this line in {history.path}: today's is the first")
        return []
    what = "speed ÷ memory's speed, now ÷ the last day"
    few = f"at least {LEAST_BLOCKS} --processes are needed on both days"
    return _judged(line, what, change.inverse, limit, few)


def _judged(line: Line, what: str, ratio: Interval, limit: float | None, few: str) -> list[str]:
    """Print a ratio of speeds; its line where it is shown to be below 1 - limit. few: what was too
    few for an interval."""
    ends = f"no interval: {few}"
    if ratio.low is not None:
        ends = f"95% interval {ratio.low:.3f} to {ratio.high:.3f}"
    shown = f"{ratio.value:.3f} × ({ends})"
    click.echo(f"  {what}: {shown}")
    if limit is None or ratio.high is None or ratio.high >= 1 - limit:
        return []
    return [f"{line.name}: {what} {shown} (--tolerance {limit:.1%})"]
