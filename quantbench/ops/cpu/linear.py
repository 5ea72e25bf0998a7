"""The product of x with a transposed packed weight on the CPU, in C++. For a few rows of x, the
weight is read once.

    packed = pack(weight, columns)         # an ops.formats.Packed
    y = linear(x, packed, rows)

It computes what ops.reference.linear computes. Activations are rounded to 8 bits only if the scheme
says so. Otherwise they are multiplied as floats, or as integers of 16 bits (32 for float32). For
many rows of bfloat16, with AMX, weights with several scales in a row are rounded to bfloat16.
"""

import contextlib
import math
import mmap
import struct
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.errors import KernelError
from quantbench.ops import packing
from quantbench.ops.cpu import build
from quantbench.ops.formats import OUTER, TABLES, Packed, check_finite

torch.library.define("quantbench::cpu_linear", "(Tensor x, Tensor packed, int rows) -> Tensor")
torch.library.define(
    "quantbench::cpu_pack_codes",
    "(Tensor(a!) blocks, Tensor[] planes, int[] widths, int[] vectors, int at, int units, int gap, "
    "bool flip) -> ()",
)

# Rows in a block, columns in a unit, most columns in a chunk, bytes of the header: linear/layout.h.
ROWS, UNIT, LARGEST_CHUNK, HEADER = 16, 32, 256, 128
VECTOR = 4 * ROWS  # bytes of a quad, unpacked
# The header, and the numbers of what it names, as linear/layout.h has them.
_HEADER, _MAGIC = "=Q2q6ifi16i8x", 0x31306C62746E6171
_CODINGS = {
    **{"int": 0, "uint": 0, "fp6": 1, "fp4": 2, "iq4nl": 2},
    **{"nf4": 3, "bnb-fp4": 3, "2:4": 4, "fp8": 5},
}
_SCALES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3, torch.int8: 4}
ROUNDINGS = {None: 0, "int8": 1, "int8-asymmetric": 2}  # of activations
# The integer for 1.0 in the tables of nf4 and bnb-fp4: products with float32 stay exact. A few rows
# of bfloat16 and float16 are multiplied by 16 bits of it, as exact as x in integers is.
_MOST = 2**23 - 1
# The value of one integer step in the inner loop, by format; 1 for formats that are not listed.
_UNITS = {"fp6": 2.0**-4, "fp4": 2.0**-1, "nf4": 1 / _MOST, "bnb-fp4": 1 / _MOST}


@torch.library.register_fake("quantbench::cpu_linear")
def _(x, packed, rows):
    return x.new_empty((x.shape[0], rows))


class _Layout(NamedTuple):
    """Where the parts of a block are, as geometry() in linear/layout.cpp has them."""

    chunks: int
    chunk_units: int  # units of a chunk; the last chunk may have fewer
    head: int  # bytes of what multiplies scales of 8 bits
    scales: int  # bytes of a chunk's
    end: int  # of the units, in bytes; scales of rows are behind them
    block: int  # bytes

    @classmethod
    def of(cls, weight: Packed, columns: int, each: int, scale: Tensor) -> "_Layout":
        """each: columns that share a scale, as `_scales` returns them with `scale`."""
        units = -(-columns // UNIT)
        chunk_units = max(1, each // UNIT)
        chunks = -(-units // chunk_units)
        lanes = ROWS * (1 if weight.zero is None else 2)
        scales = scale.itemsize * lanes * max(1, UNIT // each) if each else 0
        head = 0 if weight.outer is None else columns // OUTER * 2 * lanes
        end = head + chunks * scales + units * sum(_vectors(weight)) * VECTOR
        block = end + (0 if each else ROWS * scale.itemsize)
        return cls(chunks, chunk_units, head, scales, end, -(-block // 64) * 64)


def linear(x: Tensor, packed: Tensor, rows: int) -> Tensor:
    """x (…, K) → (…, N) in x's dtype, where N is `rows`; sums are float32, and rounded once.

    x is float32, bfloat16 or float16. If `pack` was given an activation, x is rounded first.
    Raises RuntimeError for another dtype, and for a tensor that `pack` did not make.
    """
    build.ready()
    flat = x.reshape(-1, x.shape[-1])
    return torch.ops.quantbench.cpu_linear(flat, packed, rows).view(*x.shape[:-1], rows)


def refuses(weight: Packed, columns: int) -> str | None:
    """Why a weight with K = `columns` cannot be packed, or None."""
    if weight.group_size != columns or weight.zero is not None:
        if weight.group_size % 8:
            return f"has groups of {weight.group_size} columns; the C++ kernel takes multiples of 8"
        if weight.format in ("fp8", "2:4") and weight.group_size % 32:
            return f"has groups of {weight.group_size} columns, no multiple of 32"
    return None


def pack(weight: Packed, columns: int, activation: str | None = None) -> Tensor:
    """A quantized (N, K) weight in the order in which the kernel reads it: (bytes,) uint8.

    columns: K. activation: how the scheme rounds activations, "int8", "int8-asymmetric" or None.
    On the meta device the result has the right shape, and no library is needed. Raises KernelError
    for shapes that `refuses` rejects, for tensors that do not fit together, and for weights or
    scales that are not finite.
    """
    if not weight.scale.is_meta:
        build.load()
    if reason := refuses(weight, columns):
        raise KernelError(f"a weight {reason}")
    _check_shapes(weight, columns)
    scale, zero, each = _scales(weight, columns)
    layout = _Layout.of(weight, columns, each, scale)
    rows = len(weight.planes[0])
    size = HEADER + -(-rows // ROWS) * layout.block
    if weight.scale.is_meta:
        return weight.scale.new_empty(size, dtype=torch.uint8)
    unit = _UNITS.get(weight.format, 1.0)
    factor = unit if weight.tensor_scale is None else unit * float(weight.tensor_scale)
    check_finite(weight.planes[0], scale, zero, weight.outer, torch.tensor(factor))
    zeros = 0 if weight.zero is None else 2 if weight.zero.dtype == torch.uint8 else 1
    table = torch.tensor(TABLES.get(weight.format, (0.0,) * 16)) / unit
    scales = (_SCALES[scale.dtype], each) if each else (0, UNIT)
    header = struct.pack(
        *(_HEADER, _MAGIC, rows, columns, _CODINGS[weight.format], sum(_vectors(weight)), *scales),
        *(zeros, ROUNDINGS[activation], factor, weight.format == "uint"),
        *table.round().int().tolist(),
    )
    packed = _in_huge_pages(size)
    packed[:HEADER] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    _write(packed[HEADER:].view(-1, layout.block), weight, scale, zero, layout)
    return packed


def _check_shapes(weight: Packed, columns: int) -> None:
    if weight.format not in _CODINGS:
        raise KernelError(f"the C++ kernel knows no format {weight.format}")
    rows, groups = len(weight.planes[0]), -(-columns // weight.group_size)
    bits = enumerate(_vectors(weight))
    wanted: dict[str, tuple[int, ...]]
    wanted = {f"plane{plane}": (rows, columns * each // 8) for plane, each in bits}
    wanted |= {name: (rows, groups) for name in ("scale", "zero") if name in weight.by_row}
    if weight.scale.dtype == torch.int8:
        wanted["outer"] = (rows, columns // OUTER, 2)
    shapes = {name: tuple(tensor.shape) for name, tensor in weight.by_row.items()}
    if shapes != wanted:
        raise KernelError(f"a weight ({rows}, {columns}) takes tensors {wanted}, not {shapes}")


def _vectors(weight: Packed) -> tuple[int, ...]:
    """The bits that a column takes in each plane, which are the vectors that a unit takes of it."""
    return (2, 1) if weight.format == "2:4" else packing.PLANES[weight.bits]


def _in_huge_pages(size: int) -> Tensor:
    """(size,) uint8: zeros."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _write(
    blocks: Tensor, weight: Packed, scale: Tensor, zero: Tensor | None, layout: _Layout
) -> None:
    """Write a weight into its blocks (N / ROWS, bytes), which are zeros."""
    planes = [plane.contiguous() for plane in weight.planes]
    widths = [4, 2] if weight.format == "2:4" else packing.PLANES[weight.bits]
    flip = weight.format == "int" and weight.bits == 8
    places = layout.head + layout.scales, layout.chunk_units, layout.scales
    torch.ops.quantbench.cpu_pack_codes(blocks, planes, widths, _vectors(weight), *places, flip)
    numbers = torch.stack([scale] if zero is None else [scale, zero], 2)
    if layout.scales:
        each = layout.scales // (ROWS * scale.itemsize)
        chunk = layout.scales + layout.chunk_units * sum(_vectors(weight)) * VECTOR
        _put(blocks, layout.head, chunk, numbers, (layout.chunks, each))
    else:
        _put(blocks, layout.end, 0, numbers, (1, 1))
    if weight.outer is not None:
        outer = weight.outer[..., : numbers.shape[2]]
        _put(blocks, 0, layout.head // outer.shape[1], outer, (outer.shape[1], outer.shape[2]))


def _put(blocks: Tensor, at: int, step: int, numbers: Tensor, shape: tuple[int, int]) -> None:
    """Write numbers of rows (n, …), as many as `shape` (count, each) or fewer, with ROWS rows side
    by side: those of thing i from byte at + i · step of a block on."""
    (count, each), flat, size = shape, numbers.flatten(1), numbers.itemsize
    padded = F.pad(flat, (0, count * each - flat.shape[1], 0, -len(flat) % ROWS))
    lanes = padded.view(-1, ROWS, count, each).permute(0, 2, 3, 1)
    to = blocks.view(numbers.dtype)
    strides = to.stride(0), step // size, ROWS, 1
    to.as_strided(lanes.shape, strides, to.storage_offset() + at // size).copy_(lanes)


def rows_of(packed: Tensor, like: Packed, columns: int, rows: Tensor) -> Packed:
    """Rows (n,) of a weight (N, columns) that `pack` has packed.

    like: that weight, in any format but 2:4; of its tensors only tensor_scale is read. The result
    may have smaller groups, and bfloat16 in place of scales of 8-bit floats.
    """
    scale, zero, each = _scales(like, columns)
    layout = _Layout.of(like, columns, each, scale)
    number, row, both = torch.arange(len(rows)), rows % ROWS, 1 if zero is None else 2
    blocks = packed[HEADER:].view(-1, layout.block)[rows // ROWS]

    def of_row(data: Tensor, dtype: torch.dtype) -> Tensor:
        """(n, groups, 1 or 2), scale and zero, from the bytes of those of all rows of a block."""
        data = data.contiguous().view(dtype).view(len(rows), -1, both, ROWS)
        return data.mT[number, :, row]

    chunk = blocks[:, layout.head : layout.end].unflatten(1, (layout.chunks, -1))
    groups, dtype = columns // (each or columns), scale.dtype
    behind = blocks[:, layout.end : layout.end + 4 * ROWS]
    scales = of_row(chunk[..., : layout.scales] if each else behind, dtype)
    scale, zeros = scales[:, :groups, 0], scales[:, :groups, -1]
    if zero is not None and like.zero is not None:
        zero = zeros.to(torch.uint8) if like.zero.dtype == torch.uint8 else zeros
    units = chunk[..., layout.scales :].reshape(len(rows), -1, like.bits, ROWS, 4)
    codes = _codes(units[number, :, :, row], like.bits)[:, :columns]
    if like.bits == 8:
        planes = [(codes ^ 128 if like.format == "int" else codes).view(like.planes[0].dtype)]
    else:
        planes = packing.pack(codes, like.bits)
    outer = None
    if like.outer is not None:
        outer = F.pad(of_row(blocks[:, : layout.head], torch.float16), (0, 2 - both))
    return replace(
        like, planes=planes, scale=scale, zero=zero, outer=outer, group_size=each or columns
    )


def _codes(units: Tensor, bits: int) -> Tensor:
    """Codes (n, columns) uint8 of one row's bytes (n, units, bits, 4)."""
    codes = torch.zeros(*units.shape[:2], 8, 4, dtype=torch.uint8)
    done = 0
    if bits in (6, 7):
        low = units[:, :, :6].unflatten(2, (2, 3))
        top = low >> 6
        fourth = top[:, :, :, 0] | top[:, :, :, 1] << 2 | top[:, :, :, 2] << 4
        codes = torch.cat((low & 63, fourth[:, :, :, None]), 3).flatten(2, 3)
        done = 6
    for width in (8, 4, 2, 1):
        if (bits - done) & width and done < bits:
            shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
            fields = units[:, :, done : done + width, None] >> shifts & ((1 << width) - 1)
            codes, done = codes | fields.flatten(2, 3) << done, done + width
    return codes.flatten(1)


def _scales(weight: Packed, columns: int) -> tuple[Tensor, Tensor | None, int]:
    """Scales, zeros, and how many columns share one of them in the packed weight; 0 for a scale per
    row.

    Scales of 8 bits are converted to bfloat16, which holds them exactly.
    """
    if weight.group_size == columns and weight.zero is None:
        return weight.scale.float(), None, 0
    each = math.gcd(weight.group_size, LARGEST_CHUNK)
    if each >= 32:  # the largest that divides a group
        each = max(c for c in range(32, LARGEST_CHUNK + 1, 32) if weight.group_size % c == 0)
    else:
        each = min(each, 16)
    dtype = weight.scale.dtype if weight.scale.dtype in _SCALES else torch.bfloat16
    if weight.zero is not None and weight.zero.dtype.is_floating_point:
        dtype = torch.promote_types(dtype, weight.zero.dtype)
    repeats = weight.group_size // each

    def spread(values: Tensor) -> Tensor:
        return values.to(dtype).repeat_interleave(repeats, 1)

    return spread(weight.scale), None if weight.zero is None else spread(weight.zero), each
