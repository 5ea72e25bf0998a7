"""The gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), in plain torch.

A head has a matrix as its state, which maps keys to values. A token lets it decay, and replaces the
share beta of what it returns for the token's key by the token's value:

    state = exp(decay) · state
    state = state + key ⊗ beta · (value - key @ state)
    y = query @ state

A prompt is not read token by token. Within a chunk, what the tokens write depends linearly on what
earlier ones wrote: a triangular system, solved at once, and the rest are products of matrices.
"""

import torch
from torch import Tensor

CHUNK = 64  # tokens of a triangular system


def delta_rule(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """What S tokens read, (B, H, S, V), and the state behind them.

    state (B, H, K, V); query, key (B, H, S, K); value (B, H, S, V); decay, beta (B, H, S). decay is
    0 or negative. All in float32.
    """
    outputs = []
    pieces = (x.split(CHUNK, 2) for x in (query, key, value, decay, beta))
    for piece in zip(*pieces, strict=True):
        y, state = _chunk(state, *piece)
        outputs.append(y)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)), state


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """`delta_rule` of at most CHUNK tokens."""
    count = key.shape[2]
    since = decay.cumsum(-1)  # the state before the chunk decays by its exponential
    # How much of what token j wrote is left at token i: 0 above the diagonal.
    left = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
    both = torch.cat((key, query), 2)
    old_key, old_query = ((both * since.exp().repeat(1, 1, 2)[..., None]) @ state).chunk(2, 2)
    among_key, among_query = (both @ key.mT).chunk(2, 2)
    written = beta[..., None] * (value - old_key)
    if count > 1:
        system = beta[..., None] * among_key * left  # its diagonal is taken to be 1
        written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    y = old_query + (among_query * left) @ written
    last = since[..., -1:]
    keys = key * (last - since).exp()[..., None]
    return y, state * last.exp()[..., None] + keys.mT @ written
