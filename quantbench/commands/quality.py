"""quantbench quality: what a scheme costs in quality, against full precision.

quantbench quality --quantization int4wo-64
quantbench quality --quantization int4wo-64 --kv_cache int8 --text FILE --tokens 0
quantbench quality --quantization int4wo-64 --lm_eval hellaswag,my_task.yaml
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from quantbench import files
from quantbench.answer.interval import Interval
from quantbench.answer.limits import kl_of
from quantbench.bench.arm import NOT_IN_ARMS
from quantbench.cli import Command, quiet
from quantbench.errors import UsageError
from quantbench.log.about import report_output, write_json
from quantbench.log.config import RunConfig
from quantbench.log.options import options
from quantbench.quality.tasks import find
from quantbench.quality.thresholds import (
    FIRST_TOKENS,
    LEGEND,
    MAX_KL,
    MOST_TOKENS,
    SCALE,
    check_tokens,
    described,
)
from quantbench.quality.types import Part, Quality
from quantbench.run import checks
from quantbench.text import aligned

if TYPE_CHECKING:
    from quantbench.quality.measure import QualityReport

NAMES = {"greedy": "the model's own, greedy", "sampled": "the model's own, sampled"}
WORST = 5  # layers that are shown
SAMPLING = ("num_samples", "max_new_tokens", "top_k", "temperature", "prompt", "prefill_size")
# What changes no figure: rows and positions at once, ranks, and where experts lie.
FREE = (
    *("batch_size", "cache_size", "context_depth", "prefill_chunk", "tp"),
    *("expert_memory", *checks.EXPERTS),
)
UNUSED = {*NOT_IN_ARMS, *SAMPLING, *FREE, "compile", "compile_prefill"} - {"debug"}
FIGURES = {  # what is shown, how it is written, and the name of its standard error or interval
    "kl": ("KL divergence, nats, 95 %", ".6f", "kl_interval"),
    "kl_class": ("  which is", "", None),
    "kl_median": ("  median token", ".6f", None),
    "kl_p99": ("  99 % of tokens", ".6f", None),
    "kl_max": ("  largest", ".6f", None),
    "top1": ("same likeliest token", ".4f", None),
    "lost": ("  flips from right to wrong", ".4f", None),
    "gained": ("  from wrong to right", ".4f", None),
    "top5": ("of the five likeliest", ".4f", None),
    "perplexity": ("perplexity", ".4f", "perplexity_standard_error"),
    "perplexity_ratio": ("÷ baseline, 95 %", ".4f", "perplexity_ratio_interval"),
    "bits_per_byte": ("bits per byte", ".4f", None),
}
LEGEND_SQNR = (
    "SQNR, a layer's signal over its error: 40 dB is 1 % of error, good; 20 dB is 10 %, bad"
)


@click.command(cls=Command)
@click.option("--text", help="A text to predict, instead of prose, code and the model's own")
@click.option(
    "--tokens",
    type=click.IntRange(0),
    help="Predict N tokens; 0: all [until it is clear on which side of --max_kl the scheme is, "
    f"{FIRST_TOKENS} to {MOST_TOKENS}]",
)
@click.option(
    "--max_kl",
    metavar="NATS",
    help=f"The KL divergence that is good enough [{MAX_KL}]; {SCALE}",
)
@click.option("--lm_eval", metavar="TASKS", help="Tasks of lm-evaluation-harness, or their .yaml")
@click.option(
    "--limit", type=click.IntRange(1), help="Take only the first N documents of each task"
)
@click.option("--json", "json_path", metavar="PATH", help="Write all of it here, every layer too")
@click.option("--tp", hidden=True)
@options(without=UNUSED)
def quality(
    text: str | None,
    tokens: int | None,
    max_kl: str | None,
    lm_eval: str | None,
    limit: int | None,
    json_path: str | None,
    tp: str | None,
    **given: Any,
) -> None:
    """Measure how well a scheme predicts, how far it is from full precision, and where it errs."""
    if limit is not None and lm_eval is None:
        raise UsageError("--limit is of the documents of --lm_eval's tasks: name some, or leave it")
    if tp is not None:
        raise UsageError("--tp: quality is the same on any number of ranks; leave it out")
    config, most = RunConfig(**given), MAX_KL if max_kl is None else kl_of(max_kl)
    if config.checkpoint_path.startswith("dummy:"):
        raise UsageError(
            f"--checkpoint_path {config.checkpoint_path}: random weights have none; without this "
            "option the scheme is measured on the embedded model"
        )
    checks.check_options(config)
    check_tokens(tokens or 0)
    if text is not None:
        files.read_text("--text", text)
    files.check_outputs(
        [report_output(json_path)],
        {"--text": text, "--calibration_text": config.calibration_text},
    )
    quiet(config.debug)
    tasks = find(lm_eval) if lm_eval else None
    # torch takes its seconds after the options
    from quantbench.quality.measure import measure

    measured = measure(config, text, tokens, most, tasks, limit)
    if json_path:
        write_json(json_path, measured)
    click.echo(report(measured))


def report(measured: QualityReport) -> str:
    """The baseline's figures, the scheme's and the noise floor's, and the worst layers."""
    floor = measured.noise_floor
    columns = (measured.full_precision, measured.quality, floor)
    dtype, steps = measured.config.precision, f"noise floor: {floor.tokens} decoding steps"
    rows = [["", f"baseline: {dtype}", measured.scheme, steps]]
    for name, (heading, form, error) in FIGURES.items():
        if getattr(measured.quality, name) is not None:
            rows.append([heading, *(_shown(of, name, form, error) for of in columns)])
            if name == "perplexity":  # the noise floor's is of other tokens
                rows[-1][-1] = "-"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    quality = measured.quality
    lines = [
        f"{measured.model}: {described(measured.text, [quality.tokens], quality.window or 0)}",
        _verdict(measured),
        "",
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        "",
        *_parts("by text", quality.texts or []),
        *_parts("by depth", quality.depths or []),
        "",
        *LEGEND.values(),
    ]
    if measured.quality.decoding:
        sentence = measured.quality.decoding.sentence()
        lines.append(sentence[:1].upper() + sentence[1:])
    worst = sorted(
        (layer.outputs, layer.name, layer.weights)
        for layer in measured.layers
        if layer.outputs is not None
    )
    if worst:
        lines += ["", f"Worst layers of {len(measured.layers)}, SQNR in dB: outputs (weights)"]
        lines += [
            f"  {name:<32} {outputs:6.2f} ({_decibels(weights)})"
            for outputs, name, weights in worst[:WORST]
        ]
        lines.append(LEGEND_SQNR)
    if measured.tasks:
        lines += ["", "lm-evaluation-harness"]
        lines += _tasks(measured)
    return "\n".join(lines)


def _verdict(measured: QualityReport) -> str:
    """In a line: the KL's class, and on which side of the limit it is."""
    quality, most = measured.quality, measured.max_kl
    kl = quality.kl or 0.0
    side = "within" if kl <= most else "above"
    if quality.kl_interval is None:
        sure = "; too few tokens to say how sure that is: give more --tokens"
    else:
        sure = "" if measured.settled else ", but not beyond doubt"
    return f"{measured.scheme}: KL {kl:.4g}, {quality.kl_class}: {side} --max_kl {most:g}{sure}"


def _parts(heading: str, parts: Sequence[Part]) -> Sequence[str]:
    """A line for each text or range of depths, where there are several."""
    if len(parts) < 2:
        return []
    rows = [[heading, "tokens", "KL, nats", "same likeliest", "perplexity ÷", ""]]
    for part in parts:
        error = "" if part.kl_standard_error is None else f" ± {part.kl_standard_error:.6f}"
        rows.append(
            [
                *(NAMES.get(part.name, part.name), str(part.tokens), f"{part.kl:.6f}{error}"),
                *(f"{part.top1:.4f}", f"{part.perplexity_ratio:.4f}", part.digest or ""),
            ]
        )
    return [aligned(rows, left={0, 5}, widest=39)]


def _tasks(measured: QualityReport) -> Sequence[str]:
    """A line for each task and metric: the scheme's value, full precision's, and the documents that
    flipped."""
    flips = {(one.task, one.metric): one for one in measured.flips}
    lines = []
    for task, figures in measured.tasks.items():
        full = measured.tasks_of_full_precision.get(task, {})
        for name in figures:
            if "_stderr" in name:
                continue
            metric = name.partition(",")[0]
            own, of_full = (_value(values, name) for values in (figures, full))
            line = f"  {task} {metric}: {own}; full precision {of_full}"
            if one := flips.get((task, metric)):
                line += f"; {one.lost} lost, {one.gained} gained, McNemar's p {one.p:.2g}"
            lines.append(line)
    return lines


def _value(figures: Mapping[str, float], name: str) -> str:
    """A metric with its standard error, if it has one."""
    error = figures.get(name.replace(",", "_stderr,"), math.nan)
    value = f"{figures.get(name, math.nan):.4f}"
    return f"{value} ± {error:.4f}" if math.isfinite(error) else value


def _shown(quality: Quality, name: str, form: str, error: str | None) -> str:
    value = getattr(quality, name)
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    spread = getattr(quality, error) if error else None
    if isinstance(spread, list):
        return Interval(value, *spread).written(form)
    return f"{value:{form}}" + ("" if spread is None else f" ± {spread:{form}}")


def _decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.2f}"
