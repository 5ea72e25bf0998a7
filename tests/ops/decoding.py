"""What tests of decode attention share, whatever the kernel."""

import torch
from torch import Tensor

from kv_cache import CACHES
from ops.kv import Stored, dequantize
from tests.ops import exact


def stored(x: Tensor, format: str, spare_rows: int = 0) -> Stored:
    """Keys or values (B, K, T, D) as a cache keeps them, in the first rows of a larger one."""
    B, K, T, D = x.shape
    cache = CACHES[format](B + spare_rows, K, T, D, x.dtype, x.device)
    cache.update(torch.arange(T, device=x.device), x, x)
    return cache.stored("key", B)


def visible(first: Tensor, count: Tensor, T: int) -> Tensor:
    """(B, T): the slots (first[b] + i) % T for i < count[b]."""
    slots = torch.arange(T, device=first.device)
    return (slots - first[:, None]) % T < count[:, None]


def expected(
    query: Tensor, key: Stored, value: Stored, first: Tensor, count: Tensor
) -> exact.Exact:
    """Attention of one position, query (B, H, D), over what the codes mean: y is (B, H, 1, D)."""
    seen = visible(first, count, key.codes.shape[2])
    sides = (dequantize(side, torch.float64) for side in (key, value))
    return exact.attention(query[:, :, None], *sides, seen[:, None, None])
