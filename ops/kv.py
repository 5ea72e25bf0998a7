"""How a KV cache's keys or values lie in memory, and what they mean: what decode attention reads.

    dense   (B, K, T, D) numbers of the model's dtype
    int8    int8 codes (B, K, T, D), one scale (B, K, T, 1): code · scale
    fp8     float8_e4m3fn numbers (B, K, T, D), one scale (B, K, T, 1)
    int4    two codes a byte, (B, K, T, D / 2) uint8, the first in the low bits, and a scale for
            every 32 of head_dim, (B, K, T, D / 32): (code - 8) · scale

for B rows, K key/value heads, T slots and D head_dim; scales have the model's dtype. A slot holds a
position; which one is the cache's business (kv_cache/).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.packing import unpack

INT4_GROUP = 32


@dataclass(frozen=True)
class Stored:
    """Keys, or values, of one layer as they are stored."""

    codes: Tensor
    scale: Tensor | None
    format: str

    def slots(self, begin: int, end: int) -> "Stored":
        """Those from `begin` up to `end`, without copying."""
        scale = None if self.scale is None else self.scale[:, :, begin:end]
        return Stored(self.codes[:, :, begin:end], scale, self.format)


def dequantize(stored: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, K, T, D) in `dtype`; products are taken in float32, and rounded once."""
    if stored.scale is None:
        return stored.codes.to(dtype)
    if stored.format != "int4":
        return (stored.codes.float() * stored.scale.float()).to(dtype)
    numbers = unpack([stored.codes], 4).float() - 8
    groups = numbers.unflatten(-1, (-1, INT4_GROUP))
    return (groups * stored.scale.float()[..., None]).flatten(-2).to(dtype)
