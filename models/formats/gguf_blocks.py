"""The blocks of GGUF's types as packed weights, with the file's own numbers; and blocks to write.

    packed = PACKED["Q4_K"].read(data, columns)     # an ops.formats.Packed
    PACKED["Q4_K"].form                             # how it is stored

A block is a few scales and the codes of 32, 64 or 256 columns. Its layout is that of block_q4_0 and
the others in llama.cpp's ggml-common.h; the gguf package dequantizes them, and is the oracle of the
tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantbench.models.formats.packed import PackedForm
from quantbench.ops.formats import OUTER, Packed
from quantbench.ops.packing import PLANES, pack, unpack

ELEMENTS_AT_ONCE = 1 << 17  # of a matrix: its float32 copies stay in the second-level cache
Scales = tuple[Tensor, Tensor | None]  # scales and zeros of a block, if it has any: (N, blocks, …)


def _float16(data: Tensor) -> Scales:
    numbers = data.contiguous().view(torch.float16)
    return numbers[..., :1], numbers[..., 1:] if numbers.shape[-1] > 1 else None


@dataclass(frozen=True)
class Type:
    """A type whose numbers ops/formats.py has a format for."""

    form: PackedForm
    # Bytes of a block's fields, in their order: low and high have the codes' planes, scales is what
    # `scales` reads, and outer the float16 of 256 columns' scales, or two, of scales and of zeros.
    fields: Mapping[str, int]
    spans: tuple[int, ...]  # of low and high, as `_codes` takes them
    scales: Callable[[Tensor], Scales] = _float16

    def read(self, data: Tensor) -> Packed:
        """A weight (N, K) from its bytes, (N, bytes of a row)."""
        form, blocks = self.form, data.unflatten(-1, (-1, sum(self.fields.values())))
        parts = dict(zip(self.fields, blocks.split([*self.fields.values()], -1), strict=True))
        widths = dict(zip(("low", "high"), PLANES[form.bits], strict=False))
        planes = [
            pack(_codes(parts[name], width, span).flatten(-2), width)[0]
            for (name, width), span in zip(widths.items(), self.spans, strict=True)
        ]
        if form.bits == 8:
            planes = [planes[0].view(torch.int8)]
        scale, zero = (
            None if part is None else part.flatten(1).contiguous()
            for part in self.scales(parts["scales"])
        )
        outer = None
        if form.outer:
            factor, less = _float16(parts["outer"])
            outer = torch.cat((factor, torch.zeros_like(factor) if less is None else -less), -1)
        return Packed(planes, scale, zero, None, form.format, form.bits, form.group_size, outer)


def _codes(data: Tensor, bits: int, span: int) -> Tensor:
    """Codes of some bits: each `span` bytes hold the lowest bits of one span of columns, then the
    next bits of the next span, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    some = data.unflatten(-1, (-1, 1, span)) >> shifts
    return (some & ((1 << bits) - 1)).flatten(-3)


def _of_q2_k(data: Tensor) -> Scales:
    return (data & 15).char(), (data >> 4).char()


def _of_q3_k(data: Tensor) -> Scales:
    return (_codes(data[..., :8], 4, 8) | _codes(data[..., 8:], 2, 4) << 4).char() - 32, None


def _of_q4_k(data: Tensor) -> Scales:
    """8 scales and 8 zeros of 6 bits from 12 bytes."""
    scales, zeros, rest = data.split((4, 4, 4), -1)
    more_scales = rest & 15 | scales >> 6 << 4
    more_zeros = rest >> 4 | zeros >> 6 << 4
    first = torch.cat((scales & 63, more_scales), -1), torch.cat((zeros & 63, more_zeros), -1)
    return first[0].char(), first[1].char()


def _of_iq4_xs(data: Tensor) -> Scales:
    return (_codes(data[..., 2:], 4, 1) | _codes(data[..., :2], 2, 1) << 4).char() - 32, None


def _of_nvfp4(data: Tensor) -> Scales:
    return (data & 127).view(torch.float8_e4m3fn), None


def _of(dtype: torch.dtype) -> Callable[[Tensor], Scales]:
    return lambda data: (data.contiguous().view(dtype), None)


def _of_k(format: str, bits: int, group_size: int, zero: str = "none") -> PackedForm:
    return PackedForm(format, bits, group_size, "int8", zero, outer=True)


_UINT = {"zero": "float16"}
# fmt: off
PACKED = {
    "Q4_0": Type(PackedForm("int", 4, 32), {"scales": 2, "low": 16}, (16,)),
    "Q4_1": Type(PackedForm("uint", 4, 32, **_UINT), {"scales": 4, "low": 16}, (16,)),
    "Q5_0": Type(PackedForm("int", 5, 32), {"scales": 2, "high": 4, "low": 16}, (16, 1)),
    "Q5_1": Type(PackedForm("uint", 5, 32, **_UINT), {"scales": 4, "high": 4, "low": 16}, (16, 1)),
    "Q8_0": Type(PackedForm("int", 8, 32), {"scales": 2, "low": 32}, (32,)),
    "Q2_K": Type(_of_k("uint", 2, 16, "int8"), {"scales": 16, "low": 64, "outer": 4}, (32,),
                 _of_q2_k),
    "Q3_K": Type(_of_k("int", 3, 16), {"high": 32, "low": 64, "scales": 12, "outer": 2}, (32, 32),
                 _of_q3_k),
    "Q4_K": Type(_of_k("uint", 4, 32, "int8"), {"outer": 4, "scales": 12, "low": 128}, (32,),
                 _of_q4_k),
    "Q5_K": Type(_of_k("uint", 5, 32, "int8"),
                 {"outer": 4, "scales": 12, "high": 32, "low": 128}, (32, 32), _of_q4_k),
    "Q6_K": Type(_of_k("int", 6, 16), {"low": 128, "high": 64, "scales": 16, "outer": 2}, (64, 32),
                 _of(torch.int8)),
    "IQ4_NL": Type(PackedForm("iq4nl", 4, 32), {"scales": 2, "low": 16}, (16,)),
    "IQ4_XS": Type(_of_k("iq4nl", 4, 32), {"outer": 2, "scales": 6, "low": 128}, (16,), _of_iq4_xs),
    "MXFP4": Type(PackedForm("fp4", 4, 32, "e8m0"), {"scales": 1, "low": 16}, (16,),
                  _of(torch.float8_e8m0fnu)),
    "NVFP4": Type(PackedForm("fp4", 4, 16, "e4m3"), {"scales": 4, "low": 32}, (8,), _of_nvfp4),
}
# fmt: on
assert OUTER == 256  # columns of a block of the types with K in their name


# ---------------------------------------------------------------------------------- written


def encoded(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """A tensor (…, K) of floats in the file's bytes, (rows, bytes of a row)."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    some = torch.split(rows, max(1, ELEMENTS_AT_ONCE // rows.shape[1]))
    quantize = q6_k if kind.name == "Q6_K" else lambda x: gguf.quants.quantize(x, kind)
    return np.concatenate([quantize(part.float().numpy()) for part in some])


def blocks(weight: Packed) -> tuple[Tensor, gguf.GGMLQuantizationType]:
    """A symmetric weight (N, K) of 4 or 8 bits in groups of 32 as Q4_0 or Q8_0, with its own
    numbers: uint8 (N, bytes of a row).

    Raises ValueError where float16 does not hold a scale.
    """
    if weight.bits == 8:
        codes = weight.planes[0].view(torch.uint8).unflatten(-1, (-1, 32))
        used, kind = codes.any(-1), gguf.GGMLQuantizationType.Q8_0
    else:
        unpacked = unpack(weight.planes, 4).unflatten(-1, (-1, 2, 16))
        codes, used = unpacked[..., 0, :] | unpacked[..., 1, :] << 4, (unpacked != 8).any((-1, -2))
        kind = gguf.GGMLQuantizationType.Q4_0
    scale = weight.scale.half()
    if (used & (scale.float() != weight.scale.float())).any():
        raise ValueError("float16 does not hold its scales")
    return torch.cat((scale[..., None].view(torch.uint8), codes), -1).flatten(1), kind


def q6_k(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 (N, K), K a multiple of 256, as Q6_K: bytes (N, K / 256 · 210). The gguf package
    reads this format, and does not write it.

    256 weights lie together: the lower four bits of each, the upper two, an int8 scale for every
    16, and a float16 by which these are multiplied. The weight of a group that is farthest from 0
    becomes -32, so that its neighbours' range is used whole.
    """
    groups = rows.reshape(-1, 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)[..., 0]
    wanted = largest / -32
    d = (np.abs(wanted).max(-1, keepdims=True) / 127).astype(np.float16)
    step = d.astype(np.float32)
    scales = np.round(np.divide(wanted, step, out=np.zeros_like(wanted), where=step != 0))
    scales = scales.clip(-128, 127)
    step = (step * scales)[..., None]
    codes = np.round(np.divide(groups, step, out=np.zeros_like(groups), where=step != 0))
    codes = (codes.clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    lower = low[:, :, :2] | low[:, :, 2:] << 4
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = (lower, upper, scales.astype(np.int8).view(np.uint8), d.view(np.uint8))
    blocks = np.concatenate([part.reshape(len(groups), -1) for part in parts], axis=1)
    return blocks.reshape(len(rows), -1)
