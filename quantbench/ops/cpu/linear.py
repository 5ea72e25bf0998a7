"""The product of x with a transposed packed weight on the CPU, in C++. For a few rows of x, the
weight is read once.

    packed = pack(weight, columns)         # an ops.formats.Packed
    y = linear(x, packed, rows)

It computes what ops.reference.linear computes. Activations are rounded to 8 bits only if the scheme
says so. Otherwise they are multiplied as floats, or as integers of 16 bits (32 for float32). For
many rows of bfloat16, with AMX, weights with several scales in a row are rounded to bfloat16.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.errors import KernelError
from quantbench.ops import packing
from quantbench.ops.cpu import build
from quantbench.ops.formats import OUTER, TABLES, Packed

torch.library.define("quantbench::cpu_linear", "(Tensor x, Tensor packed, int rows) -> Tensor")
torch.library.define(
    "quantbench::cpu_pack_linear",
    "(Tensor plane0, Tensor? plane1, Tensor? plane2, Tensor scale, Tensor? zero, Tensor? outer, "
    "Tensor? table, str format, int columns, int bits, int scale_columns, float factor, "
    "int rounding, bool zero_codes) -> Tensor",
)

# Rows in a block, columns in a unit, most columns in a chunk, bytes of the header: linear/layout.h.
ROWS, UNIT, LARGEST_CHUNK, HEADER = 16, 32, 256, 128
ROUNDINGS = {None: 0, "int8": 1, "int8-asymmetric": 2}  # of activations, as the C++ numbers them
# The integer for 1.0 in the tables of nf4 and bnb-fp4: products with float32 stay exact. A few rows
# of bfloat16 and float16 are multiplied by 16 bits of it, as exact as x in integers is.
_MOST = 2**23 - 1
# The value of one integer step in the inner loop, by format; 1 for formats that are not listed.
_UNITS = {"fp6": 2.0**-4, "fp4": 2.0**-1, "nf4": 1 / _MOST, "bnb-fp4": 1 / _MOST}
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@torch.library.register_fake("quantbench::cpu_linear")
def _(x, packed, rows):
    return x.new_empty((x.shape[0], rows))


@torch.library.register_fake("quantbench::cpu_pack_linear")
def _(plane0, plane1, plane2, scale, zero, outer, table, format, columns, bits, scale_columns, *_):
    """A tensor of the size that geometry() in linear/layout.cpp computes."""
    vectors = 3 if format == "2:4" else bits
    *_, block = _geometry(columns, vectors, scale_columns, scale, zero, outer)
    return plane0.new_empty(HEADER + -(-plane0.shape[0] // ROWS) * block, dtype=torch.uint8)


def _geometry(
    columns: int,
    vectors: int,
    scale_columns: int,
    scale: Tensor,
    zero: Tensor | None,
    outer: Tensor | None,
) -> tuple[int, int, int, int]:
    """Chunks of a block, and bytes of what multiplies their scales, of a chunk's scales, and of the
    block. vectors: bytes of a unit, divided by 64."""
    units = -(-columns // UNIT)
    chunks = -(-units // max(1, scale_columns // UNIT)) if scale_columns else 1
    both = ROWS * (1 if zero is None else 2)
    scales = scale.itemsize * both * max(1, UNIT // scale_columns) if scale_columns else 0
    head = 0 if outer is None else columns // OUTER * 2 * both
    block = head + chunks * scales + units * vectors * 64 + (0 if scale_columns else 4 * ROWS)
    return chunks, head, scales, -(-block // 64) * 64


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
    for shapes that `refuses` rejects, and for weights or scales that are not finite.
    """
    if not weight.scale.is_meta:
        build.load()
    if reason := refuses(weight, columns):
        raise KernelError(f"a weight {reason}")
    scale, zero, scale_columns = _scales(weight, columns)
    factor = _UNITS.get(weight.format, 1.0)
    meta = weight.scale.is_meta
    if weight.tensor_scale is not None and not meta:
        factor *= float(weight.tensor_scale)
    if not meta:
        _check_finite(weight.planes[0], scale, zero, weight.outer, torch.tensor(factor))
    table = None
    if weight.format in TABLES:
        steps = torch.tensor(TABLES[weight.format]) / _UNITS.get(weight.format, 1.0)
        table = steps.round().to(scale.device, torch.int32)
    planes = [plane.contiguous() for plane in weight.planes]
    return torch.ops.quantbench.cpu_pack_linear(
        *(planes + [None, None])[:3],
        scale.contiguous(),
        None if zero is None else zero.contiguous(),
        weight.outer,
        table,
        weight.format,
        columns,
        weight.bits,
        scale_columns,
        factor,
        ROUNDINGS[activation],
        weight.zero is not None and weight.zero.dtype == torch.uint8,
    )


def rows_of(packed: Tensor, like: Packed, columns: int, rows: Tensor) -> Packed:
    """Rows (n,) of a weight (N, columns) that `pack` has packed.

    like: that weight, in any format but 2:4; of its tensors only tensor_scale is read. The result
    may have smaller groups, and bfloat16 in place of scales of 8-bit floats.
    """
    scale, zero, each = _scales(like, columns)
    chunks, head, scale_bytes, size = _geometry(columns, like.bits, each, scale, zero, like.outer)
    number, row, both = torch.arange(len(rows)), rows % ROWS, 1 if zero is None else 2
    blocks = packed[HEADER:].view(-1, size)[rows // ROWS]
    end = head + chunks * scale_bytes + -(-columns // UNIT) * 64 * like.bits

    def of_row(data: Tensor, dtype: torch.dtype) -> Tensor:
        """(n, groups, 1 or 2), scale and zero, from the bytes of those of all rows of a block."""
        data = data.contiguous().view(dtype).view(len(rows), -1, both, ROWS)
        return data.mT[number, :, row]

    chunk = blocks[:, head:end].unflatten(1, (chunks, -1))
    groups, dtype = columns // (each or columns), scale.dtype
    scales = of_row(chunk[..., :scale_bytes] if each else blocks[:, end : end + 4 * ROWS], dtype)
    scale, zeros = scales[:, :groups, 0], scales[:, :groups, -1]
    if zero is not None and like.zero is not None:
        zero = zeros.to(torch.uint8) if like.zero.dtype == torch.uint8 else zeros
    units = chunk[..., scale_bytes:].reshape(len(rows), -1, like.bits, ROWS, 4)
    codes = _codes(units[number, :, :, row], like.bits)[:, :columns]
    if like.bits == 8:
        planes = [(codes ^ 128 if like.format == "int" else codes).view(like.planes[0].dtype)]
    else:
        planes = packing.pack(codes, like.bits)
    outer = None
    if like.outer is not None:
        outer = F.pad(of_row(blocks[:, :head], torch.float16), (0, 2 - both))
    return replace(
        like, planes=planes, scale=scale, zero=zero, outer=outer, group_size=each or columns
    )


def _codes(units: Tensor, bits: int) -> Tensor:
    """Codes (n, columns) uint8 of one row's bytes (n, units, bits, 4): see write_unit in
    linear/pack.cpp."""
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


def _check_finite(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is None or not tensor.is_floating_point():
            continue
        if tensor.dtype == torch.float8_e4m3fn:  # as integers: no copy that is four times as large
            broken = any(
                ((rows.view(torch.uint8) & 127) == 127).any() for rows in tensor.split(1024)
            )
        else:
            wide = tensor.float() if tensor.itemsize == 1 else tensor
            total = wide.sum(dtype=torch.float32)
            broken = not total.isfinite() and not wide.isfinite().all()
        if broken:
            raise KernelError("weights or their scales are NaN or infinite")
