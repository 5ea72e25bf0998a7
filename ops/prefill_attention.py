"""Attention of a chunk of new positions over what a cache holds, and over the chunk itself.

A prompt goes through the model in chunks, and a chunk over the cache in blocks: so memory grows
with a chunk's size times a block's, whatever the cache's capacity and however much of it is filled.
What each block gives is joined by the logarithm of its softmax's denominator (Milakov and
Gimelshein 2018; Dao et al. 2022, section 3.1).
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.kv import Stored, dequantize

BLOCK = 4096  # slots of the cache at a time


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Stored,
    past_value: Stored,
    start: int,
    window: int | None = None,
) -> Tensor:
    """Causal attention of S queries at positions start, start + 1, …

    query (B, H, S, D), key and value (B, K, S, D) in query's dtype, H a multiple of K. The past
    (B, K, T, …) holds position p < start in slot p % T, the last T of them if there are more. With
    a `window` a query sees only the last `window` positions, its own included. Returns (B, H, S, D)
    in query's dtype.

    It is an op of its own: how many blocks there are is known only when it runs.
    """
    return torch.ops.quantbench.chunk_attention(
        query,
        key,
        value,
        past_key.codes,
        past_key.scale,
        past_value.codes,
        past_value.scale,
        past_key.format,
        start,
        window,
    )


@torch.library.custom_op(
    "quantbench::chunk_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor past_key, Tensor? key_scale, "
    "Tensor past_value, Tensor? value_scale, str format, SymInt start, SymInt? window) -> Tensor",
)
def _chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    key_scale: Tensor | None,
    past_value: Tensor,
    value_scale: Tensor | None,
    format: str,
    start: int,
    window: int | None,
) -> Tensor:
    B, H, S, D = query.shape
    K = key.shape[1]
    if start == 0 and query.device.type != "cpu" and (window is None or S <= window):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=H > K
        ).contiguous()
    past = Stored(past_key, key_scale, format), Stored(past_value, value_scale, format)
    # The heads that share a key head are folded into the positions: nothing is repeated.
    folded = query.reshape(B, K, H // K * S, D)
    output, denominator = _attention(folded, key, value, _causal(query, S, window))
    if start > 0:
        output = output.float()
    for keys, values, positions in _blocks(*past, start, query.dtype):
        mask = None if window is None else _within(query, positions, start, S, window)
        more, further = _attention(folded, keys, values, mask)
        total = torch.logaddexp(denominator, further)
        output = output * (denominator - total).exp()[..., None]
        output += more.float() * (further - total).exp()[..., None]
        denominator = total
    return output.to(query.dtype).reshape(B, H, S, D).contiguous()


@_chunk_attention.register_fake
def _(query, key, value, past_key, key_scale, past_value, value_scale, format, start, window):
    return query.new_empty(query.shape)


def _blocks(
    key: Stored, value: Stored, start: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Keys and values of what the cache holds, and their positions, block by block."""
    T = key.codes.shape[2]
    filled = min(start, T)
    for begin in range(0, filled, BLOCK):
        end = min(begin + BLOCK, filled)
        slots = torch.arange(begin, end, device=key.codes.device)
        positions = start - 1 - (start - 1 - slots) % T
        sides = (dequantize(side.slots(begin, end), dtype) for side in (key, value))
        yield *sides, positions


def _causal(query: Tensor, S: int, window: int | None) -> Tensor:
    """(H · S / K, S): what the chunk's queries see of the chunk."""
    positions = torch.arange(S, device=query.device)
    mask = positions <= positions[:, None]
    if window is not None:
        mask &= positions > positions[:, None] - window
    return mask


def _within(query: Tensor, positions: Tensor, start: int, S: int, window: int) -> Tensor:
    """(S, N): which of these earlier positions are in the window of each query."""
    own = torch.arange(start, start + S, device=query.device)
    return positions > own[:, None] - window


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of query (B, K, G · S, D), and the logarithm of its softmax's denominator
    (B, K, G · S), over key and value (B, K, N, D). A mask (S, N) holds for each of the G heads."""
    if mask is not None:
        mask = mask.repeat(query.shape[2] // mask.shape[0], 1)
    return (_flash if query.device.type == "cpu" else _plain)(query, key, value, mask)


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """On the CPU."""
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    output, denominator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=bias
    )
    if mask is not None:  # it says 0 of a query that sees nothing
        denominator = denominator.masked_fill(~mask.any(-1), -math.inf)
    return output, denominator


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """On any device. In 16 bits a product could be infinite, and a large score would be off by so
    much that its weight is: so they are float32."""
    scores = (query.float() / math.sqrt(query.shape[-1])) @ key.float().mT
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf)
    denominator = scores.logsumexp(-1)
    weights = (scores - denominator[..., None]).exp().nan_to_num(nan=0.0)
    return weights.to(value.dtype) @ value, denominator
