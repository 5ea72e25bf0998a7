"""Decode attention over a KV cache on the CPU, in C++: each visible slot is read once.

It means what ops.reference.decode_attention means.
"""

import torch
from torch import Tensor

from ops.cpu import build
from ops.cpu.build import unavailable as unavailable  # why it cannot be used here, or None
from ops.kv import Stored

torch.library.define(
    "quantbench::cpu_decode_attention",
    "(Tensor query, Tensor key_codes, Tensor? key_scale, Tensor value_codes, Tensor? value_scale, "
    "Tensor first, Tensor count, str format) -> Tensor",
)


@torch.library.register_fake("quantbench::cpu_decode_attention")
def _(query, key_codes, key_scale, value_codes, value_scale, first, count, format):
    return query.new_empty(query.shape)


def decode_attention(
    query: Tensor, key: Stored, value: Stored, first: Tensor, count: Tensor
) -> Tensor:
    """Attention of one new token per row over the slots that its cache has filled.

    query (B, H, D), H up to 128 times the cache's K heads, D a multiple of 8 up to 256; first and
    count (B,) integers: row b sees the slots (first[b] + i) % T for i < count[b] (at least one).
    A cache's rows and heads may lie apart; a head's slots follow one another. Returns (B, H, D) in
    query's dtype; sums and softmax are float32. The first call of a process loads the kernel, and
    builds it if need be: KernelError if that fails, RuntimeError for other shapes or dtypes.
    """
    _ready()
    return torch.ops.quantbench.cpu_decode_attention(
        query,
        key.codes,
        key.scale,
        value.codes,
        value.scale,
        first.long(),
        count.long(),
        key.format,
    )


@torch.compiler.assume_constant_result
def _ready() -> bool:
    """Loading is no part of what the compiler traces."""
    build.load()
    return True
