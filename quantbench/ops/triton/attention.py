"""Decode attention over a KV cache in Triton: what ops.reference.decode_attention means.

A program has all query heads of one key head, and one of several even shares of the slots that its
row has filled: so every byte is read once, by whichever processors are free, however long the cache
may be. A second kernel joins the shares, in the order of the slots: the bits of a result depend on
shapes and the device alone. `first` and `count` are read on the device, and launches depend on
shapes only, so that a CUDA graph holds them at every depth.

Codes are widened in registers. Their scales multiply scores, and the softmax's weights, not
numbers. int4 has a scale for every 32 numbers of head_dim, so there a query head stands in as many
rows of the products as it has groups, each with zeros outside its own; where few heads share a key
head those rows are ones that tensor cores would have padded.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantbench.ops.kv import INT4_GROUP, USUAL, Scoring, StoredCache
from quantbench.ops.triton.kv import load_scales, numbers
from quantbench.ops.triton.values import zeros

# Shares are multiples of this many slots, for tensor cores take no fewer.
SHARE = 16
# Keys, or values, of a tile: this many bytes, so that a processor holds several programs' tiles.
TILE = 8192
# Rows of a product at the most: with fewer, more programs read the same slots. float32 runs on
# ordinary cores, which take a product's whole operands into registers; 64 rows of a head_dim beyond
# 128 do not fit into the 99 KB of shared memory of compute capability 8.6, 8.9 and 12.0.
ROWS = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 64}
WIDE_ROWS = 32
LOG2_E = math.log2(math.e)
# Processors assumed in Triton's interpreter, which has no device.
INTERPRETED = 3

_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_BITS = {"int8": 8, "fp8": 8, "int4": 4}  # of a code
_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def decode_attention(
    query: Tensor,
    key: StoredCache,
    value: StoredCache,
    first: Tensor | None,
    count: Tensor,
    scoring: Scoring = USUAL,
    window: int | None = None,
) -> Tensor:
    """As ops.reference.decode_attention, for H up to 128 times the cache's K heads, D a multiple of
    8 up to 256 and at least one slot.

    A cache's rows and heads may lie apart; a head's slots follow one another. Products are of the
    cache's numbers, as they are, with queries and weights rounded to query's dtype, or to float16
    where codes are 8 or 4 bits wide.

    first None: count (1,) is the position of all rows, of which the last `window` slots are seen,
    or all. Then nothing has to be computed from it in each layer, by launches of their own.
    """
    sides = key.codes, key.scale, value.codes, value.scale
    how = key.format, scoring.scale, scoring.softcap, scoring.sinks, window
    return torch.ops.quantbench.triton_decode_attention(query, *sides, first, count, *how)


@torch.library.custom_op(
    "quantbench::triton_decode_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key_codes, Tensor? key_scale, Tensor value_codes, "
    "Tensor? value_scale, Tensor? first, Tensor count, str format, float? scale=None, "
    "float? softcap=None, Tensor? sinks=None, int? window=None) -> Tensor",
)
def triton_decode_attention(
    query, key_codes, key_scale, value_codes, value_scale, first, count, format,
    scale=None, softcap=None, sinks=None, window=None,
):  # fmt: skip
    B, H, D = query.shape
    K, T = key_codes.shape[1:3]
    query = query if query.stride(-1) == 1 else query.contiguous()
    blocks = _blocks(H // K, D, query.dtype, format)
    key, value = (_words(codes, format, blocks["UNIT"]) for codes in (key_codes, value_codes))
    tiles = triton.cdiv(H // K, blocks["HEADS"])
    programs = _processors(query.device) * _programs(blocks, D, query.dtype)
    shares = min(max(1, programs // (B * K * tiles)), triton.cdiv(T, SHARE))
    parts = query.new_empty((B, H, shares, D), dtype=torch.float32)
    sizes = query.new_empty((B, H, shares), dtype=torch.float32)
    y = query.new_empty((B, H, D))
    factor = 1 / math.sqrt(D) if scale is None else scale
    strides = (0, 0) if first is None else (first.stride(0), count.stride(0))
    with torch.cuda.device_of(query):
        _share_kernel[(shares, K * tiles, B)](
            query,
            key,
            key_scale,
            value,
            value_scale,
            first,
            count,
            parts,
            sizes,
            T,
            *strides,
            *query.stride()[:2],
            *_strides(key, key_scale),
            *_strides(value, value_scale),
            factor * (1 if softcap else LOG2_E),
            (softcap or 0.0) * LOG2_E,
            2 * LOG2_E / softcap if softcap else 0.0,
            WINDOW=window or 0,
            CAPPED=softcap is not None,
            FORMAT=format,
            GROUP=H // K,
            D=D,
            TILES=tiles,
            NATIVE_FP8=_has_fp8(query.device),
            **blocks,
        )
        _join_kernel[(H, B)](
            parts,
            sizes,
            first,
            count,
            sinks,
            y,
            T,
            strides[1],
            D=D,
            WINDOW=window or 0,
            BLOCK_D=triton.next_power_of_2(D),
            SHARES=shares,
            BLOCK_S=triton.next_power_of_2(shares),
            AT_ONCE=4096 // triton.next_power_of_2(D),  # 32 numbers a thread
        )
    return y


@triton_decode_attention.register_fake
def _(query, *rest, **named):
    return query.new_empty(query.shape)


def _words(codes: Tensor, format: str, unit: int) -> Tensor:
    """Codes as words that hold `unit` of them each; dense numbers as they are."""
    return codes.view(_WORDS[unit * _BITS[format]]) if format in _BITS else codes


def _strides(codes: Tensor, scale: Tensor | None) -> tuple[int, int, int, int]:
    """The strides of codes and of scales, from row to row and from head to head."""
    apart = (0, 0) if scale is None else scale.stride()[:2]
    return (*codes.stride()[:2], *apart)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    """Whether one instruction turns E4M3 into float16. AMD's cards, which are "cuda" with a
    capability of 9.4 too, have another format of 8 bits (e4m3fnuz)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _blocks(group: int, D: int, dtype: torch.dtype, format: str) -> dict[str, Any]:
    """Tiles of a program: (HEADS · GROUPS, columns) of queries, (SLOTS, columns) of words."""
    groups = triton.next_power_of_2(D // INT4_GROUP) if format == "int4" else 1
    rows = ROWS[dtype] if D <= 128 else min(WIDE_ROWS, ROWS[dtype])
    heads = min(rows // groups, max(16 // groups, triton.next_power_of_2(group)))
    unit = _unit(D, _BITS[format], heads * groups) if format in _BITS else 1
    columns = max(16, triton.next_power_of_2(D // unit))
    numbers = torch.float16 if dtype == torch.bfloat16 and format != "dense" else dtype
    slots = TILE * 8 // (columns * unit * _BITS.get(format, dtype.itemsize * 8))
    slots = min(max(32, slots), 2048 // (heads * groups))
    if dtype == torch.float32:
        slots = 32 if D <= 128 else 16
    interpreted = not isinstance(_share_kernel, triton.JITFunction)
    return {
        "HEADS": heads,
        "GROUPS": groups,
        "UNIT": unit,
        "BLOCK_J": columns,
        "SLOTS": slots,
        "NUMBERS": _TRITON[numbers],
        # numpy has no bfloat16, and Triton's interpreter would multiply its bits as integers.
        "OPERANDS": tl.float32 if interpreted else _TRITON[numbers],
        # float16 has the most to give where weights reach up to 2^14, and queries too.
        "LARGEST": 14 if numbers == torch.float16 else 0,
        "num_warps": 4,
        "num_stages": 2 if dtype == torch.float32 else 3,
    }


def _programs(blocks: dict[str, Any], D: int, dtype: torch.dtype) -> int:
    """How many programs a processor has registers and shared memory for: as many as will all run
    at once, for one more would begin when the others are done. Counted in what Triton 3.9 makes for
    sm_80 and sm_90."""
    small = blocks["HEADS"] * blocks["GROUPS"] == 16 and dtype != torch.float32
    return 3 if small and (D <= 128 or blocks["UNIT"] > 1) else 2


def _unit(D: int, bits: int, rows: int) -> int:
    """Columns of a word: of the widest words of which a row has the 32 that four warps share, and
    more than products have rows, for else warps would share those and all widen the same words."""
    for width in (32, 16):
        if triton.next_power_of_2(D * bits // width) >= max(32, 2 * rows):
            return width // bits
    return 8 // bits


@triton.jit
def _share_kernel(
    query,  # (B, H, D)
    key,  # (B, K, T, columns) words
    key_scale,  # (B, K, T, groups)
    value,
    value_scale,
    first,  # (B,)
    count,
    parts,  # (B, H, shares, D) float32
    sizes,  # (B, H, shares) float32
    T,
    first_row,  # strides
    count_row,
    query_row,
    query_head,
    key_row,
    key_head,
    key_scale_row,
    key_scale_head,
    value_row,
    value_head,
    value_scale_row,
    value_scale_head,
    factor,
    cap,
    steep,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    TILES: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_J: tl.constexpr,
    SLOTS: tl.constexpr,
    NUMBERS: tl.constexpr,
    OPERANDS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """What a share of a row's slots adds to HEADS heads, over the sum of its weights, and that
    sum's logarithm to base 2."""
    COLUMNS: tl.constexpr = D // UNIT
    SCALES: tl.constexpr = D // 32 if FORMAT == "int4" else 1
    share = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    kv_head = (tl.program_id(1) // TILES).to(tl.int64)
    filled, span = _span(first, count + row * count_row, T, WINDOW, tl.num_programs(0))
    begin = share * span
    end = tl.minimum(begin + span, filled)
    if begin >= end:
        return
    oldest = 0
    if first is not None:
        oldest = (tl.load(first + row * first_row) % T).to(tl.int32)
        oldest = tl.where(oldest < 0, oldest + T, oldest)
    elif WINDOW > 0:
        oldest = ((tl.load(count) + 1 - filled) % T).to(tl.int32)
    key += row * key_row + kv_head * key_head
    value += row * value_row + kv_head * value_head
    if FORMAT != "dense":
        key_scale += row * key_scale_row + kv_head * key_scale_head
        value_scale += row * value_scale_row + kv_head * value_scale_head

    # Rows of products: (head, group), and of a head in a group only the group's own columns.
    r = tl.arange(0, HEADS * GROUPS)
    head = (tl.program_id(1) % TILES) * HEADS + r // GROUPS
    j = tl.arange(0, BLOCK_J)
    group = r % GROUPS
    own = (head < GROUP)[:, None] & (j < COLUMNS)[None, :]
    if GROUPS > 1:
        own &= group[:, None] == (j * UNIT // 32)[None, :]
    query += row * query_row + (kv_head * GROUP + head)[:, None] * query_head
    factors = tl.full([HEADS], 1.0, tl.float32) * factor
    queries = ()
    for u in tl.static_range(UNIT):
        queries = queries + (tl.load(query + (j * UNIT + u)[None, :], own, other=0),)
    if LARGEST > 0 and FORMAT != "dense":
        queries, inverse = _as_float16(queries, HEADS, GROUPS, UNIT, LARGEST)
        factors *= inverse

    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.full([HEADS], 0.0, tl.float32)
    sums = zeros([HEADS * GROUPS, BLOCK_J], UNIT)
    g = tl.arange(0, GROUPS)
    for start in range(begin, end, SLOTS):
        i = start + tl.arange(0, SLOTS)
        seen = i < end
        slot = oldest + i
        slot = tl.where(slot >= T, slot - T, slot).to(tl.int64)
        places = slot[:, None] * COLUMNS + j[None, :]
        inside = seen[:, None]
        if BLOCK_J > COLUMNS:
            inside = inside & (j < COLUMNS)[None, :]

        words = tl.load(key + places, inside, other=0)
        scores = tl.full([HEADS * GROUPS, SLOTS], 0.0, tl.float32)
        for u in tl.static_range(UNIT):
            keys = tl.trans(numbers(words, u, FORMAT, NUMBERS, NATIVE_FP8).to(OPERANDS))
            scores = tl.dot(queries[u].to(OPERANDS), keys, scores, input_precision="ieee")
        if FORMAT != "dense":
            scale = load_scales(key_scale, slot, seen, g, SCALES)
            if GROUPS > 1:
                scores = tl.reshape(scores, [HEADS, GROUPS, SLOTS])
                scores = tl.sum(scores * scale[None, :, :], 1)
            else:
                scores *= scale[None, :]
        scores *= factors[:, None]
        if CAPPED:  # softcap · tanh(score / softcap), times log2(e)
            scores = cap - 2 * cap / (tl.exp2(scores * steep) + 1)
        scores = tl.where(seen[None, :], scores, float("-inf"))

        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - (higher - LARGEST)[:, None])
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
        shrink = _per_row(shrink, GROUPS)[:, None]

        words = tl.load(value + places, inside, other=0)
        largest = 1.0
        if FORMAT != "dense":
            scale = load_scales(value_scale, slot, seen, g, SCALES)
            largest = tl.max(tl.abs(scale), len(scale.shape) - 1)
            largest = tl.where(largest > 0, largest, 1.0)  # so that weights stay within float16
            if GROUPS > 1:
                scale = scale / largest[:, None]
                weights = weights[:, None, :] * scale[None, :, :]
                weights = tl.reshape(weights, [HEADS * GROUPS, SLOTS])
                largest = tl.broadcast_to(largest[None, :], [HEADS, GROUPS])
                largest = tl.reshape(largest, [HEADS * GROUPS])[:, None]
            else:
                weights *= (scale / largest)[None, :]
        weights = weights.to(NUMBERS).to(OPERANDS)
        last_sums = sums
        sums = ()
        for u in tl.static_range(UNIT):
            values = numbers(words, u, FORMAT, NUMBERS, NATIVE_FP8).to(OPERANDS)
            added = tl.dot(weights, values, input_precision="ieee")
            sums = sums + (last_sums[u] * shrink + added * largest,)

    place = ((row * (tl.num_programs(1) // TILES) + kv_head) * GROUP + head) * tl.num_programs(0)
    place += share
    divisor = _per_row(total, GROUPS)[:, None]
    for u in tl.static_range(UNIT):
        column = (j * UNIT + u)[None, :]
        tl.store(parts + place[:, None] * D + column, sums[u] / divisor, own)
    size = _per_row(highest - LARGEST + tl.log2(total), GROUPS)
    tl.store(sizes + place, size, (head < GROUP) & (group == 0))


@triton.jit
def _join_kernel(
    parts,  # (B, H, SHARES, D) float32
    sizes,  # (B, H, SHARES) float32
    first,
    count,  # (B,)
    sinks,  # (H,), natural logarithms
    y,  # (B, H, D)
    T,
    count_row,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A head's shares, each by the sum of its weights."""
    row = tl.program_id(1).to(tl.int64)
    place = row * tl.num_programs(0) + tl.program_id(0)
    filled, span = _span(first, count + row * count_row, T, WINDOW, SHARES)
    used = tl.cdiv(filled, span)
    parts += place * SHARES * D
    sizes += place * SHARES
    every = tl.arange(0, BLOCK_S)
    highest = tl.max(tl.load(sizes + every, every < used, other=float("-inf")), 0)
    beside = 0.0
    if sinks is not None:
        sink = tl.load(sinks + tl.program_id(0)).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
        beside = tl.exp2(sink - highest)
    d = tl.arange(0, BLOCK_D)
    total = tl.full([AT_ONCE], 0.0, tl.float32)
    sums = tl.full([AT_ONCE, BLOCK_D], 0.0, tl.float32)
    for start in range(0, used, AT_ONCE):
        s = start + tl.arange(0, AT_ONCE)
        weight = tl.exp2(tl.load(sizes + s, s < used, other=float("-inf")) - highest)
        inside = (s < used)[:, None] & (d < D)[None, :]
        part = tl.load(parts + s[:, None] * D + d[None, :], inside, other=0)
        total += weight
        sums += weight[:, None] * part
    result = tl.sum(sums, 0)
    tl.store(y + place * D + d, result / (tl.sum(total, 0) + beside), d < D)


@triton.jit
def _span(first, count, T, WINDOW: tl.constexpr, shares):
    """How many slots a row has filled, and how many of them make a share."""
    filled = tl.load(count)
    if first is None:
        filled += 1
    if WINDOW > 0:
        filled = tl.minimum(filled, WINDOW)
    filled = tl.minimum(filled, T).to(tl.int32)
    return filled, tl.maximum(tl.cdiv(tl.cdiv(filled, shares), 16), 1) * 16


@triton.jit
def _as_float16(
    queries, HEADS: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr, LARGEST: tl.constexpr
):
    """Queries as float16, without rounding: times powers of two that bring every head's largest
    number to between 2^LARGEST and twice that; and what undoes it."""
    largest = tl.max(tl.abs(queries[0].to(tl.float32)), 1)
    for u in tl.static_range(1, UNIT):
        largest = tl.maximum(largest, tl.max(tl.abs(queries[u].to(tl.float32)), 1))
    largest = tl.max(tl.reshape(largest, [HEADS, GROUPS]), 1)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, LARGEST + 1), 253)
    by = ((254 + LARGEST - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - LARGEST) << 23).to(tl.float32, bitcast=True)
    by = _per_row(by, GROUPS)[:, None]
    scaled = ()
    for u in tl.static_range(UNIT):
        scaled = scaled + ((queries[u].to(tl.float32) * by).to(tl.float16),)
    return scaled, inverse


@triton.jit
def _per_row(x, GROUPS: tl.constexpr):
    """What each head has, for each of its rows."""
    if GROUPS > 1:
        COUNT: tl.constexpr = x.shape[0]
        x = tl.reshape(tl.broadcast_to(x[:, None], [COUNT, GROUPS]), [COUNT * GROUPS])
    return x
