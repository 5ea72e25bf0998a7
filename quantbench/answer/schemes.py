"""Every quantization scheme: its size, its kernel here, and its cost in quality."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantbench import devices, files
from quantbench.answer.json_rows import SchemeRow
from quantbench.errors import KernelError, UsageError
from quantbench.generate import Generator
from quantbench.log.config import RunConfig
from quantbench.models.formats import EMBEDDED
from quantbench.models.loading import load_config
from quantbench.quality.block_errors import block_mean, ratio
from quantbench.quality.scoring import token_nats
from quantbench.quantize.spec import MEASURED, SHOWN, START_WITH, parse
from quantbench.run.loading import Loading
from quantbench.run.plan import begin, make_plan
from quantbench.run.sizes import size_of
from quantbench.text import aligned

WINDOW = 1024  # positions; windows advance by half of them
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
    plan = begin(make_plan(base))
    path = Path(base.calibration_text or EMBEDDED / "heldout.txt")
    ids = torch.tensor(plan.tokenizer.encode(files.read_text("--text", path)), device=device)
    ids = ids[: limit + 1] if limit else ids
    context = max(2, min(WINDOW, plan.architecture.max_position, limit // 2 or WINDOW))
    if len(ids) <= context:
        raise UsageError(
            f"--text {path}: {len(ids)} tokens do not fill a window of {context}; give a longer "
            "text, or fewer --tokens"
        )

    def nats_of(name: str) -> Tensor:
        plan = make_plan(dataclasses.replace(base, quantization=name))
        loading = Loading(plan.config, plan.spec, plan.device, plan.tokenizer)
        model = loading.load(lambda done, total: None, say)
        generator = Generator(model, 1, context, plan.kv_cache, prefill_chunk=context)
        return token_nats(generator.forward, ids, context)

    with torch.no_grad():
        full = nats_of("none")
        for number, row in enumerate(rows, 1):
            if row.why_not:
                continue
            say(f"{number} of {len(rows)}: {row.scheme}")
            own = full if row.scheme == "none" else nats_of(row.scheme)
            row.perplexity, row.tokens = own.mean().exp().item(), len(own)
            blocks = torch.split(own - full, context // 2)  # that part of a window counts
            difference = block_mean([block.sum().item() for block in blocks], [*map(len, blocks)])
            row.ratio, error = ratio(difference.mean), difference.standard_error
            row.ratio_standard_error = row.ratio * error if math.isfinite(error) else None


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
