"""Every quantization scheme: its size, its kernel here, and its cost in quality."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quantbench import devices
from quantbench.compare.json_rows import SchemeRow
from quantbench.errors import KernelError
from quantbench.log.config import RunConfig
from quantbench.models.loading import load_config
from quantbench.quality.judge import Held, Judge, quietly
from quantbench.quality.scores import summary
from quantbench.quantize.recipe import Recipe
from quantbench.quantize.spec import MEASURED, SHOWN, START_WITH, parse
from quantbench.run.plan import begin, make_plan
from quantbench.run.sizes import size_of
from quantbench.text import aligned

Say = Callable[[str], None]


def rows(base: RunConfig, schemes: Sequence[str]) -> list[SchemeRow]:
    """A row for each scheme, in order; for all of them where none is given."""
    device = devices.resolve(base.device)
    architecture = load_config(base.checkpoint_path)
    rows = []
    for name in schemes or (*SHOWN, *MEASURED):
        spec = parse(name)
        if isinstance(spec, Recipe):
            spec = spec.of_layers(architecture.name, architecture.linear_shapes())
        row = SchemeRow(name, spec.numerics, spec.plain, spec.gguf)
        if spec.scheme:
            try:
                size = size_of(architecture, spec.scheme, device, getattr(torch, base.precision))
                row.bits_per_weight, row.kernel = size.bits_per_weight, size.kernel
                row.why_not = size.reason
            except KernelError as error:
                row.why_not = str(error)
        rows.append(row)
    return rows


def measure(
    base: RunConfig, rows: Sequence[SchemeRow], text: str | None, tokens: int, say: Say
) -> None:
    """Fill in KL and perplexity, on the texts of `quantbench quality`. tokens: 0 for all."""
    judge = Judge(Held(begin(make_plan(base)), quietly), text, tokens)
    for number, row in enumerate(rows, 1):
        if row.why_not:
            continue
        say(f"{number} of {len(rows)}: {row.scheme}")
        plan = make_plan(replace(base, quantization=row.scheme))
        quality = summary(judge.scores(Held(plan, quietly)))
        row.perplexity, row.tokens = quality.perplexity, quality.tokens
        row.ratio = quality.perplexity_ratio
        row.ratio_standard_error = quality.perplexity_ratio_standard_error
        row.kl, row.kl_standard_error = quality.kl, quality.kl_standard_error


def table(rows: Sequence[SchemeRow]) -> str:
    """The rows as aligned text. A star marks those to start with."""
    tokens = next((row.tokens for row in rows if row.tokens), None)
    head = ["  scheme", "bits/weight", "GGUF", "kernel"]
    head += [f"KL, nats, on {tokens} tokens", "perplexity ÷ none"] if tokens else ["in words"]
    lines = [head]
    for row in rows:
        bits = "measured" if row.bits_per_weight is None else f"{row.bits_per_weight:.2f}"
        star = "*" if row.scheme in START_WITH else " "
        cells = [f"{star} {row.scheme}", bits, row.gguf, row.kernel or row.why_not or "measured"]
        if row.tokens:
            cells += [_with_error(row.kl, row.kl_standard_error),
                      _with_error(row.ratio, row.ratio_standard_error)]  # fmt: skip
        elif not tokens and not row.why_not:
            cells += [row.plain]
        lines.append(cells)
    return aligned(lines, left={0, 2, 3, 5 if tokens else 4}, widest=39)


def _with_error(value: float | None, error: float | None) -> str:
    return f"{value or 0:.4f}" + ("" if error is None else f" ± {error:.4f}")
