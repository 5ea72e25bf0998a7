"""The product of x with a transposed packed weight, in Triton: as a matrix-vector product for one
or two rows of x, on tensor cores for more. Both kernels read every packed byte once and convert it
to numbers in registers (ops/triton/values.py). From 64 rows of x on, as a prompt has them, a third
kernel writes these numbers once, and cuBLAS multiplies by them.

A unit is U columns: column i of unit j is column j · U + i of the matrix. Both kernels loop over
tiles of units, and within a tile over i, so numbers need not be interleaved. Instead x is laid out
as (M, U, units) beforehand. x is small, and in a compiled model this copy is fused with the op that
computes x.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantbench.ops.formats import TABLES, Packed
from quantbench.ops.packing import PLANES, columns_per_unit
from quantbench.ops.triton.values import (
    load_floats,
    load_group_scales,
    load_scales,
    load_words,
    lookup_table,
    values,
    weights,
    zeros,
)

# Rows of x up to which CUDA cores multiply; above, tensor cores do. In the machine code of Triton
# 3.9 for sm_90, a 4-bit weight takes 7, 10, 17 and 29 instructions on CUDA cores with 1, 2, 4 and 8
# rows, and 10 for tensor cores with any number up to 16.
VECTOR_ROWS = 2

# Rows of x from which numbers are written once and multiplied by cuBLAS: the tile kernel would
# convert every weight anew for each 64 rows.
UNPACKED_ROWS = 64
MOST_UNPACKED = 256 << 20  # bytes of numbers at a time; a layer of a 70 B model has 512 MiB

# The dtype of a word by its bits: a unit's part of a plane fills one word.
_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
# Dtypes of scales that kernels read as bytes, and their names in ops/triton/values.py.
_BYTES = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def linear(x: Tensor, weight: Packed, scale_kind: str | None = None) -> Tensor:
    """x (…, K) times a packed (N, K) weight, transposed: (…, N) float32, summed in float32.
    scale_kind: what scales are whose tensor has their bytes, as `as_bytes` gives it.

    Up to VECTOR_ROWS rows are multiplied in float32, more rows in x's dtype. That dtype holds the
    numbers of codes exactly, except for those from a look-up table or with a scale per group; from
    UNPACKED_ROWS on with any scale.
    """
    weight, unit = weight.plain, columns_of_unit(weight, x.shape[-1])
    rows = x.reshape(-1, x.shape[-1] // unit, unit).transpose(1, 2).contiguous()
    scale, kind = (weight.scale, scale_kind) if scale_kind else as_bytes(weight.scale)
    scales = scale, weight.zero, weight.tensor_scale, kind
    coding = weight.format, weight.bits, weight.group_size
    y = torch.ops.quantbench.triton_linear(rows, weight.planes, *scales, *coding)
    return y.view(*x.shape[:-1], y.shape[-1])


def as_bytes(scale: Tensor) -> tuple[Tensor, str]:
    """Scales as kernels read them, and the name of their kind: floats of 8 bits are bytes."""
    kind = _BYTES.get(scale.dtype)
    return (scale.view(torch.uint8), kind) if kind else (scale, "float")


def columns_of_unit(weight: Packed, columns: int) -> int:
    """Columns in a unit: enough to fill a 32-bit word in the widest plane, if K and the group size
    are multiples of that number; otherwise what packing needs at least."""
    wide = 4 if weight.bits == 8 else 8
    if columns % wide == 0 and weight.group_size % wide == 0:
        return wide
    return columns_per_unit(weight.bits)


@torch.library.custom_op(
    "quantbench::triton_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor[] planes, Tensor scale, Tensor? zero, Tensor? tensor_scale, "
    "str scale_kind, str format, int bits, int group_size) -> Tensor",
)
def triton_linear(x, planes, scale, zero, tensor_scale, scale_kind, format, bits, group_size):
    """(M, N) float32 from x (M, U, units); the rest is a Packed's fields."""
    M, unit, units = x.shape
    N = planes[0].shape[0]
    if M * N * units == 0:
        return x.new_zeros((M, N), dtype=torch.float32)
    widths = (4, 2) if format == "2:4" else PLANES[bits]
    stored = unit // 2 if format == "2:4" else unit
    words = [
        plane.contiguous().view(_WORDS[width * stored])
        for plane, width in zip(planes, widths, strict=True)
    ]
    whole_rows = group_size == unit * units and zero is None
    run_over = 0 if whole_rows else group_size // unit
    constants = {
        "FORMAT": format,
        "WIDTHS": (*widths, 0, 0)[:3],
        "TABLE": TABLES.get(format),
        "UNIT": unit,
        "UNITS_PER_GROUP": run_over,
        "SCALE": scale_kind,
        "INTEGER_BITS": bits if format in ("int", "2:4") else 0,
    }
    if M >= UNPACKED_ROWS and torch.version.hip is None:
        # A row's scale multiplies its numbers: sums would take another pass over float32.
        constants["UNITS_PER_GROUP"] = group_size // unit
        return _by_unpacking(x, words, scale, zero, tensor_scale, constants)
    if M <= VECTOR_ROWS:
        kernel, blocks = _vector_kernel, _vector_blocks(M, run_over)
    else:
        kernel, blocks = _tile_kernel, _tile_blocks(M, unit, x.dtype)
    grid, span = _grid(M, N, units, **blocks)
    y = x.new_empty((grid[2], M, N), dtype=torch.float32)
    with torch.cuda.device_of(x):
        kernel[grid](
            x,
            *(words + [None, None])[:3],
            scale.contiguous(),
            None if zero is None else zero.contiguous(),
            tensor_scale,
            y,
            M,
            N,
            units,
            span,
            **constants,
            **blocks,
        )
    return y[0] if grid[2] == 1 else y.sum(0)


@triton_linear.register_fake
def _(x, planes, scale, zero, tensor_scale, scale_kind, format, bits, group_size):
    return x.new_empty((x.shape[0], planes[0].shape[0]), dtype=torch.float32)


def _by_unpacking(
    x: Tensor,
    words: list[Tensor],
    scale: Tensor,
    zero: Tensor | None,
    tensor_scale: Tensor | None,
    constants: dict[str, Any],
) -> Tensor:
    """(M, N) float32 from x (M, U, units), through the numbers of some rows of the weight at a
    time, scaled and in x's dtype."""
    M, unit, units = x.shape
    N, rows = words[0].shape[0], x.view(M, unit * units)
    most = max(1, MOST_UNPACKED // (unit * units * x.element_size()))
    pieces = []
    for first in range(0, N, most):
        some = slice(first, min(first + most, N))
        count = some.stop - some.start
        numbers = x.new_empty((count, unit * units))
        block = {"BLOCK_N": 16, "BLOCK_J": 128}
        grid = triton.cdiv(count, block["BLOCK_N"]), triton.cdiv(units, block["BLOCK_J"])
        with torch.cuda.device_of(x):
            _unpack_kernel[grid](
                *([plane[some] for plane in words] + [None, None])[:3],
                scale[some].contiguous(),
                None if zero is None else zero[some].contiguous(),
                numbers,
                count,
                units,
                **constants,
                **block,
                OPERANDS=_TRITON[x.dtype],
                num_warps=4,
            )
        pieces.append(product(rows, numbers))
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    return y if tensor_scale is None else y * tensor_scale


def product(x: Tensor, numbers: Tensor) -> Tensor:
    """x (M, K) times numbers (N, K), transposed: (M, N) float32. On a card cuBLAS sums products of
    16 bits in float32 and does not round the sums."""
    if x.dtype == torch.float32:
        return x @ numbers.T
    if x.device.type == "cuda":
        return torch.mm(x, numbers.T, out_dtype=torch.float32)
    return x.float() @ numbers.float().T


def _vector_blocks(M: int, units_per_group: int) -> dict[str, Any]:
    """Tile sizes of the vector kernel.

    A thread has four units of two rows: with 32-bit words it loads 16 bytes at a time, and uses
    each column of x twice. With fewer units than threads, columns are loaded where they are used,
    without shared memory. A run is the largest power of two of units that divides a group, but at
    most 16.
    """
    run = math.gcd(units_per_group, 16)
    return {"ROWS": M, "BLOCK_N": 16, "RUNS": 128 // run, "RUN": run, "num_warps": 8}


def _tile_blocks(M: int, unit: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes of the tile kernel: 128 columns at a time, and all rows of x up to 64."""
    block_m = min(64, max(16, triton.next_power_of_2(M)))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 32 if block_m < 64 else 64,
        "BLOCK_J": max(16, 128 // unit),
        # numpy has no bfloat16, and Triton's interpreter would multiply its bits as integers.
        "OPERANDS": _TRITON[dtype] if isinstance(_tile_kernel, triton.JITFunction) else tl.float32,
        "num_warps": 4,
        "num_stages": 2 if dtype == torch.float32 else 3,
    }


def _grid(M: int, N: int, units: int, **blocks: Any) -> tuple[tuple[int, int, int], int]:
    """(programs along N, along M, sharing a row's units), and how many units each has of a row.

    To keep one of a GPU's 130 or so multiprocessors busy, 16 to 32 KB must be in flight to it. One
    program of the vector kernel loads nearly that much; four of the tile kernel do.
    """
    vector = "ROWS" in blocks
    grid = triton.cdiv(N, blocks["BLOCK_N"]), 1 if vector else triton.cdiv(M, blocks["BLOCK_M"])
    block = blocks["RUNS"] * blocks["RUN"] if vector else blocks["BLOCK_J"]
    wanted = triton.cdiv(128 if vector else 512, math.prod(grid))
    count = triton.cdiv(units, block)
    span = triton.cdiv(count, min(wanted, max(1, count // 2))) * block
    return (*grid, triton.cdiv(units, span)), span


@triton.jit
def _vector_kernel(
    x,  # (ROWS, UNIT, units)
    plane0,  # (N, units) words
    plane1,
    plane2,
    scale,  # (N, groups)
    zero,
    tensor_scale,
    y,  # (splits, ROWS, N) float32
    M,
    N,
    units,
    span,
    FORMAT: tl.constexpr,
    WIDTHS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    INTEGER_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """BLOCK_N rows of the weight times all rows of x; tiles are (BLOCK_N, RUNS, RUN) units, and a
    run of units lies within one group."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row again: a mask would cost more than reading it from the cache.
    row = tl.minimum(n, N - 1).to(tl.int64)
    table = None
    if TABLE is not None:
        table = lookup_table(TABLE)
    # With one scale per row sums run on through all of it, else through a run: either way scales
    # multiply sums, not numbers. In `totals` those of runs come together.
    sums = zeros([BLOCK_N, RUNS, RUN], ROWS)
    x_sums = zeros([RUNS, RUN], ROWS)
    totals = zeros([BLOCK_N, RUNS], ROWS)
    first = tl.program_id(2) * span
    end = tl.minimum(first + span, units)
    tile = tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    # Words are loaded one tile ahead, so that they are under way while the tile before is computed.
    # Triton's own pipelining would copy them, and x, to shared memory with a barrier for each tile.
    ahead = row[:, None, None] * units + (first + tile)[None, :, :]
    following = load_words(plane0, plane1, plane2, ahead, (first + tile < end)[None, :, :])
    for start in range(first, end, RUNS * RUN):
        runs = start + tl.arange(0, RUNS) * RUN
        j = start + tile
        inside = j < units
        words = following
        ahead += RUNS * RUN
        coming = (j + RUNS * RUN < end)[None, :, :]
        following = load_words(plane0, plane1, plane2, ahead, coming)
        if UNITS_PER_GROUP > 0:
            places = row[:, None] * (units // UNITS_PER_GROUP) + (runs // UNITS_PER_GROUP)[None, :]
            within = (runs < units)[None, :]
            factor, offset = load_scales(scale, zero, places, within, SCALE, INTEGER_BITS)
            sums = zeros([BLOCK_N, RUNS, RUN], ROWS)
            x_sums = zeros([RUNS, RUN], ROWS)
        for i in tl.static_range(UNIT):
            number = values(words, table, i, FORMAT, WIDTHS)
            last_sums = sums
            last_x_sums = x_sums
            sums = ()
            x_sums = ()
            for m in tl.static_range(ROWS):
                column = tl.load(x + (m * UNIT + i) * units + j, inside, other=0).to(tl.float32)
                sums = sums + (last_sums[m] + number * column[None, :, :],)
                x_sums = x_sums + (last_x_sums[m] + column,)
        if UNITS_PER_GROUP > 0:
            last_totals = totals
            totals = ()
            for m in tl.static_range(ROWS):
                total = tl.sum(sums[m], 2) * factor + tl.sum(x_sums[m], 1)[None, :] * offset
                totals = totals + (last_totals[m] + total,)
    y += tl.program_id(2) * M * N
    tensor_factor = 1.0
    if tensor_scale is not None:
        tensor_factor = tl.load(tensor_scale)
    if UNITS_PER_GROUP == 0:
        factor, offset = load_scales(scale, zero, row, n < N, SCALE, INTEGER_BITS)
    for m in tl.static_range(ROWS):
        if UNITS_PER_GROUP > 0:
            total = tl.sum(totals[m], 1)
        else:
            total = tl.sum(tl.sum(sums[m], 2), 1) * factor
            total += tl.sum(tl.sum(x_sums[m], 1), 0) * offset
        tl.store(y + m * N + n, total * tensor_factor, n < N)


@triton.jit
def _tile_kernel(
    x,  # (M, UNIT, units)
    plane0,  # (N, units) words
    plane1,
    plane2,
    scale,  # (N, groups)
    zero,
    tensor_scale,
    y,  # (splits, M, N) float32
    M,
    N,
    units,
    span,
    FORMAT: tl.constexpr,
    WIDTHS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    INTEGER_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """A (BLOCK_M, BLOCK_N) tile of y, BLOCK_J units of columns at a time."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row again, which is never stored.
    x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * UNIT * units
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    table = None
    if TABLE is not None:
        table = lookup_table(TABLE)
    sums = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    first = tl.program_id(2) * span
    for start in range(first, tl.minimum(first + span, units), BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)[None, :]
        inside = j < units
        words = load_words(plane0, plane1, plane2, row * units + j, inside)
        factor, offset = load_group_scales(
            scale, zero, row, j, units, inside, UNITS_PER_GROUP, SCALE, INTEGER_BITS
        )
        for i in tl.static_range(UNIT):
            number = weights(
                words, table, i, factor, offset, FORMAT, WIDTHS, UNITS_PER_GROUP, INTEGER_BITS
            )
            columns = tl.load(x_rows + i * units + j, inside, other=0)
            number = number.to(columns.dtype).to(OPERANDS)
            sums = tl.dot(columns.to(OPERANDS), tl.trans(number), sums, input_precision="ieee")
    tensor_factor = tl.full([BLOCK_N], 1.0, tl.float32)
    if tensor_scale is not None:
        tensor_factor *= tl.load(tensor_scale)
    if UNITS_PER_GROUP == 0:
        tensor_factor *= load_floats(scale + tl.minimum(n, N - 1), n < N, SCALE)
    y += tl.program_id(2) * M * N
    stored = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], sums * tensor_factor[None, :], stored)


@triton.jit
def _unpack_kernel(
    plane0,  # (N, units) words
    plane1,
    plane2,
    scale,  # (N, groups)
    zero,
    numbers,  # (N, UNIT, units) of the dtype OPERANDS
    N,
    units,
    FORMAT: tl.constexpr,
    WIDTHS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    INTEGER_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """Write the scaled numbers of (BLOCK_N, BLOCK_J) units. The columns lie as those of x do, so
    that neighbours of a column are written side by side."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    inside = (n < N) & (j < units)
    row = n.to(tl.int64)
    table = None
    if TABLE is not None:
        table = lookup_table(TABLE)
    words = load_words(plane0, plane1, plane2, row * units + j, inside)
    factor, offset = load_group_scales(
        scale, zero, row, j, units, inside, UNITS_PER_GROUP, SCALE, INTEGER_BITS
    )
    for i in tl.static_range(UNIT):
        number = weights(
            words, table, i, factor, offset, FORMAT, WIDTHS, UNITS_PER_GROUP, INTEGER_BITS
        )
        tl.store(numbers + (row * UNIT + i) * units + j, number.to(OPERANDS), inside)
