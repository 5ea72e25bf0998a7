"""How well a model predicts a text: the negative log-likelihood of every token, in nats.

Windows of `context` tokens advance by half of it, and only the second half of each counts. So each
token is predicted from at least half a context, except at the text's beginning.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

Report = Callable[[int, int], None]


# Logits (1, S, V) of tokens (1, S) from position 0 on: a model, or a Generator's `forward`.
Forward = Callable[[Tensor], Tensor]


@torch.no_grad()
def token_nats(
    forward: Forward, tokens: Tensor, context: int, report: Report | None = None
) -> Tensor:
    """Nats of tokens[1:], (N - 1,) float64 on the CPU, for tokens (N,) on the model's device.

    context: tokens in a window. report: called as (tokens done, total tokens).
    """
    nats = []
    for logits, targets in predictions(forward, tokens, context):
        nats.append(F.cross_entropy(logits.float(), targets, reduction="none"))
        if report:
            report(sum(map(len, nats)), len(tokens) - 1)
    return torch.cat(nats).double().cpu()


@torch.no_grad()
def predictions(forward: Forward, tokens: Tensor, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields logits (n, V), in the model's dtype, and the tokens (n,) that they predict, by window.

    All windows together predict each of tokens[1:] once.
    """
    half = context // 2
    for start in range(0, len(tokens) - 1, half):
        begin = max(0, start - half)
        window = tokens[begin : start + half + 1]
        logits = forward(window[None, :-1])
        yield logits[0, start - begin :], window[start - begin + 1 :]


def perplexity(nats: Tensor) -> float:
    """Perplexity: exp of the mean of nats (N,)."""
    return nats.mean().exp().item()
