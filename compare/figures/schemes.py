"""Every quantization scheme: its size, its kernel here, and its cost in quality."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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

Say = Callable[[str], None]


def rows(
    base: RunConfig, schemes: Sequence[str], measure: bool, tokens: int, say: Say
) -> list[dict[str, Any]]:
    """One dict a scheme, in order: scheme, numerics, bits_per_weight, kernel or why_not, and, if
    asked, perplexity, ratio to full precision and the standard error of that ratio."""
    device = devices.resolve(base.device)
    architecture = load_config(base.checkpoint_path)
    found = []
    for name in schemes or (*SHOWN, *MEASURED):
        spec = parse(name)
        row: dict[str, Any] = {"scheme": name, "numerics": spec.numerics}
        if spec.scheme:
            try:
                size = size_of(architecture, spec.scheme, device, getattr(torch, base.precision))
                row |= {"bits_per_weight": size.bits_per_weight, "kernel": size.kernel}
                row["why_not"] = size.reason
            except KernelError as error:
                row["why_not"] = str(error)
        found.append(row)
    if measure:
        _measure(base, found, tokens, device, say)
    return found


def _measure(
    base: RunConfig, found: list[dict[str, Any]], limit: int, device: torch.device, say: Say
) -> None:
    """Fill in the perplexities; full precision is measured first, whatever was asked for."""
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
    for number, row in enumerate(found, 1):
        if row.get("why_not"):
            continue
        say(f"{number} of {len(found)}: {row['scheme']}")
        mine = full if row["scheme"] == "none" else nats(row["scheme"])
        difference = mine - full
        ratio = difference.mean().exp().item()
        row["perplexity"] = mine.mean().exp().item()
        row["ratio"] = ratio
        row["ratio_standard_error"] = ratio * difference.std().item() / math.sqrt(len(mine))
        row["tokens"] = len(mine)


def table(found: list[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    measured = any("perplexity" in row for row in found)
    head = ["scheme", "bits/weight", "kernel"] + ["perplexity", "÷ none"] * measured
    lines = [head]
    for row in found:
        bits = f"{row['bits_per_weight']:.2f}" if "bits_per_weight" in row else "measured"
        cells = [row["scheme"], bits, row.get("kernel") or row.get("why_not") or "measured"]
        if "perplexity" in row:
            spread = f"{row['ratio']:.4f} ± {row['ratio_standard_error']:.4f}"
            cells += [f"{row['perplexity']:.3f}", spread if row["scheme"] != "none" else "1"]
        lines.append(cells)
    return aligned(lines, left={0, 2, 4}, widest=39)
