"""Causal attention, wherever keys and values are: in tensors, or in a KV cache."""

import torch
from torch import Tensor

from quantbench.ops import reference
from quantbench.ops.attention import decode_attention
from quantbench.ops.kv import Chunk, Stored
from quantbench.ops.prefill_attention import chunk_attention


def attend(
    query: Tensor,
    key: Tensor | Stored | Chunk,
    value: Tensor | Stored | Chunk,
    positions: Tensor,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of S queries to all keys at their own position and before; (B, H, S, D).

    query (B, H, S, D), H a multiple of K. key and value: those of the same positions, (B, K, S, D),
    or what KVCache.update returned for them. positions (S,) int64, consecutive; of a prompt they
    are best on the CPU, for the first is read. window: only the last so many positions are seen,
    the query's own included. scale: of scores; 1/√D if not given. softcap: scores become softcap ·
    tanh(score / softcap). sinks (H,): for each head the score of a position whose value is 0, which
    all queries see (https://arxiv.org/abs/2309.17453). The result has query's dtype.
    """
    how = window, scale, softcap
    if isinstance(key, Stored):  # one position: filled slots alone are read, once for all heads
        rows, slots = query.shape[0], key.codes.shape[2]
        end = positions.to(query.device, non_blocking=True) + 1
        count = end.clamp(max=min(slots, window or slots))
        first = torch.zeros_like(end) if window is None else (end - count) % slots
        places = first.expand(rows), count.expand(rows)
        y = decode_attention(key.kernel, query[:, :, 0], key, value, *places, scale, softcap, sinks)
        return y[:, :, None]
    if isinstance(key, Chunk):
        return chunk_attention(
            query, key.own, value.own, key.past, value.past, positions, *how,
            key.overwritten, value.overwritten, sinks,
        )  # fmt: skip
    positions = positions.to(query.device, non_blocking=True)
    return reference.attention(query, key, value, positions, positions, *how, sinks)
