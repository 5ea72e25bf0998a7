"""How well an arm still predicts, and how far its predictions are from a reference's.

The text goes through the model in windows that fill a KV cache of the arm's own kind, so that a
quantized cache shows too. The reference's logits are kept in a file as the model gave them, in its
own dtype: nothing is lost.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import files
from errors import UsageError
from generate import Generator
from models.checkpoints.sources import EMBEDDED
from models.llama import Transformer
from run.plan import Plan
from run.scoring import perplexity, predictions

NORMAL = 1.96  # standard errors to either side of a 95 % interval
CONTEXT = 1024  # positions of a window; it advances by half of them


@dataclass(frozen=True)
class Scores:
    """One number a token, each (N,) on the CPU: nats by the model and by the reference, KL
    (reference ‖ model) in nats, whether the likeliest tokens are the same, and how many of the
    reference's five likeliest are among the model's. Without a reference only `nats` is there."""

    nats: Tensor
    reference_nats: Tensor | None = None
    kl: Tensor | None = None
    top1: Tensor | None = None
    top5: Tensor | None = None


class Logits:
    """Logits (N, V) in a file, written or read from the front."""

    def __init__(self, path: str, rows: int, vocab_size: int, dtype: str) -> None:
        self.about: dict[str, Any] = {
            "path": path,
            "rows": rows,
            "vocab_size": vocab_size,
            "dtype": dtype,
        }
        count, kind = rows * vocab_size, getattr(torch, dtype)
        self.kept = torch.from_file(path, shared=True, size=count, dtype=kind)
        self.kept = self.kept.view(rows, vocab_size)
        self.row = 0

    @classmethod
    def create(cls, path: str, rows: int, vocab_size: int, dtype: str) -> "Logits":
        """A new file; OSError where the disk has no room, which a mapped file would die of."""
        with open(path, "wb") as file:
            size = rows * vocab_size * getattr(torch, dtype).itemsize
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
        return cls(path, rows, vocab_size, dtype)

    def next(self, count: int) -> Tensor:
        """The next rows: to read, or to copy into."""
        self.row += count
        return self.kept[self.row - count : self.row]


def score(
    found: Iterator[tuple[Tensor, Tensor]], reference: Logits | None, keep: Logits | None = None
) -> Scores:
    """Over what scoring.predictions gives; `keep`: where the logits are put, too."""
    rows: dict[str, list[Tensor]] = {name: [] for name in Scores.__dataclass_fields__}
    for logits, targets in found:
        logits, targets = logits.cpu(), targets.cpu()
        if keep:
            keep.next(len(logits)).copy_(logits)
        q = logits.double().log_softmax(-1)
        rows["nats"].append(F.nll_loss(q, targets, reduction="none"))
        if reference:
            kept = reference.next(len(logits)).double()
            p = kept.log_softmax(-1)
            rows["reference_nats"].append(F.nll_loss(p, targets, reduction="none"))
            rows["kl"].append((p.exp() * (p - q)).sum(-1))
            five, mine = kept.topk(5).indices, logits.topk(5).indices
            rows["top1"].append((five[:, 0] == mine[:, 0]).double())
            rows["top5"].append((five[:, :, None] == mine[:, None]).any(-1).double().mean(-1))
    return Scores(**{name: torch.cat(parts) for name, parts in rows.items() if parts})


def summary(scores: Scores) -> dict[str, Any]:
    """The figures of a row, standard errors beside them; of the ratio of perplexities, that of
    paired tokens, and a 95 % interval."""
    nats = scores.nats
    found = {
        "tokens": len(nats),
        "perplexity": perplexity(nats),
        "perplexity_standard_error": perplexity(nats) * standard_error(nats),
    }
    if scores.kl is None:
        return found
    assert scores.reference_nats is not None
    assert scores.top1 is not None and scores.top5 is not None
    difference = nats - scores.reference_nats
    ratio, error = perplexity(difference), standard_error(difference)
    return {
        **found,
        "perplexity_ratio": ratio,
        "perplexity_ratio_standard_error": ratio * error,
        "perplexity_ratio_interval": [ratio * math.exp(sign * NORMAL * error) for sign in (-1, 1)],
        "kl": max(0.0, scores.kl.mean().item()),  # rounding can leave it a little below
        "kl_standard_error": standard_error(scores.kl),
        "kl_median": scores.kl.median().item(),
        "kl_p99": scores.kl.quantile(0.99).item(),
        "kl_max": scores.kl.max().item(),
        "top1": scores.top1.mean().item(),
        "top5": scores.top5.mean().item(),
    }


def standard_error(values: Tensor) -> float:
    """Of the mean of independent values."""
    return values.std().item() / math.sqrt(len(values))


def quick(
    plan: Plan,
    model: Transformer,
    limit: int,
    text: str | None,
    reference: dict[str, Any] | None,
    keep: str | None,
) -> dict[str, Any]:
    """`summary` over the first `limit` tokens of a text, and "kept": what `reference` wants to be
    for the arms that are compared with this one; or why that cannot be had."""
    if plan.config.checkpoint_path.startswith("dummy:"):
        return {"why_not": "random weights predict nothing"}
    ids = token_ids(plan, limit, text).to(plan.device)
    vocab_size = plan.architecture.vocab_size
    if reference and (reference["rows"], reference["vocab_size"]) != (len(ids) - 1, vocab_size):
        return {"why_not": "the baseline has another tokenizer"}
    kept = Logits.create(keep, len(ids) - 1, vocab_size, plan.config.precision) if keep else None
    theirs = Logits(**reference) if reference else None
    found = through_cache(plan, model, ids, window(plan, limit))
    return {**summary(score(found, theirs, kept)), "kept": kept.about if kept else None}


def window(plan: Plan, limit: int) -> int:
    """Positions of a window, for so many tokens; 0: for all there are."""
    return max(2, min(CONTEXT, plan.architecture.max_position, limit or CONTEXT))


def through_cache(
    plan: Plan, model: Transformer, ids: Tensor, context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """scoring.predictions through a cache of the kind that the plan asks for."""
    generator = Generator(model, 1, context, plan.cache.format, prefill_chunk=context)
    return predictions(generator.forward, ids, context)


def token_ids(plan: Plan, limit: int, text: str | None) -> Tensor:
    """The beginning of the text, `limit` tokens and one to begin with; 0: all of it.

    UsageError where it cannot be read, or does not fill a window.
    """
    path = Path(text or EMBEDDED / "heldout.txt")
    ids = plan.tokenizer.encode(files.read_text("--text", path))
    least = window(plan, limit)
    if len(ids) <= least:
        raise UsageError(
            f"--text {path}: {len(ids)} tokens do not fill a window of {least}; give a longer "
            "text, or fewer --tokens"
        )
    return torch.tensor(ids[: limit + 1] if limit else ids)
