"""What tests of decode attention share, whatever the kernel."""

import torch
from torch import Tensor

from quantbench.kv_cache import CACHES
from quantbench.ops.cpu import build
from quantbench.ops.kv import Stored, dequantize
from tests.ops.exact import Exact, attention

# Instruction sets in which the kernel multiplies bytes, and the multiples that head_dim has to be.
BYTE_PRODUCTS = {"avx512vnni": 1, "amx": 64}


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


def expected(query: Tensor, key: Stored, value: Stored, first: Tensor, count: Tensor) -> Exact:
    """Attention of one position, query (B, H, D), over what the codes mean: y is (B, H, 1, D)."""
    seen = visible(first, count, key.codes.shape[2])
    sides = (dequantize(side, torch.float64) for side in (key, value))
    return attention(query[:, :, None], *sides, seen[:, None, None])


def byte_products(
    format: str, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, exact: Exact
) -> Tensor | float:
    """What the CPU's kernel may be off by where it multiplies bytes: as the arguments of
    exact.attention, keys and values being what the codes mean.

    Queries and weights keep 15 bits of a head's largest number in a query, and of a block's largest
    weight: of 64 slots' errors, half of whom cancel the other half.
    """
    unit = BYTE_PRODUCTS.get(build.isa())
    fits = query.dtype == torch.bfloat16 and unit and query.shape[-1] % unit == 0
    if format not in ("int8", "int4") or not fits:
        return 0.0
    B, H, _, _ = query.shape
    flat = query.abs().amax(-1, keepdim=True).expand_as(query)
    score = attention(flat, keys, values, visible).score
    K, T = values.shape[1], values.shape[2]
    seen = visible.expand(B, H, -1, T).any(2).view(B, K, H // K, T).any(2)
    largest = values.abs().masked_fill(~seen[..., None], 0).amax((-2, -1))
    largest = largest.repeat_interleave(H // K, 1).view(B, H, 1, 1)
    return 2.0**-15 * (exact.mass * score + 8 * largest)
