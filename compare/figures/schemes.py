"""Every quantization scheme: its size, its kernel here, and its cost in quality."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import devices
import files
from benchlog.config import RunConfig
from errors import KernelError, UsageError
from models.checkpoints.load import load_config, tokenizer_folder
from models.checkpoints.sources import EMBEDDED
from models.tokenizer import ByteTokenizer, load_tokenizer
from quantize.spec import MEASURED, SHOWN, parse
from run.loading import Loading
from run.scoring import token_nats
from run.sizes import size_of
from text import aligned
from typed_json import omitted

Say = Callable[[str], None]


@dataclass
class SchemeRow:
    """A scheme, and what it costs."""

    scheme: str
    numerics: str
    bits_per_weight: float | None = omitted()  # None for what autoquant chooses by measuring
    kernel: str | None = omitted()
    why_not: str | None = omitted()  # why no kernel can run it here
    perplexity: float | None = omitted()
    ratio: float | None = omitted()  # of perplexities: this scheme ÷ full precision
    ratio_standard_error: float | None = omitted()
    tokens: int | None = omitted()  # that were predicted


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
        row = SchemeRow(name, spec.numerics)
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
    folder = tokenizer_folder(base.checkpoint_path)
    architecture = load_config(base.checkpoint_path)
    vocab = architecture.vocab_size
    tokenizer = load_tokenizer(folder, vocab) if folder else ByteTokenizer(vocab)
    path = Path(base.calibration_text or EMBEDDED / "heldout.txt")
    ids = tokenizer.encode(files.read_text("--text", path))
    if len(ids) < 3:
        raise UsageError(f"--text {path}: {len(ids)} tokens are too few to measure on")
    text = torch.tensor(ids[: limit + 1] if limit else ids, device=device)
    context = min(architecture.max_position, 1024)

    def nats(name: str) -> torch.Tensor:
        config = dataclasses.replace(base, quantization=name, device=str(device))
        loading = Loading(config, parse(name), device, tokenizer)
        return token_nats(loading.load(lambda done, total: None, say), text, context)

    full = nats("none")
    for number, row in enumerate(rows, 1):
        if row.why_not:
            continue
        say(f"{number} of {len(rows)}: {row.scheme}")
        quantized = full if row.scheme == "none" else nats(row.scheme)
        difference = quantized - full
        row.perplexity = quantized.mean().exp().item()
        row.ratio = difference.mean().exp().item()
        standard_error = difference.std().item() / math.sqrt(len(difference))
        row.ratio_standard_error = row.ratio * standard_error
        row.tokens = len(quantized)


def table(rows: Sequence[SchemeRow]) -> str:
    """The rows as aligned text."""
    measured = any(row.perplexity is not None for row in rows)
    head = ["scheme", "bits/weight", "kernel"] + ["perplexity", "÷ none"] * measured
    lines = [head]
    for row in rows:
        bits = "measured" if row.bits_per_weight is None else f"{row.bits_per_weight:.2f}"
        cells = [row.scheme, bits, row.kernel or row.why_not or "measured"]
        if row.perplexity is not None:
            ratio = f"{row.ratio:.4f} ± {row.ratio_standard_error:.4f}"
            cells += [f"{row.perplexity:.3f}", ratio if row.scheme != "none" else "1"]
        lines.append(cells)
    return aligned(lines, left={0, 2, 4}, widest=39)
