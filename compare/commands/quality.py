"""python -m compare quality: what a scheme costs in quality, against full precision.

python -m compare quality --quantization int4wo-64
python -m compare quality --quantization int4wo-64 --kv_cache int8 --text FILE --tokens 0
python -m compare quality --quantization int4wo-64 --lm_eval hellaswag,my_task.yaml
"""

import math
from collections.abc import Sequence
from typing import Any

import click

import files
from benchlog.config import RunConfig, options
from cli import Command, quiet, say
from compare.sampling.arm import NOT_IN_ARMS
from compare.sampling.results import write_json
from errors import UsageError
from quantize.spec import parse as scheme

TOKENS = 4096
WORST = 5
SAMPLING = ("num_samples", "max_new_tokens", "top_k", "temperature", "prompt", "prefill_size")
UNUSED = {*NOT_IN_ARMS, *SAMPLING, "context_depth", "compile", "compile_prefill"} - {"debug"}
FIGURES = {  # what is shown, how it is written, and the name of its standard error or interval
    "perplexity": ("perplexity", ".4f", "perplexity_standard_error"),
    "bits_per_byte": ("bits per byte", ".4f", None),
    "perplexity_ratio": ("÷ full precision, 95 %", ".4f", "perplexity_ratio_interval"),
    "kl": ("KL divergence, nats", ".6f", "kl_standard_error"),
    "kl_median": ("  median", ".6f", None),
    "kl_p99": ("  99 %", ".6f", None),
    "kl_max": ("  largest", ".6f", None),
    "top1": ("same likeliest token", ".4f", None),
    "top5": ("of the five likeliest", ".4f", None),
}


@click.command(cls=Command)
@click.option("--text", help="A text to predict, instead of the embedded held-out one")
@click.option("--tokens", type=click.IntRange(0), default=TOKENS, help=f"0: all [{TOKENS}]")
@click.option("--lm_eval", metavar="TASKS", help="Tasks of lm-evaluation-harness, or their .yaml")
@click.option("--limit", type=click.IntRange(1), help="Documents of each of those tasks")
@click.option("--json", "json_path", metavar="PATH", help="Write all of it here, every layer too")
@options(without=UNUSED)
def quality(
    text: str | None,
    tokens: int,
    lm_eval: str | None,
    limit: int | None,
    json_path: str | None,
    **given: Any,
) -> None:
    """Measure how well a scheme predicts, how far it is from full precision, and where it errs."""
    if limit is not None and lm_eval is None:
        raise UsageError("--limit is of the documents of --lm_eval's tasks: name some, or leave it")
    config = RunConfig(**given)
    if config.checkpoint_path.startswith("dummy:"):
        raise UsageError(f"--checkpoint_path {config.checkpoint_path}: random weights have none")
    scheme(config.quantization)
    if text is not None:
        files.read_text("--text", text)
    files.check_output("--json", json_path, files.is_json, "JSON")
    quiet(config.debug)
    from compare.fidelity.measure import measure  # torch takes its seconds after the options

    tasks = [task.strip() for task in lm_eval.split(",")] if lm_eval else []
    found = measure(config, text, tokens, tasks, limit, say)
    if json_path:
        write_json(json_path, found)
    click.echo(report(found))


def report(found: dict[str, Any]) -> str:
    """The figures, the noise floor beside them, and the worst layers."""
    here, floor = found["quality"], found["noise_floor"]
    rows = [["", found["scheme"], f"noise floor: {found['other_dtype']}"]]
    for name, (heading, form, error) in FIGURES.items():
        if name in here:
            rows.append([heading, *(_shown(of, name, form, error) for of in (here, floor))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{found['model']}: {here['tokens']} tokens in windows of {found['window']}, "
        f"which advance by {found['window'] // 2}",
        "",
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
    ]
    worst = [layer for layer in found["layers"] if layer["outputs"] is not None]
    worst.sort(key=lambda layer: layer["outputs"])
    if worst:
        lines += ["", f"Worst layers of {len(found['layers'])}, SQNR in dB: outputs (weights)"]
        lines += [
            f"  {layer['name']:<32} {layer['outputs']:6.2f} ({_decibels(layer['weights'])})"
            for layer in worst[:WORST]
        ]
    if found["tasks"]:
        lines += ["", "lm-evaluation-harness"]
        lines += [f"  {task} {name}: {value}" for task, name, value in scores(found["tasks"])]
    return "\n".join(lines)


def scores(tasks: dict[str, dict[str, Any]]) -> Sequence[tuple[str, str, str]]:
    """Task, metric and value, a standard error behind it where there is one."""
    found = []
    for task, figures in tasks.items():
        for name, value in figures.items():
            if not isinstance(value, int | float) or "_stderr" in name:
                continue
            metric, _, how = name.partition(",")
            error = figures.get(f"{metric}_stderr,{how}")
            shown = f"{value:.4f}"
            if isinstance(error, int | float) and math.isfinite(error):
                shown += f" ± {error:.4f}"
            found.append((task, metric, shown))
    return found


def _shown(figures: dict[str, Any], name: str, form: str, error: str | None) -> str:
    if figures.get(name) is None:
        return "-"
    beside = figures[error] if error else None
    if isinstance(beside, list):
        return f"{figures[name]:{form}} ({beside[0]:{form}} to {beside[1]:{form}})"
    return f"{figures[name]:{form}}" + (f" ± {beside:{form}}" if error else "")


def _decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.2f}"
