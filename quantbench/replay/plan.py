"""One line of a log run again, for `quantbench replay`: then and now, and what became worse."""

import dataclasses
from pathlib import Path

import click

from quantbench.log import log
from quantbench.log.record import Record
from quantbench.replay.answer import Line, measured

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


def replayed(line: Line, processes: int, limit: float | None, write_result: str) -> list[str]:
    """Measure the line; print then and now. Returns what is worse by more than `limit`."""
    now = measured(line.config, processes)
    if write_result != "none":
        log.append(Path(write_result), now.render())
    return _figures(line, now, limit)


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
