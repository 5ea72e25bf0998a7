"""Weights that a file holds quantized, as kernels take them: stacked, and one behind the other.

A layer may be made of several of the file's tensors, such as wqkv of three. Where their types
differ, all of them take the narrowest form that holds every one's numbers exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantbench.ops.formats import TABLES, Packed
from quantbench.ops.packing import pack, unpack


@dataclass(frozen=True)
class PackedForm:
    """How a weight is stored; its text is the scheme that quantize/schemes/stored.py reads."""

    format: str  # as in ops/formats.py
    bits: int
    group_size: int  # 0: the whole row
    scale: str = "float16"  # dtypes
    zero: str = "none"
    outer: bool = False
    whole: float | None = None  # what multiplies everything
    activation: str = ""  # how activations are rounded: of quantize.spec.Stored
    static: float | None = None  # the scale of a static one

    def __str__(self) -> str:
        text = f"stored-{self.format}-{self.bits}-{self.group_size}-{self.scale}-{self.zero}"
        text += "-outer" * self.outer + "-whole" * (self.whole is not None)
        return text + (self.activation and f"-{self.activation}")

    @classmethod
    def of(cls, weight: Packed) -> "PackedForm | None":
        """How a weight is stored, which may be on the meta device but for its tensor_scale; None
        where the kernels have no group of that size."""
        groups = weight.scale.shape[1]
        group_size = 0 if groups == 1 else weight.group_size
        if group_size not in _GROUP_SIZES or weight.group_size * groups % (group_size or 8):
            return None
        scale, zero = (_named(part) for part in (weight.scale, weight.zero))
        whole = None if weight.tensor_scale is None else float(weight.tensor_scale)
        return cls(weight.format, weight.bits, group_size, scale, zero, whole=whole)


_GROUP_SIZES = (0, 8, 16, 32, 64, 128, 256, 512, 1024)  # of quantize.spec.Stored
_NAMES = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}


def _named(part: Tensor | None) -> str:
    if part is None:
        return "none"
    return _NAMES.get(part.dtype) or str(part.dtype).removeprefix("torch.")


_NOT_INTEGERS = ("fp8", "nf4", "bnb-fp4")  # nor integers after scaling


def common(forms: Sequence[PackedForm]) -> PackedForm | None:
    """The form in which weights of these forms can be stacked; None: there is none."""
    first = forms[0]
    if all(form == first for form in forms):
        return first
    rounding = {"activation": first.activation, "static": first.static}
    if any((form.activation, form.static) != tuple(rounding.values()) for form in forms):
        return None
    if first.whole is not None:
        folded = [replace(form, scale="float32", whole=None) for form in forms]
        return folded[0] if all(form == folded[0] for form in folded) else None
    integers = all(form.format in ("int", "uint") for form in forms)
    if any(not form.group_size or form.format in _NOT_INTEGERS or form.whole for form in forms):
        return None
    least = min(form.group_size for form in forms)
    if integers and all(form.outer for form in forms):
        bits = max(form.bits for form in forms)
        return PackedForm("uint", bits, least, "int8", "int8", True, **rounding)
    return PackedForm("int", 8, least, "float32", "float32", **rounding)


def widened(weight: Packed, form: PackedForm) -> Packed:
    """The same numbers, exactly, in a form that `common` gave for that of `weight` and others."""
    if weight.tensor_scale is not None:
        return replace(weight, scale=weight.scale.float() * weight.tensor_scale, tensor_scale=None)
    repeats = weight.group_size // form.group_size

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(repeats, 1)

    codes = weight.planes[0] if weight.bits == 8 else unpack(weight.planes, weight.bits)
    if form.outer:
        scale, zero, outer = weight.scale, weight.zero, weight.outer
        if weight.format == "int":  # s · (code - middle) is s · code + s · -middle
            middle = -float(1 << (weight.bits - 1))
            zero, outer = scale, torch.stack((outer[..., 0], outer[..., 0] * middle), -1)
        planes = pack(codes, form.bits)
        scale, zero = spread(scale), spread(zero)
        return Packed(planes, scale, zero, None, "uint", form.bits, form.group_size, outer)
    scale, zero = weight.scales
    if weight.format in TABLES:
        unit = 2.0 if weight.format == "fp4" else 1.0  # E2M1 has halves
        numbers = torch.tensor([value * unit for value in TABLES[weight.format]])
        signed, scale = numbers.to(torch.int8)[codes.int()], scale / unit
    elif weight.format == "int" and weight.bits < 8:
        signed = codes.to(torch.int8) - (1 << (weight.bits - 1))
    else:
        signed = codes.view(torch.int8)
    zero = torch.zeros_like(scale) if zero is None else zero
    return Packed([signed], spread(scale), spread(zero), None, "int", 8, form.group_size)


def stacked(weights: Sequence[Packed]) -> Packed:
    """Weights of one form, one behind the other."""
    first = weights[0]
    if len(weights) == 1:
        return first
    named = [weight.by_row for weight in weights]
    return first.with_rows({name: torch.cat([parts[name] for parts in named]) for name in named[0]})
