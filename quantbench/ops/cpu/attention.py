"""Attention over a KV cache on the CPU, in C++, which reads the codes as they are stored.

decode_attention computes what ops.reference.decode_attention computes. past_attention is the
attention of a prompt's chunk to the positions before it.
"""

import torch
from torch import Tensor

from quantbench.ops.cpu import build
from quantbench.ops.kv import USUAL, Scoring, StoredCache

_ARGUMENTS = (
    "Tensor query, Tensor key_codes, Tensor? key_scale, Tensor value_codes, Tensor? value_scale, "
    "Tensor first, Tensor count, str format, float scale, float softcap"
)
torch.library.define("quantbench::cpu_decode_attention", f"({_ARGUMENTS}) -> Tensor")
torch.library.define("quantbench::cpu_past_attention", f"({_ARGUMENTS}) -> (Tensor, Tensor)")


@torch.library.register_fake("quantbench::cpu_decode_attention")
def _(query, *rest):
    return query.new_empty(query.shape)


@torch.library.register_fake("quantbench::cpu_past_attention")
def _(query, *rest):
    output = query.new_empty(query.shape, dtype=torch.float32)
    return output, output.new_empty(query.shape[:-1])


def decode_attention(
    query: Tensor,
    key: StoredCache,
    value: StoredCache,
    first: Tensor,
    count: Tensor,
    scoring: Scoring = USUAL,
) -> Tensor:
    """As ops.reference.decode_attention, for D a multiple of 8 up to 256 and at least one slot,
    without sinks.

    A cache of fewer rows has B divided by them queries for each row, one behind the other. The
    cache's rows and heads may have any stride; a head's slots must be contiguous. The first call in
    a process loads the C++ library, or builds it. Raises KernelError if that fails, RuntimeError
    for other shapes or dtypes.
    """
    arguments = _arguments(query, key, value, first, count, scoring)
    return torch.ops.quantbench.cpu_decode_attention(*arguments)


def past_attention(
    query: Tensor,
    key: StoredCache,
    value: StoredCache,
    first: Tensor,
    count: Tensor,
    scoring: Scoring = USUAL,
) -> tuple[Tensor, Tensor]:
    """Attention of several positions' queries over slots that all of them see.

    As decode_attention, for query (B, K · N, D): the N queries of whichever positions and heads
    read the same key head. Returns the output (B, K · N, D) and the logarithm of the softmax's
    denominator (B, K · N), both float32, so that attention over other slots can be joined to it.
    """
    arguments = _arguments(query, key, value, first, count, scoring)
    return torch.ops.quantbench.cpu_past_attention(*arguments)


def _arguments(query, key, value, first, count, scoring):
    build.ready()
    sides = key.codes, key.scale, value.codes, value.scale
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    return query, *sides, first.long(), count.long(), key.format, scale, scoring.softcap or 0.0
