"""Every quantization scheme: its size, its kernel here, and its cost in quality."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from quantbench import devices
from quantbench.compare.fidelity.scores import (
    Scores,
    score,
    standard_error,
    through_cache,
    token_ids,
    window,
)
from quantbench.compare.figures.block_errors import perplexity_ratio
from quantbench.compare.figures.json_rows import SchemeRow
from quantbench.errors import KernelError
from quantbench.log.config import RunConfig
from quantbench.models.loading import load_config
from quantbench.quantize.spec import MEASURED, SHOWN, START_WITH, parse
from quantbench.run.loading import Loading
from quantbench.run.plan import begin, make_plan
from quantbench.run.sizes import size_of
from quantbench.text import aligned

Say = Callable[[str], None]


def rows(
    base: RunConfig, schemes: Sequence[str], measure: bool, tokens: int, say: Say
) -> list[SchemeRow]:
    """A row for each scheme, in order; for all of them where none is given.

    measure: predict so many `tokens` of a text as well, 0 for all.
    """
    device = devices.resolve(base.device)
    architecture = load_config(base.checkpoint_path)
    rows = []
    for name in schemes or (*SHOWN, *MEASURED):
        spec = parse(name)
        row = SchemeRow(name, spec.numerics, spec.plain, spec.gguf)
        if spec.scheme:
            try:
                size = size_of(architecture, spec.scheme, device, getattr(torch, base.precision))
                row.bits_per_weight, row.kernel = size.bits_per_weight, size.kernel
                row.why_not = size.reason
            except KernelError as error:
                row.why_not = str(error)
        rows.append(row)
    if measure:
        _measure(base, rows, tokens, device, say)
    return rows


def _measure(
    base: RunConfig, rows: Sequence[SchemeRow], limit: int, device: torch.device, say: Say
) -> None:
    """Fill in the perplexities; full precision is measured first, even if it has no row."""
    base = dataclasses.replace(base, device=str(device))
    ids = token_ids(begin(make_plan(base)), limit, base.calibration_text).to(device)

    def scores(name: str) -> Scores:
        plan = make_plan(dataclasses.replace(base, quantization=name))
        loading = Loading(plan.config, plan.spec, plan.device, plan.tokenizer)
        model = loading.load(lambda done, total: None, say)
        return score(through_cache(plan, model, ids, window(plan, limit)), None)

    with torch.no_grad():
        full = scores("none")
        for number, row in enumerate(rows, 1):
            if row.why_not:
                continue
            say(f"{number} of {len(rows)}: {row.scheme}")
            own = full if row.scheme == "none" else scores(row.scheme)
            row.perplexity, row.tokens = own.nats.mean().exp().item(), len(own.nats)
            sums = own.sums(own.nats), full.sums(full.nats)
            row.ratio, *_ = perplexity_ratio(*sums, own.windows)
            error = standard_error(own, own.nats - full.nats)
            row.ratio_standard_error = None if error is None else row.ratio * error


def _tokens(rows: Sequence[SchemeRow]) -> str:
    return f"{next((row.tokens for row in rows if row.tokens), 0)} tokens"


def table(rows: Sequence[SchemeRow]) -> str:
    """The rows as aligned text. A star marks those to start with."""
    measured = any(row.perplexity is not None for row in rows)
    head = ["  scheme", "bits/weight", "GGUF", "kernel"]
    head += [f"perplexity on {_tokens(rows)}", "÷ none"] if measured else ["in words"]
    lines = [head]
    for row in rows:
        bits = "measured" if row.bits_per_weight is None else f"{row.bits_per_weight:.2f}"
        star = "*" if row.scheme in START_WITH else " "
        cells = [f"{star} {row.scheme}", bits, row.gguf, row.kernel or row.why_not or "measured"]
        if row.perplexity is not None:
            ratio = f"{row.ratio:.4f}"
            if row.ratio_standard_error is not None:
                ratio += f" ± {row.ratio_standard_error:.4f}"
            cells += [f"{row.perplexity:.3f}", ratio if row.scheme != "none" else "1"]
        elif not measured and not row.why_not:
            cells += [row.plain]
        lines.append(cells)
    return aligned(lines, left={0, 2, 3, 5 if measured else 4}, widest=39)
