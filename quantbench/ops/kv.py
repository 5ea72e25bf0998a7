"""The formats in which a KV cache stores keys and values, and in which decode attention reads them.

    dense   (B, K, T, D) numbers of the model's dtype
    int8    int8 codes (B, K, T, D), one scale (B, K, T, 1): code · scale
    fp8     float8_e4m3fn numbers (B, K, T, D), or their bits, uint8; one scale (B, K, T, 1)
    int4    two codes a byte, (B, K, T, D / 2) uint8, the first in the low bits, and a scale for
            every 32 of head_dim, (B, K, T, D / 32): (code - 8) · scale

for B rows, K key/value heads, T slots and D head_dim; scales have the model's dtype. A slot holds
one position; the cache decides which (kv_cache/).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantbench.ops.packing import unpack

INT4_GROUP = 32  # numbers of a head that share a scale
READ_BY_KERNELS = ("dense", "int8", "fp8", "int4")  # formats that the C++ and Triton kernels read
WRITTEN_BY_STEPS = ("dense", "int8", "fp8", "int4")  # that C++ writes: cpu/src/common/products.h


@dataclass(frozen=True)
class StoredCache:
    """The keys, or the values, of one layer as they are stored."""

    codes: Tensor
    scale: Tensor | None  # None for dense
    format: str  # dense, int8, fp8 or int4; every other format is codes · scale
    kernel: str = "torch"  # of ops/attention.py, for one query a row

    def slots(self, begin: int, end: int) -> "StoredCache":
        """The slots from `begin` up to `end`, without copying."""
        scale = None if self.scale is None else self.scale[:, :, begin:end]
        return StoredCache(self.codes[:, :, begin:end], scale, self.format)

    def gathered(self, slots: Tensor) -> "StoredCache":
        """A copy of the slots with these numbers, (S,) int64."""
        scale = None if self.scale is None else self.scale[:, :, slots]
        return StoredCache(self.codes[:, :, slots], scale, self.format)


@dataclass(frozen=True)
class Chunk:
    """The keys, or the values, of S positions of a prompt, and those of the positions before."""

    own: Tensor  # (B, K, S, D), encoded and decoded again: as later positions will read them
    past: StoredCache
    # What the chunk has overwritten in a sliding window's `past`: the first S (at most T) of the
    # last T positions before the chunk.
    overwritten: StoredCache | None = None


class Scoring(NamedTuple):
    """How attention scores positions."""

    scale: float | None = None  # of scores; None: 1/√D
    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    # (H,): for each head the score of a position whose value is 0, which all queries see
    # (https://arxiv.org/abs/2309.17453).
    sinks: Tensor | None = None


USUAL = Scoring()


def dequantize(stored: StoredCache, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers (B, K, T, D) in `dtype`, multiplied in float32 and rounded once."""
    if stored.scale is None:
        return stored.codes.to(dtype)
    if stored.format != "int4":
        codes = stored.codes.view(torch.float8_e4m3fn) if stored.format == "fp8" else stored.codes
        return (codes.float() * stored.scale.float()).to(dtype)
    numbers = unpack([stored.codes], 4).float() - 8
    groups = numbers.unflatten(-1, (-1, INT4_GROUP))
    return (groups * stored.scale.float()[..., None]).flatten(-2).to(dtype)
