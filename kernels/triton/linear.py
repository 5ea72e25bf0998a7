"""x times a packed weight, transposed, in Triton: a matrix-vector product for a few rows of x, tiles
on tensor cores for more. Both read every packed byte once (per tile of rows) and turn it into
numbers in registers, by kernels/triton/values.py.

Column i of unit j is column j · U + i of the matrix. Both kernels go over units, and within a tile
of units over i, so that nothing is ever interleaved again: x is laid out (M, U, units) beforehand
instead, the columns that share a place in their unit side by side. It is small, and in a compiled
model that copy is fused with whatever made x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats import TABLES, Packed
from kernels.packing import PLANES, columns_per_unit
from kernels.triton.values import load_scales, load_words, lookup_table, values

# Up to so many rows the products run beside the loads on ordinary cores; more rows take more
# instructions than unpacking does, and tensor cores, which want 16 of them, become the faster way.
VECTOR_ROWS = 4

# Bits of the words that a unit's part of a plane can fill.
_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
# Scales that kernels take as bytes, by name.
_BYTES = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def linear(x: Tensor, weight: Packed) -> Tensor:
    """x (…, K) times a packed (N, K) weight, transposed: (…, N) float32, summed in float32.

    Products of up to VECTOR_ROWS rows are of float32 numbers. Of more rows they are of numbers in
    x's dtype: codes are exact there, except those of a look-up table or with a scale per group.
    """
    unit = columns_of_unit(weight, x.shape[-1])
    rows = x.reshape(-1, x.shape[-1] // unit, unit).transpose(1, 2).contiguous()
    y = torch.ops.quantbench.triton_linear(
        rows,
        weight.planes,
        weight.scale,
        weight.zero,
        weight.tensor_scale,
        weight.format,
        weight.bits,
        weight.group_size,
    )
    return y.unflatten(0, x.shape[:-1]) if x.dim() != 2 else y


def columns_of_unit(weight: Packed, columns: int) -> int:
    """As many columns as fill a word of 32 bits in the widest plane, where K and groups allow."""
    wide = 4 if weight.bits == 8 else 8
    if columns % wide == 0 and weight.group_size % wide == 0:
        return wide
    return columns_per_unit(weight.bits)


@torch.library.custom_op(
    "quantbench::triton_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor[] planes, Tensor scale, Tensor? zero, Tensor? tensor_scale, "
    "str format, int bits, int group_size) -> Tensor",
)
def triton_linear(
    x: Tensor,
    planes: list[Tensor],
    scale: Tensor,
    zero: Tensor | None,
    tensor_scale: Tensor | None,
    format: str,
    bits: int,
    group_size: int,
) -> Tensor:
    """(M, N) float32 from x (M, U, units); the rest is a Packed's fields."""
    M, unit, units = x.shape
    N = planes[0].shape[0]
    y = x.new_empty((M, N), dtype=torch.float32)
    if y.numel() == 0:
        return y
    widths = (4, 2) if format == "2:4" else PLANES[bits]
    words = [
        # Of four columns a 2:4 plane holds two.
        _words(plane, width * unit // (2 if format == "2:4" else 1))
        for plane, width in zip(planes, widths, strict=True)
    ]
    whole_rows = group_size == unit * units and zero is None
    settings = {
        "FORMAT": format,
        "WIDTHS": (*widths, 0, 0)[:3],
        "TABLE": TABLES.get(format),
        "UNIT": unit,
        "UNITS_PER_GROUP": 0 if whole_rows else group_size // unit,
        "SCALE": _BYTES.get(scale.dtype, "float"),
    }
    vector = M <= VECTOR_ROWS
    settings |= _vector_blocks(M, N, unit, units) if vector else _tile_blocks(M, N, unit, x.dtype)
    with torch.cuda.device_of(x):
        kernel = _vector_kernel if vector else _tile_kernel
        grid = (triton.cdiv(N, settings["BLOCK_N"]),)
        if not vector:
            grid = (triton.cdiv(M, settings["BLOCK_M"]), *grid)
        kernel[grid](
            x,
            *(words + [None, None])[:3],
            _scales(scale),
            None if zero is None else _scales(zero),
            tensor_scale,
            y,
            M,
            N,
            units,
            **settings,
        )
    return y


@triton_linear.register_fake
def _(x, planes, scale, zero, tensor_scale, format, bits, group_size):
    return x.new_empty((x.shape[0], planes[0].shape[0]), dtype=torch.float32)


def _words(plane: Tensor, bits: int) -> Tensor:
    return plane.contiguous().view(_WORDS[bits])


def _scales(scale: Tensor) -> Tensor:
    return scale.contiguous().view(torch.uint8) if scale.dtype in _BYTES else scale.contiguous()


def _vector_blocks(M: int, N: int, unit: int, units: int) -> dict[str, int]:
    """A thread loads four words of one row, 16 bytes where they have 32 bits, and has the tile's
    rows of x to itself; few rows a program, so that a layer of 4096 makes 512 of them."""
    return {"ROWS": M, "BLOCK_N": 8, "BLOCK_J": 64, "num_warps": 4}


def _tile_blocks(M: int, N: int, unit: int, dtype: torch.dtype) -> dict[str, object]:
    """128 columns at a time. The fewer rows, the more programs it takes to fill the device."""
    block_m = min(64, max(16, triton.next_power_of_2(M)))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 32 if block_m < 64 else 64,
        "BLOCK_J": max(16, 128 // unit),
        # numpy has no bfloat16, and Triton's interpreter would multiply its bits as integers.
        "OPERANDS": _TRITON[dtype] if isinstance(_tile_kernel, triton.JITFunction) else tl.float32,
        "num_warps": 4,
        "num_stages": 3,
    }


@triton.jit
def _vector_kernel(
    x,  # (ROWS, UNIT, units)
    plane0,  # (N, units) words
    plane1,
    plane2,
    scale,  # (N, groups)
    zero,
    tensor_scale,
    y,  # (ROWS, N) float32
    M,
    N,
    units,
    FORMAT: tl.constexpr,
    WIDTHS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """BLOCK_N rows of the weight times all rows of x."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row again: a mask would cost more than reading it from the cache.
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    table = None
    if TABLE is not None:
        table = lookup_table(TABLE)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.full([BLOCK_N, BLOCK_J], 0.0, tl.float32),)
    for start in range(0, units, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        inside = j < units
        words = load_words(plane0, plane1, plane2, row * units + j[None, :], inside[None, :])
        unit_sums = ()
        x_sums = ()
        for m in tl.static_range(ROWS):
            unit_sums = unit_sums + (tl.full([BLOCK_N, BLOCK_J], 0.0, tl.float32),)
            x_sums = x_sums + (tl.full([BLOCK_J], 0.0, tl.float32),)
        for i in tl.static_range(UNIT):
            number = values(words, table, i, FORMAT, WIDTHS)
            products = ()
            terms = ()
            for m in tl.static_range(ROWS):
                column = tl.load(x + (m * UNIT + i) * units + j, inside, other=0).to(tl.float32)
                products = products + (unit_sums[m] + number * column[None, :],)
                terms = terms + (x_sums[m] + column,)
            unit_sums = products
            x_sums = terms
        # A unit lies within one group: its scale multiplies the unit's sum, not every number.
        if UNITS_PER_GROUP > 0:
            place = row * (units // UNITS_PER_GROUP) + (j // UNITS_PER_GROUP)[None, :]
            scales = load_scales(scale + place, inside[None, :], SCALE)
            totals = ()
            for m in tl.static_range(ROWS):
                totals = totals + (sums[m] + unit_sums[m] * scales,)
            if zero is not None:
                zeros = load_scales(zero + place, inside[None, :], SCALE)
                shifted = ()
                for m in tl.static_range(ROWS):
                    shifted = shifted + (totals[m] + x_sums[m][None, :] * zeros,)
                totals = shifted
        else:
            totals = ()
            for m in tl.static_range(ROWS):
                totals = totals + (sums[m] + unit_sums[m],)
        sums = totals
    factor = tl.full([BLOCK_N], 1.0, tl.float32)
    if UNITS_PER_GROUP == 0:
        factor = load_scales(scale + tl.minimum(n, N - 1), n < N, SCALE)
    if tensor_scale is not None:
        factor *= tl.load(tensor_scale)
    for m in tl.static_range(ROWS):
        tl.store(y + m * N + n, tl.sum(sums[m], 1) * factor, n < N)


@triton.jit
def _tile_kernel(
    x,  # (M, UNIT, units)
    plane0,  # (N, units) words
    plane1,
    plane2,
    scale,  # (N, groups)
    zero,
    tensor_scale,
    y,  # (M, N) float32
    M,
    N,
    units,
    FORMAT: tl.constexpr,
    WIDTHS: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """A (BLOCK_M, BLOCK_N) tile of y, BLOCK_J units of columns at a time."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row again, which is never stored.
    x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * UNIT * units
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    table = None
    if TABLE is not None:
        table = lookup_table(TABLE)
    sums = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for start in range(0, units, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)[None, :]
        inside = j < units
        words = load_words(plane0, plane1, plane2, row * units + j, inside)
        if UNITS_PER_GROUP > 0:
            place = row * (units // UNITS_PER_GROUP) + j // UNITS_PER_GROUP
            scales = load_scales(scale + place, inside, SCALE)
            if zero is not None:
                zeros = load_scales(zero + place, inside, SCALE)
        for i in tl.static_range(UNIT):
            number = values(words, table, i, FORMAT, WIDTHS)
            if UNITS_PER_GROUP > 0:
                number *= scales
                if zero is not None:
                    number += zeros
            columns = tl.load(x_rows + i * units + j, inside, other=0)
            number = number.to(columns.dtype).to(OPERANDS)
            sums = tl.dot(columns.to(OPERANDS), tl.trans(number), sums, input_precision="ieee")
    factor = tl.full([BLOCK_N], 1.0, tl.float32)
    if UNITS_PER_GROUP == 0:
        factor = load_scales(scale + tl.minimum(n, N - 1), n < N, SCALE)
    if tensor_scale is not None:
        factor *= tl.load(tensor_scale)
    stored = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], sums * factor[None, :], stored)
