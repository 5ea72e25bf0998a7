"""What `quantbench quality` prints: figures of baseline, scheme and noise floor; worst layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from quantbench.quality.thresholds import LEGEND, described
from quantbench.quality.types import Part, Quality
from quantbench.report.columns import Columns, aligned, number, with_error
from quantbench.report.interval import Interval
from quantbench.text import aligned as aligned_cells

if TYPE_CHECKING:
    from quantbench.quality.measure import QualityReport

NAMES = {"greedy": "the model's own, greedy", "sampled": "the model's own, sampled"}
WORST = 5  # layers that are shown
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
PARTS: Columns[Part] = [
    ("tokens", lambda part: str(part.tokens)),
    ("KL, nats", with_error(lambda part: part.kl, lambda part: part.kl_standard_error, ".6f")),
    ("same likeliest", number(lambda part: part.top1, ".4f")),
    ("perplexity ÷", number(lambda part: part.perplexity_ratio, ".4f")),
    ("", lambda part: part.digest or ""),
]


def report(measured: QualityReport) -> str:
    """The whole report, for a terminal."""
    quality = measured.quality
    lines = [
        f"{measured.model}: {described(measured.text, [quality.tokens], quality.window or 0)}",
        _verdict(measured),
        "",
        _figures(measured),
        "",
    ]
    for heading, parts in (("by text", quality.texts or []), ("by depth", quality.depths or [])):
        if len(parts) > 1:
            columns = [(heading, lambda part: NAMES.get(part.name, part.name)), *PARTS]
            lines.append(aligned(columns, parts))
    lines += ["", *LEGEND.values()]
    if quality.decoding:
        sentence = quality.decoding.sentence()
        lines.append(sentence[:1].upper() + sentence[1:])
    if measured.answers:
        lines.append(f"Answers: {measured.answers.sentence().partition(' ')[2]}")
    layers = [layer for layer in measured.layers if layer.outputs is not None]
    if layers:
        lines += ["", f"Worst layers of {len(measured.layers)}, SQNR in dB: outputs (weights)"]
        for layer in sorted(layers, key=lambda layer: (layer.outputs, layer.name))[:WORST]:
            weights = "exact" if layer.weights is None else f"{layer.weights:.2f}"
            lines.append(f"  {layer.name:<32} {layer.outputs:6.2f} ({weights})")
        lines.append(LEGEND_SQNR)
    if measured.tasks:
        lines += ["", "lm-evaluation-harness", *_tasks(measured)]
    return "\n".join(lines)


def _figures(measured: QualityReport) -> str:
    floor = measured.noise_floor
    columns = (measured.full_precision, measured.quality, floor)
    steps = f"noise floor: {floor.tokens} decoding steps"
    rows = [["", f"baseline: {measured.config.precision}", measured.scheme, steps]]
    for name, (heading, form, error) in FIGURES.items():
        if getattr(measured.quality, name) is not None:
            rows.append([heading, *(_shown(of, name, form, error) for of in columns)])
            if name == "perplexity":  # the noise floor's is of other tokens
                rows[-1][-1] = "-"
    return aligned_cells(rows, left=range(4))


def _shown(quality: Quality, name: str, form: str, error: str | None) -> str:
    value, spread = getattr(quality, name), getattr(quality, error) if error else None
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(spread, list):
        return Interval(value, *spread).written(form)
    return f"{value:{form}}" + ("" if spread is None else f" ± {spread:{form}}")


def _verdict(measured: QualityReport) -> str:
    """In a line: the KL's class, and on which side of the limit it is."""
    quality, most = measured.quality, measured.max_kl
    kl = quality.kl or 0.0
    side = "within" if kl <= most else "above"
    sure = "" if measured.settled else ", but not beyond doubt"
    if quality.kl_interval is None:
        sure = "; too few tokens to say how sure that is: give more --tokens"
    return f"{measured.scheme}: KL {kl:.4g}, {quality.kl_class}: {side} --max_kl {most:g}{sure}"


def _tasks(measured: QualityReport) -> Sequence[str]:
    """A line for each task and metric: the scheme's value, full precision's, and the documents that
    flipped."""
    flips = {(flip.task, flip.metric): flip for flip in measured.flips}
    lines = []
    for task, figures in measured.tasks.items():
        full = measured.tasks_of_full_precision.get(task, {})
        for name in (name for name in figures if "_stderr" not in name):
            metric = name.partition(",")[0]
            line = f"  {task} {metric}: {_metric(figures, name)}; "
            line += f"full precision {_metric(full, name)}"
            if flip := flips.get((task, metric)):
                line += f"; {flip.lost} lost, {flip.gained} gained, McNemar's p {flip.p:.2g}"
            lines.append(line)
    return lines


def _metric(figures: dict[str, float], name: str) -> str:
    """0.6120 ± 0.0154, as far as they are there and finite."""
    both = (figures.get(key, math.nan) for key in (name, name.replace(",", "_stderr,")))
    return " ± ".join(f"{value:.4f}" for value in takewhile(math.isfinite, both)) or "-"
