"""The meaning of packed codes in each format: from planes to numbers, in plain torch.

weight[n, k] = value(code[n, k]) · scale[n, k // group_size] (+ zero[n, k // group_size])

where `value` depends on the format:

    int     code - 2**(bits - 1); with 8 bits the code is stored signed, as it is
    uint    code, of at most 7 bits
    fp8     E4M3, as torch.float8_e4m3fn has it
    fp6     E3M2: sign, 3 bits of exponent (bias 3), 2 of mantissa; subnormals, no infinity, no NaN
    fp4     E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    nf4     the 16 quantiles of a normal distribution of QLoRA (Dettmers et al. 2023, appendix E)
    bnb-fp4 the 16 values of bitsandbytes' own FP4 (dDequantizeFP4Tree in its csrc/kernels.cu)
    iq4nl   the 16 integers of llama.cpp's IQ4_NL (kvalues_iq4nl in its ggml-common.h)
    2:4     int with 4 bits; only two of every four columns are stored, with their places

fp8, fp6 and fp4 follow the OCP Microscaling Formats specification, version 1.0, section 5.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantbench.errors import KernelError
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
    "iq4nl": (
        *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
        *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
    ),
}
OUTER = 256  # columns of a row that share an entry of Packed.outer


@dataclass(frozen=True)
class Packed:
    """A quantized (N, K) weight as kernels take it, in plain tensors."""

    # (N, K · width / 8) uint8 each, see ops/packing.py. Format "2:4" has a plane of 4 bits, with
    # two codes for every four columns, and one of 2 bits, with their places, the lower one first.
    planes: list[Tensor]
    scale: Tensor  # (N, K // group_size), of any float dtype; int8 where `outer` multiplies it
    # (N, K // group_size), added after scaling. Of uint8: the code of 0, times -scale.
    zero: Tensor | None
    tensor_scale: Tensor | None  # a float32 scalar that multiplies everything
    format: str
    bits: int  # of a code
    group_size: int  # columns that share a scale
    # (N, K // OUTER, 2) float16: what the scales and the zeros of OUTER columns are multiplied by
    outer: Tensor | None = None

    @property
    def by_row(self) -> dict[str, Tensor]:
        """The tensors that have a row for each of the weight's, by name: plane0, …, scale, …."""
        named = {f"plane{number}": plane for number, plane in enumerate(self.planes)}
        others = {name: getattr(self, name) for name in ("scale", "zero", "outer")}
        return named | {name: part for name, part in others.items() if part is not None}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        tensor_scale = self.tensor_scale
        return self.by_row | ({} if tensor_scale is None else {"tensor_scale": tensor_scale})

    def with_rows(self, named: Mapping[str, Tensor]) -> "Packed":
        """The weight with these tensors in place of those of `by_row`."""
        planes = [named[f"plane{number}"] for number in range(len(self.planes))]
        others = {name: part for name, part in named.items() if not name.startswith("plane")}
        return replace(self, planes=planes, **others)  # type: ignore[arg-type]

    @property
    def scales(self) -> tuple[Tensor, Tensor | None]:
        """The numbers (N, K // group_size) float32 that a group is multiplied by, and added to."""
        scale, zero = self.scale.float(), None if self.zero is None else self.zero.float()
        if self.outer is not None:
            outer = self.outer.float().repeat_interleave(OUTER // self.group_size, 1)
            return scale * outer[..., 0], None if zero is None else zero * outer[..., 1]
        if self.zero is not None and self.zero.dtype == torch.uint8:
            return scale, -self.scale.float() * self.zero.float()
        return scale, zero

    @property
    def plain(self) -> "Packed":
        """The same numbers, but for rounding, in terms that every kernel knows: scales and zeros
        are floats, and integers are of the format "int"."""
        if self.format != "uint" and self.outer is None and not _is_code(self.zero):
            return self
        scale, zero = self.scales
        if self.format == "uint":
            middle = scale * float(1 << (self.bits - 1))
            zero = middle if zero is None else zero + middle
        format = "int" if self.format == "uint" else self.format
        return replace(self, scale=scale, zero=zero, format=format, outer=None)


def _is_code(zero: Tensor | None) -> bool:
    return zero is not None and zero.dtype == torch.uint8


def dequantize(weight: Packed) -> Tensor:
    """The (N, K) float32 numbers of a packed weight."""
    grouped = _values(weight).unflatten(-1, (-1, weight.group_size))
    if weight.zero is not None and weight.outer is None and _is_code(weight.zero):
        grouped, weight = grouped - weight.zero.float()[..., None], replace(weight, zero=None)
    scale, zero = weight.scales
    result = grouped * scale[..., None]
    if zero is not None:
        result = result + zero[..., None]
    if weight.tensor_scale is not None:
        result = result * weight.tensor_scale
    return result.flatten(-2)


def _values(weight: Packed) -> Tensor:
    planes, bits = weight.planes, weight.bits
    if weight.format in ("fp8", "int") and bits == 8:
        return planes[0].float()
    if weight.format == "2:4":
        return expand(unpack(planes[:1], 4).float() - 8, unpack(planes[1:], 2))
    codes = unpack(planes, bits)
    if weight.format in ("int", "uint"):
        return codes.float() - (1 << (bits - 1)) * (weight.format == "int")
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


def check_finite(*tensors: Tensor | None) -> None:
    """Raise KernelError for a plane of floats, a scale or a zero point with NaN or infinity."""
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
