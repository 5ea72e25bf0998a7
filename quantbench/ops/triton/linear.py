"""The product of x with a transposed packed weight, in Triton, on tensor cores for any number of
rows of x: one that has no others is padded. A kernel reads every packed byte once and converts two
weights at a time to numbers in registers (ops/triton/values.py). From 64 rows of x on, as a prompt
has them, another kernel writes these numbers once, and cuBLAS multiplies by them.

A unit is U columns. Within a unit the columns of x are put into the order in which values.numbers
has a weight's. x is small, and in a compiled model this copy is fused with the op that computes x.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantbench.ops.formats import TABLES, Packed
from quantbench.ops.packing import PLANES, columns_per_unit
from quantbench.ops.triton.values import load_scales, load_words, lookup_table, numbers

# Rows of x from which numbers are written once and multiplied by cuBLAS: the tile kernel would
# convert every weight anew for each 64 rows.
UNPACKED_ROWS = 64
# Columns of a group from which its scale multiplies their sum.
LEAST_SUMMED = 64
MOST_UNPACKED = 256 << 20  # bytes of numbers at a time; a layer of a 70 B model has 512 MiB

# The dtype of a word by its bits: a unit's part of a plane fills one word.
_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
# Dtypes of scales that kernels read as bytes, and their names in ops/triton/values.py.
_BYTES = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def linear(x: Tensor, weight: Packed, scale_kind: str | None = None) -> Tensor:
    """x (…, K) times a packed (N, K) weight, transposed: (…, N) float32, summed in float32.
    scale_kind: what scales are whose tensor has their bytes, as `as_bytes` gives it.

    Products are of x's dtype. That dtype holds the numbers of codes exactly, except for those from
    a look-up table. Scales multiply sums, unless a group has fewer than LEAST_SUMMED columns or x
    has UNPACKED_ROWS: then they multiply numbers, which are rounded.
    """
    weight, unit = weight.plain, columns_of_unit(weight, x.shape[-1])
    rows = ordered(x.reshape(-1, x.shape[-1]), unit)
    scale, kind = (weight.scale, scale_kind) if scale_kind else as_bytes(weight.scale)
    scales = scale, weight.zero, weight.tensor_scale, kind
    coding = weight.format, weight.bits, weight.group_size
    y = torch.ops.quantbench.triton_linear(rows, weight.planes, *scales, *coding)
    return y.view(*x.shape[:-1], y.shape[-1])


def ordered(x: Tensor, unit: int) -> Tensor:
    """x (M, K), the columns of each unit in the order of values.numbers."""
    if unit <= 2:
        return x.contiguous()
    units = x.view(len(x), x.shape[1] // unit, 2, unit // 2)
    return units.transpose(2, 3).reshape(x.shape)


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
    """(M, N) float32 from x (M, K), as `ordered` has it; the rest is a Packed's fields."""
    (M, K), N = x.shape, planes[0].shape[0]
    if M * N * K == 0:
        return x.new_zeros((M, N), dtype=torch.float32)
    widths = (4, 2) if format == "2:4" else PLANES[bits]
    unit = K // _units(planes, widths, format, group_size, K)
    units = K // unit
    stored = unit // 2 if format == "2:4" else unit
    words = [
        plane.contiguous().view(_WORDS[width * stored])
        for plane, width in zip(planes, widths, strict=True)
    ]
    by_row = group_size == K and zero is None
    constants = {
        "FORMAT": format,
        "WIDTHS": (*widths, 0, 0)[:3],
        "TABLE": TABLES.get(format) if format != "fp4" else None,
        "UNIT": unit,
        "UNITS_PER_GROUP": 0 if by_row else group_size // unit,
        "SCALE": scale_kind,
        "INTEGER_BITS": bits if format in ("int", "2:4") else 0,
    }
    if M >= UNPACKED_ROWS and torch.version.hip is None:
        # A row's scale multiplies its numbers: sums would take another pass over float32.
        constants["UNITS_PER_GROUP"] = group_size // unit
        return _by_unpacking(x, words, scale, zero, tensor_scale, constants)
    columns = next((c for c in (128, LEAST_SUMMED) if by_row or group_size % c == 0), None)
    # E8M0 and E4M3 scales are bfloat16 numbers, and so are their products with FP4's.
    exact = scale_kind != "float" and zero is None
    paired = x.dtype == torch.bfloat16 and unit > 1 and constants["TABLE"] is None
    constants["PAIRED"] = paired and (columns is not None or exact) and _has_pairs(x.device)
    constants["SCALED"] = columns is None
    blocks = _blocks(M, unit, columns or 128, x.dtype)
    grid, span = _grid(M, N, units, **blocks)
    y = x.new_empty((grid[2], M, N), dtype=torch.float32)
    with torch.cuda.device_of(x):
        _product_kernel[grid](
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
    """(M, N) float32 from x (M, K), through the numbers of some rows of the weight at a time,
    scaled and in x's dtype."""
    K, N = x.shape[1], words[0].shape[0]
    units = K // constants["UNIT"]
    most = max(1, MOST_UNPACKED // (K * x.element_size()))
    pieces = []
    for first in range(0, N, most):
        some = slice(first, min(first + most, N))
        count = some.stop - some.start
        numbers = x.new_empty((count, K))
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
        pieces.append(product(x, numbers))
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


def _units(
    planes: list[Tensor], widths: tuple[int, ...], format: str, group_size: int, columns: int
) -> int:
    """Units of a row."""
    weight = Packed(planes, planes[0], None, None, format, sum(widths), group_size)
    return columns // columns_of_unit(weight, columns)


@functools.cache
def _has_pairs(device: torch.device) -> bool:
    """Whether one instruction multiplies two bfloat16 numbers."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _blocks(M: int, unit: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes: weights are the side of the product that tensor cores take 64 rows of, x's rows
    the one of which 8 suffice. float32 is multiplied by ordinary cores, which hold tiles whole."""
    block_m = max(8, triton.next_power_of_2(M))
    interpreted = not isinstance(_product_kernel, triton.JITFunction)
    whole = dtype == torch.float32 and not interpreted
    return {
        "BLOCK_M": min(block_m, 16) if whole else block_m,
        "BLOCK_N": 32 if whole else 128 if block_m <= 16 else 64,
        "BLOCK_J": (16 if whole else columns) // unit,
        # numpy has no bfloat16, and Triton's interpreter would multiply its bits as integers.
        "OPERANDS": tl.float32 if interpreted else _TRITON[dtype],
        "num_warps": 4,
        "num_stages": 2 if whole else 3,
    }


def _grid(M: int, N: int, units: int, **blocks: Any) -> tuple[tuple[int, int, int], int]:
    """(programs along N, along M, sharing a row's units), and how many units each has of a row.

    To keep one of a GPU's 130 or so multiprocessors busy, 16 to 32 KB must be in flight to it. Four
    programs load that much.
    """
    grid = triton.cdiv(N, blocks["BLOCK_N"]), triton.cdiv(M, blocks["BLOCK_M"])
    wanted = triton.cdiv(512, math.prod(grid))
    count = triton.cdiv(units, blocks["BLOCK_J"])
    span = triton.cdiv(count, min(wanted, max(1, count // 2))) * blocks["BLOCK_J"]
    return (*grid, triton.cdiv(units, span)), span


@triton.jit
def _product_kernel(
    x,  # (M, units · UNIT)
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
    PAIRED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """A (BLOCK_N, BLOCK_M) tile of y, transposed, BLOCK_J units of columns at a time: of one group,
    whose scale multiplies their sum, unless SCALED."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last row again, which is never stored.
    x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[None, :] * units * UNIT
    row = tl.minimum(n, N - 1).to(tl.int64)
    table = None
    if TABLE is not None:
        table = lookup_table(TABLE)
    sums = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    first = tl.program_id(2) * span
    for start in range(first, tl.minimum(first + span, units), BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)[None, :]
        inside = j < units
        # Four words a thread: with a tile's whole row it stores single numbers to shared memory.
        places = tl.max_contiguous(row[:, None] * units + j, (1, 4))
        words = load_words(plane0, plane1, plane2, places, inside)
        factor = None
        offset = None
        if SCALED:
            places = row[:, None] * (units // UNITS_PER_GROUP) + j // UNITS_PER_GROUP
            factor, offset = load_scales(scale, zero, places, inside, SCALE, INTEGER_BITS)
            if PAIRED:
                bits = factor.to(tl.int32, bitcast=True)
                factor = (bits & -65536) | ((bits >> 16) & 0xFFFF)
        number = numbers(words, table, factor, offset, FORMAT, WIDTHS, UNIT, SCALED, PAIRED)
        column = start * UNIT + tl.arange(0, BLOCK_J * UNIT)[:, None]
        columns = tl.load(x_rows + column, column < units * UNIT, other=0)
        number = number.to(columns.dtype).to(OPERANDS)
        if SCALED or UNITS_PER_GROUP == 0:
            sums = tl.dot(number, columns.to(OPERANDS), sums, input_precision="ieee")
        else:
            part = tl.dot(number, columns.to(OPERANDS), input_precision="ieee")
            places = row * (units // UNITS_PER_GROUP) + start // UNITS_PER_GROUP
            factor, offset = load_scales(scale, zero, places, n < N, SCALE, INTEGER_BITS)
            sums += part * factor[:, None]
            if zero is not None:
                sums += tl.sum(columns.to(tl.float32), 0)[None, :] * offset[:, None]
    tensor_factor = tl.full([BLOCK_N], 1.0, tl.float32)
    if tensor_scale is not None:
        tensor_factor *= tl.load(tensor_scale)
    if UNITS_PER_GROUP == 0:
        factor, offset = load_scales(scale, zero, row, n < N, SCALE, INTEGER_BITS)
        tensor_factor *= factor
    y += tl.program_id(2) * M * N
    stored = (m < M)[None, :] & (n < N)[:, None]
    tl.store(y + m.to(tl.int64)[None, :] * N + n[:, None], sums * tensor_factor[:, None], stored)


@triton.jit
def _unpack_kernel(
    plane0,  # (N, units) words
    plane1,
    plane2,
    scale,  # (N, groups)
    zero,
    y,  # (N, units · UNIT) of the dtype OPERANDS
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
    """Write the scaled numbers of (BLOCK_N, BLOCK_J) units, their columns in the order of x's."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    inside = (n < N) & (j < units)
    row = n.to(tl.int64)
    table = None
    if TABLE is not None:
        table = lookup_table(TABLE)
    words = load_words(plane0, plane1, plane2, row * units + j, inside)
    places = row * (units // UNITS_PER_GROUP) + j // UNITS_PER_GROUP
    factor, offset = load_scales(scale, zero, places, inside, SCALE, INTEGER_BITS)
    number = numbers(words, table, factor, offset, FORMAT, WIDTHS, UNIT, True, False)
    column = tl.program_id(1) * BLOCK_J * UNIT + tl.arange(0, BLOCK_J * UNIT)[None, :]
    stored = (n < N) & (column < units * UNIT)
    tl.store(y + row * units * UNIT + column, number.to(OPERANDS), stored)
