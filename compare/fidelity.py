"""How well an arm still predicts, and how far its predictions are from the baseline's.

The text goes through the model in windows that fill a KV cache of the arm's own kind, so that a
quantized cache shows too. The baseline's logits are kept in a file, in float32: nothing is lost.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import sizes
from errors import UsageError
from generate import Plan
from models.llama import Transformer
from models.sources import EMBEDDED

WINDOW = 512


@torch.no_grad()
def measure(
    plan: Plan, model: Transformer, limit: int, text: str | None, reference: str, write: bool
) -> dict[str, Any]:
    """Over the first `limit` tokens of the text: tokens, perplexity and, against the logits in the
    file `reference` (or, with `write`, what is then put there), KL divergence in nats, its
    standard error, top-1 agreement, and the ratio of perplexities with its standard error."""
    if plan.config.checkpoint_path.startswith("dummy:"):
        return {"why_not": "random weights predict nothing"}
    ids = token_ids(plan, limit, text)
    window = min(WINDOW, plan.architecture.max_position)
    windows = [part for part in ids.split(window) if len(part) > 1]
    rows = sum(len(part) - 1 for part in windows)
    shape = (rows, plan.architecture.vocab_size)
    model.setup_caches(1, window, sizes.kv_cache(plan.config))
    if write:
        kept = np.memmap(reference, np.float32, "w+", shape=shape)
    else:
        if Path(reference).stat().st_size != 4 * math.prod(shape):
            return {"why_not": "the baseline has another tokenizer"}
        kept = np.memmap(reference, np.float32, "r", shape=shape)
    nats, theirs, divergence, agreed = [], [], [], []
    row = 0
    for part in windows:
        part = part.to(plan.device)
        positions = torch.arange(len(part), device=plan.device)
        logits = model(part[None], positions)[0, :-1].float().cpu()
        targets = part[1:].cpu()
        piece = slice(row, row + len(logits))
        row = piece.stop
        if write:
            kept[piece] = logits.numpy()
        base = torch.from_numpy(np.array(kept[piece]))
        nats.append(F.cross_entropy(logits.double(), targets, reduction="none"))
        theirs.append(F.cross_entropy(base.double(), targets, reduction="none"))
        divergence.append(kl(base, logits))
        agreed.append(base.argmax(-1) == logits.argmax(-1))
    mine, base_nats, kls = torch.cat(nats), torch.cat(theirs), torch.cat(divergence)
    difference = mine - base_nats
    ratio = difference.mean().exp().item()
    return {
        "tokens": rows,
        "perplexity": mine.mean().exp().item(),
        "perplexity_ratio": ratio,
        "perplexity_ratio_standard_error": ratio * _standard_error(difference),
        "kl": max(0.0, kls.mean().item()),
        "kl_standard_error": _standard_error(kls),
        "top1": torch.cat(agreed).double().mean().item(),
    }


def token_ids(plan: Plan, limit: int, text: str | None) -> Tensor:
    """The beginning of the text, at most `limit` tokens. UsageError where it cannot be read."""
    path = Path(text or EMBEDDED / "heldout.txt")
    try:
        ids = plan.tokenizer.encode(path.read_text(encoding="utf-8"))[:limit]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UsageError(f"--quality_text {path}: {reason}") from None
    if len(ids) < 3:
        raise UsageError(f"--quality_text {path}: {len(ids)} tokens are too few to measure on")
    return torch.tensor(ids)


def kl(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference ‖ logits) of each row's distribution, (N,) float64, in nats."""
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def _standard_error(values: Tensor) -> float:
    return values.std().item() / math.sqrt(len(values))
