"""How well a model predicts a text: the negative log-likelihood of every token, in nats.

Each token is predicted from at least half a context, except at the text's beginning: windows of
`context` tokens advance by half of it, and only a window's second half counts.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.llama import Transformer

Report = Callable[[int, int], None]


@torch.no_grad()
def token_nats(
    model: Transformer, tokens: Tensor, context: int, report: Report | None = None
) -> Tensor:
    """Nats of tokens[1:], (N - 1,) float64 on the CPU, for tokens (N,) on the model's device."""
    half, nats = context // 2, []
    for start in range(0, len(tokens) - 1, half):
        begin = max(0, start - half)
        window = tokens[begin : start + half + 1]
        logits = model(window[None, :-1])[0, start - begin :].float()
        nats.append(F.cross_entropy(logits, window[start - begin + 1 :], reduction="none"))
        if report:
            report(min(start + half, len(tokens) - 1), len(tokens) - 1)
    return torch.cat(nats).double().cpu()


def perplexity(nats: Tensor) -> float:
    """exp of the mean."""
    return nats.mean().exp().item()
