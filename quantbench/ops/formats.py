"""The meaning of packed codes in each format: from planes to numbers, in plain torch.

weight[n, k] = value(code[n, k]) · scale[n, k // group_size] (+ zero[n, k // group_size])

where `value` depends on the format:

    int     code - 2**(bits - 1); with 8 bits the code is stored signed, as it is
    fp8     E4M3, as torch.float8_e4m3fn has it
    fp6     E3M2: sign, 3 bits of exponent (bias 3), 2 of mantissa; subnormals, no infinity, no NaN
    fp4     E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    nf4     the 16 quantiles of a normal distribution of QLoRA (Dettmers et al. 2023, appendix E)
    bnb-fp4 the 16 values of bitsandbytes' own FP4 (dDequantizeFP4Tree in its csrc/kernels.cu)
    2:4     int with 4 bits; only two of every four columns are stored, with their places

fp8, fp6 and fp4 follow the OCP Microscaling Formats specification, version 1.0, section 5.3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantbench.ops.packing import unpack

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BNB_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
TABLES: dict[str, tuple[float, ...]] = {
    "fp4": _E2M1 + tuple(-value for value in _E2M1),
    "bnb-fp4": _BNB_FP4 + tuple(-value for value in _BNB_FP4),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}


@dataclass(frozen=True)
class Packed:
    """A quantized (N, K) weight as kernels take it, in plain tensors."""

    # (N, K · width / 8) uint8 each, see ops/packing.py. Format "2:4" has a plane of 4 bits, with
    # two codes for every four columns, and a plane of 2 bits, with the places of the two (0 to 3).
    planes: list[Tensor]
    scale: Tensor  # (N, K // group_size), of any float dtype
    zero: Tensor | None  # (N, K // group_size), added after scaling
    tensor_scale: Tensor | None  # a float32 scalar that multiplies everything
    format: str
    bits: int  # of a code
    group_size: int  # columns that share a scale


def dequantize(weight: Packed) -> Tensor:
    """The (N, K) float32 numbers of a packed weight."""
    grouped = _values(weight).unflatten(-1, (-1, weight.group_size))
    result = grouped * weight.scale.float()[..., None]
    if weight.zero is not None:
        result = result + weight.zero.float()[..., None]
    if weight.tensor_scale is not None:
        result = result * weight.tensor_scale
    return result.flatten(-2)


def _values(weight: Packed) -> Tensor:
    planes, bits = weight.planes, weight.bits
    if weight.format == "fp8" or (weight.format == "int" and bits == 8):
        return planes[0].float()
    if weight.format == "2:4":
        return expand(unpack(planes[:1], 4).float() - 8, unpack(planes[1:], 2))
    codes = unpack(planes, bits)
    if weight.format == "int":
        return codes.float() - (1 << (bits - 1))
    if weight.format == "fp6":
        return e3m2(codes)
    table = torch.tensor(TABLES[weight.format], device=codes.device)
    return table[codes.int()]


def e3m2(codes: Tensor) -> Tensor:
    """The float32 numbers of 6-bit codes: (-1)^s · 2^(e - 3) · 1.mm, or 2^-2 · 0.mm where e = 0."""
    exponent, mantissa = (codes >> 2) & 7, (codes & 3).float()
    significand = torch.where(exponent > 0, 4 + mantissa, mantissa) / 4
    magnitude = significand * torch.exp2(exponent.clamp(min=1).float() - 3)
    return torch.where(codes >= 32, -magnitude, magnitude)


def expand(values: Tensor, places: Tensor) -> Tensor:
    """(N, K) from values (N, K/2), two for every four columns, and their places among the four."""
    values, places = values.unflatten(-1, (-1, 2)), places.unflatten(-1, (-1, 2))
    columns = torch.arange(4, device=values.device, dtype=places.dtype)
    chosen = places[..., None] == columns  # (N, K/4, 2, 4)
    return (chosen * values[..., None]).sum(-2).flatten(-2)
