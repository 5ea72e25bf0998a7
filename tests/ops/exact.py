"""Attention in float64 from its definition, and how far a kernel may be from it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The largest relative error of rounding to the dtype.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = tuple(UNIT)


def causal(queries: Tensor, keys: Tensor, window: int | None = None) -> Tensor:
    """(S, T): which of the positions `keys` a query at each of the positions `queries` sees."""
    behind = queries[:, None] - keys
    return (behind >= 0) & (behind < (window or math.inf))


@dataclass(frozen=True)
class Exact:
    """Attention in float64, and what the bounds of its errors are made of."""

    y: Tensor  # attention (B, H, S, D)
    mass: Tensor  # the same of the values' sizes
    small: Tensor  # the same of what float16 may lose of each weight below its normal numbers
    score: Tensor  # (B, H, S, 1): the largest sum of sizes, signs aside, of the terms of a score
    denominator: Tensor  # (B, H, S): the logarithm of the softmax's sum

    def check(
        self,
        y: Tensor,
        read: float = 0,
        roundings: int = 0,
        dtype: torch.dtype | None = None,
        beside: Tensor | float = 0,
    ) -> None:
        """`read`: relative error of a key or value as the kernel reads it. `roundings`: of weights
        or sums to the dtype on the way. `beside`: what else the kernel may be off by. The result is
        rounded once more.

        An error e of a score changes its weight by the share e, and the denominator by the same.
        A float32 score is off by D roundings of its terms' size at the most; sums over T, by fewer:
        64 of them are allowed, for most cancel.
        """
        dtype = dtype or y.dtype
        assert y.dtype == dtype and y.shape == self.y.shape
        steps = UNIT[dtype]
        relative = read + roundings * steps + 2 * read * self.score
        relative = relative + 64 * 2.0**-24 * (1 + self.score)
        allowed = steps * self.y.abs() + relative * self.mass + 2.0**-24 + beside
        if dtype == torch.float16:
            allowed = allowed + roundings * self.small
        error = (y.double() - self.y).abs()
        assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times what is allowed"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Exact:
    """query (B, H, S, D); key and value (B, K, T, D), head h reading h // (H // K); visible
    (S, T), or (B, 1, S, T) where rows differ. Every query sees something. sinks (H,):
    scores of one more position that all queries see, whose value is 0."""
    B, H, S, D = query.shape
    scale = 1 / math.sqrt(D) if scale is None else scale
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(H // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(B, -1, S, 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    # What nobody sees may hold anything, infinities too.
    value = value.masked_fill(~visible.expand(B, H, S, -1).any(2)[..., None], 0)
    sizes = (query.abs() @ key.abs().mT * scale).masked_fill(~visible, 0)
    largest, denominator = sizes.amax(-1, keepdim=True), scores.logsumexp(-1)
    small = (weights * (weights < 2.0**-14)).clamp(max=2.0**-25)
    made = (weights @ value, weights @ value.abs(), small @ value.abs())
    return Exact(*made, largest, denominator)
