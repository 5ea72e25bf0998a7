"""Causal attention, wherever keys and values are: in tensors, or in a KV cache.

A chunk of a prompt attends to itself and to the positions before it, which are in a cache. On the
CPU the C++ kernel of decode attention reads them as they are stored; to it the chunk's positions
are so many more queries. On other devices, and without that kernel, the cache is dequantized in
blocks, which flash attention reads where there is one. So the memory needed grows with the chunk's
size times a block's, not with the cache's. The results for all parts are joined by the logarithms
of their softmax denominators (Milakov and Gimelshein 2018; Dao et al. 2022, section 3.1).
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.ops import reference
from quantbench.ops.attention import choose, decode_attention
from quantbench.ops.kv import USUAL, Chunk, Scoring, StoredCache, dequantize
from quantbench.ops.reference import folded_sinks, visible, with_denominator, with_sinks

BLOCK = 4096  # positions that are dequantized at a time


def attend(
    query: Tensor,
    key: Tensor | StoredCache | Chunk,
    value: Tensor | StoredCache | Chunk,
    positions: Tensor,
    window: int | None = None,
    scoring: Scoring = USUAL,
) -> Tensor:
    """Attention of S queries to all keys at their own position and before; (B, H, S, D).

    query (B, H, S, D), H a multiple of K. key and value: those of the same positions, (B, K, S, D),
    or what KVCache.update returned for them. positions (S,) int64, consecutive; of a prompt they
    are best on the CPU, for the first is read. window: only the last so many positions are seen,
    the query's own included. The result has query's dtype.
    """
    if isinstance(key, StoredCache) and key.kernel == "triton":
        from quantbench.ops.triton import attention as on_card

        at = positions.to(query.device, non_blocking=True)
        past = key, value, None, at, scoring, window
        return on_card.decode_attention(query[:, :, 0], *past)[:, :, None]
    if isinstance(key, StoredCache):  # one position: only filled slots are read, once for all heads
        rows, slots = query.shape[0], key.codes.shape[2]
        end = positions.to(query.device, non_blocking=True) + 1
        count = end.clamp(max=min(slots, window or slots))
        first = torch.zeros_like(end) if window is None else (end - count) % slots
        places = first.expand(rows), count.expand(rows)
        y = decode_attention(key.kernel, query[:, :, 0], key, value, *places, scoring)
        return y[:, :, None]
    if isinstance(key, Chunk):
        past = key.past.codes, key.past.scale, value.past.codes, value.past.scale, key.past.format
        overwritten = (None,) * 4
        if key.overwritten is not None and value.overwritten is not None:
            sides = key.overwritten, value.overwritten
            overwritten = [tensor for side in sides for tensor in (side.codes, side.scale)]
        arguments = (
            query,
            key.own,
            value.own,
            *past,
            positions,
            window,
            scoring.scale,
            scoring.softcap,
        )
        return torch.ops.quantbench.chunk_attention(*arguments, *overwritten, scoring.sinks)
    return reference.attention(query, key, value, window, scoring)


# ---------------------------------------------------------------------------- a prompt's chunk


torch.library.define(
    "quantbench::chunk_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor past_key, Tensor? key_scale, "
    "Tensor past_value, Tensor? value_scale, str format, Tensor positions, int? window, "
    "float? scale, float? softcap, Tensor? old_key, Tensor? old_key_scale, Tensor? old_value, "
    "Tensor? old_value_scale, Tensor? sinks=None) -> Tensor",
)


@torch.library.impl("quantbench::chunk_attention", "default")
def _chunk_attention(
    query, key, value, past_key, key_scale, past_value, value_scale, format, positions, window,
    scale, softcap, old_key, old_key_scale, old_value, old_value_scale, sinks=None,
):  # fmt: skip
    """The past (B, K, T, …) holds position p < start in slot p % T, the last T of them if there are
    more. Where it holds the chunk by now, `old` is what stood there: positions start - T, start - T
    + 1, … It is an opaque op, because the number of blocks is known only when it runs."""
    B, H, S, D = query.shape
    K, start, scoring = key.shape[1], int(positions[0]), Scoring(scale, softcap)
    all_seen = window is None or S <= window
    plain = all_seen and softcap is None and sinks is None
    if start == 0 and query.device.type != "cpu" and plain:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=H > K, scale=scale
        ).contiguous()
    # The query heads that share a key head are folded into the positions, so no key is repeated.
    folded = query.reshape(B, K, H // K * S, D)
    if _card_takes(query) and all_seen and softcap is None:
        sides = (side.repeat_interleave(H // K, 1) for side in (key, value))  # only the chunk's
        of_chunk, denominator = _flash_on_card(query, *sides, is_causal=True, scale=scale)
        of_chunk, denominator = (
            of_chunk.reshape(folded.shape),
            denominator.reshape(folded.shape[:-1]),
        )
    else:
        at = torch.arange(S, device=query.device)
        of_chunk, denominator = _attention(folded, key, value, visible(at, at, window), scoring)
    output = of_chunk.float()
    past = StoredCache(past_key, key_scale, format), StoredCache(past_value, value_scale, format)
    old = None
    if old_key is not None and old_value is not None:
        old = (
            StoredCache(old_key, old_key_scale, format),
            StoredCache(old_value, old_value_scale, format),
        )
    for part, part_denominator in _over_past(folded, past, old, start, S, window, scoring):
        total = torch.logaddexp(denominator, part_denominator)
        output = output * (denominator - total).exp()[..., None]
        output += part.float() * (part_denominator - total).exp()[..., None]
        denominator = total
    output = with_sinks(output, denominator, folded_sinks(sinks, K, S))
    return output.to(query.dtype).reshape(B, H, S, D).contiguous()


@torch.library.register_fake("quantbench::chunk_attention")
def _(query, *rest):
    return query.new_empty(query.shape)


Sides = tuple[StoredCache, StoredCache]  # keys and values


def _over_past(
    query: Tensor,
    past: Sides,
    old: Sides | None,
    start: int,
    S: int,
    window: int | None,
    scoring: Scoring,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention of query (B, K, G · S, D), at S positions from `start` on, to the earlier
    positions.

    Yields for one part of these positions after another the output (B, K, G · S, D) and the
    logarithm of the softmax denominator (B, K, G · S).
    """
    T = past[0].codes.shape[2]
    oldest = start - min(start, T)
    seen_by_all = oldest  # the first position that is in the window of every query
    if window is not None:
        oldest = max(oldest, start + 1 - window)
        seen_by_all = min(max(oldest, start + S - window), start)
    # A kernel that reads the cache as it is stored takes any number of queries per key head.
    kernel = choose(query.device, query.shape[-1], 1, query.dtype, past[0].format)
    reads_codes = kernel.name == "cpu"
    if seen_by_all < start and reads_codes:
        yield _over_slots(query, past, seen_by_all % T, start - seen_by_all, scoring)
    # The chunk overwrites just those positions that not all of its queries see.
    first = 0 if old is None else start - T
    blocks = _blocks(old or past, first, oldest, seen_by_all, query.dtype)
    for keys, values, begin in blocks:
        of_queries = torch.arange(start, start + S, device=query.device)
        positions = torch.arange(begin, begin + keys.shape[2], device=query.device)
        yield _attention(query, keys, values, visible(of_queries, positions, window), scoring)
    if not reads_codes:
        for keys, values, _ in _blocks(past, 0, seen_by_all, start, query.dtype):
            yield _attention(query, keys, values, None, scoring)


def _over_slots(
    query: Tensor, past: Sides, first: int, count: int, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attention of query (B, K, N, D), and the logarithm of its softmax's denominator (B, K, N),
    over the slots (first + i) % T for i < count, by the C++ kernel."""
    from quantbench.ops.cpu.attention import past_attention

    B, K, N, D = query.shape
    slots = (torch.full((B,), number) for number in (first, count))
    folded = query.reshape(B, K * N, D)
    output, denominator = past_attention(folded, *past, *slots, scoring)
    return output.view(B, K, N, D), denominator.view(B, K, N)


def _blocks(
    sides: Sides, first: int, begin: int, end: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Keys and values of the positions from `begin` up to `end` in blocks, and each block's first
    position. first: the position in slot 0, a multiple of all slots off."""
    T = sides[0].codes.shape[2]
    while begin < end:
        slot = (begin - first) % T
        count = min(BLOCK, end - begin, T - slot)
        keys, values = (dequantize(side.slots(slot, slot + count), dtype) for side in sides)
        yield keys, values, begin
        begin += count


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attention of query (B, K, G · S, D), and the logarithm of its softmax's denominator
    (B, K, G · S), over key and value (B, K, N, D). A mask (S, N) holds for each of the G heads."""
    if mask is None and scoring.softcap is None and _card_takes(query):
        return _flash_on_card(query, key, value, is_causal=False, scale=scoring.scale)
    if mask is not None:
        mask = mask.repeat(query.shape[2] // mask.shape[0], 1)
    if query.device.type == "cpu" and scoring.softcap is None:
        return _flash(query, key, value, mask, scoring.scale)
    return with_denominator(query, key, value, mask, scoring)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of a prompt on the CPU."""
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    output, denominator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=bias, scale=scale
    )
    if mask is not None:  # the op returns 0 for a query that attends to no position
        denominator = denominator.masked_fill(~mask.any(-1), -math.inf)
    return output, denominator


def _card_takes(query: Tensor) -> bool:
    """Whether torch's flash attention for CUDA takes these queries: from compute capability 8.0 on,
    16-bit dtypes, head dims up to 256 that are multiples of 8."""
    device, D = query.device, query.shape[-1]
    if device.type != "cuda" or query.dtype == torch.float32 or D % 8 or D > 256:
        return False
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _flash_on_card(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """On a card, as many key heads as query heads and no mask. Scores stay on the chip, which
    otherwise are as large as the chunk times the block, for each head, several times over."""
    output, denominator, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, is_causal=is_causal, scale=scale
    )
    return output, denominator
