"""The blocks of GGUF's types as packed weights, with the file's own numbers.

    packed = PACKED["Q4_K"].read(data, columns)     # an ops.formats.Packed
    PACKED["Q4_K"].form                             # how it is stored

A block is a few scales and the codes of 32, 64 or 256 columns. Its layout is that of block_q4_0 and
the others in llama.cpp's ggml-common.h; the gguf package dequantizes them, and is the oracle of the
tests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantbench.models.formats.packed import Form
from quantbench.ops.formats import OUTER, Packed
from quantbench.ops.packing import pack

# Codes (…, columns of a block), scales, zeros, and for blocks of 256 columns what multiplies them.
Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Type:
    """A type whose numbers ops/formats.py has a format for."""

    size: int  # bytes of a block
    form: Form
    split: Callable[[Tensor], Parts]  # (N, blocks of a row, size) uint8

    def read(self, data: Tensor) -> Packed:
        """A weight (N, K) from its bytes, (N, bytes of a row)."""
        codes, scale, zero, outer = self.split(data.unflatten(-1, (-1, self.size)))
        codes, form = codes.flatten(-2).contiguous(), self.form
        return Packed(
            [codes] if form.bits == 8 else pack(codes, form.bits),
            scale.flatten(1).contiguous(),
            None if zero is None else zero.flatten(1).contiguous(),
            None,
            form.format,
            form.bits,
            form.group_size,
            outer,
        )


def _fields(data: Tensor, bits: int, span: int) -> Tensor:
    """Codes of some bits: each `span` bytes hold the lowest bits of one span of columns, then the
    next bits of the next span, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    some = data.unflatten(-1, (-1, 1, span)) >> shifts
    return (some & ((1 << bits) - 1)).flatten(-3)


def _float16(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)


def _q4(data: Tensor) -> Parts:
    scale, codes = data.split((2, 16), -1)
    return _fields(codes, 4, 16), _float16(scale), None, None


def _q4_1(data: Tensor) -> Parts:
    scale, zero, codes = data.split((2, 2, 16), -1)
    return _fields(codes, 4, 16), _float16(scale), _float16(zero), None


def _q5_0(data: Tensor) -> Parts:
    scale, high, low = data.split((2, 4, 16), -1)
    codes = _fields(low, 4, 16) | _fields(high, 1, 1) << 4
    return codes, _float16(scale), None, None


def _q5_1(data: Tensor) -> Parts:
    scale, zero, high, low = data.split((2, 2, 4, 16), -1)
    codes = _fields(low, 4, 16) | _fields(high, 1, 1) << 4
    return codes, _float16(scale), _float16(zero), None


def _q8_0(data: Tensor) -> Parts:
    scale, codes = data.split((2, 32), -1)
    return codes.contiguous().view(torch.int8), _float16(scale), None, None


def _outer(scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """(N, blocks, 2) from the float16 of each block; `zero` is subtracted."""
    scale = _float16(scale)
    zero = torch.zeros_like(scale) if zero is None else -_float16(zero)
    return torch.cat((scale, zero), -1)


def _q2_k(data: Tensor) -> Parts:
    scales, codes, scale, zero = data.split((16, 64, 2, 2), -1)
    scales, zeros = scales & 15, scales >> 4
    return _fields(codes, 2, 32), scales.char(), zeros.char(), _outer(scale, zero)


def _q3_k(data: Tensor) -> Parts:
    high, low, scales, scale = data.split((32, 64, 12, 2), -1)
    scales = _fields(scales[..., :8], 4, 8) | _fields(scales[..., 8:], 2, 4) << 4
    codes = _fields(low, 2, 32) | _fields(high, 1, 32) << 2
    return codes, scales.char() - 32, None, _outer(scale)


def _scales_of_k(data: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 zeros of 6 bits from 12 bytes."""
    scales, zeros, rest = data.split((4, 4, 4), -1)
    more_scales = rest & 15 | scales >> 6 << 4
    more_zeros = rest >> 4 | zeros >> 6 << 4
    first = torch.cat((scales & 63, more_scales), -1), torch.cat((zeros & 63, more_zeros), -1)
    return first[0].char(), first[1].char()


def _q4_k(data: Tensor) -> Parts:
    scale, zero, both, codes = data.split((2, 2, 12, 128), -1)
    return _fields(codes, 4, 32), *_scales_of_k(both), _outer(scale, zero)


def _q5_k(data: Tensor) -> Parts:
    scale, zero, both, high, low = data.split((2, 2, 12, 32, 128), -1)
    codes = _fields(low, 4, 32) | _fields(high, 1, 32) << 4
    return codes, *_scales_of_k(both), _outer(scale, zero)


def _q6_k(data: Tensor) -> Parts:
    low, high, scales, scale = data.split((128, 64, 16, 2), -1)
    codes = _fields(low, 4, 64) | _fields(high, 2, 32) << 4
    return codes, scales.contiguous().view(torch.int8), None, _outer(scale)


def _iq4_xs(data: Tensor) -> Parts:
    scale, high, low, codes = data.split((2, 2, 4, 128), -1)
    scales = _fields(low, 4, 1) | _fields(high, 2, 1) << 4
    return _fields(codes, 4, 16), scales.char() - 32, None, _outer(scale)


def _mxfp4(data: Tensor) -> Parts:
    scale, codes = data.split((1, 16), -1)
    return _fields(codes, 4, 16), scale.contiguous().view(torch.float8_e8m0fnu), None, None


def _nvfp4(data: Tensor) -> Parts:
    scale, codes = data.split((4, 32), -1)
    scale = (scale & 127).contiguous().view(torch.float8_e4m3fn)
    return _fields(codes, 4, 8), scale, None, None


def _of_k(format: str, bits: int, group_size: int, zero: str = "none") -> Form:
    return Form(format, bits, group_size, "int8", zero, outer=True)


PACKED = {
    "Q4_0": Type(18, Form("int", 4, 32), _q4),
    "Q4_1": Type(20, Form("uint", 4, 32, zero="float16"), _q4_1),
    "Q5_0": Type(22, Form("int", 5, 32), _q5_0),
    "Q5_1": Type(24, Form("uint", 5, 32, zero="float16"), _q5_1),
    "Q8_0": Type(34, Form("int", 8, 32), _q8_0),
    "Q2_K": Type(84, _of_k("uint", 2, 16, "int8"), _q2_k),
    "Q3_K": Type(110, _of_k("int", 3, 16), _q3_k),
    "Q4_K": Type(144, _of_k("uint", 4, 32, "int8"), _q4_k),
    "Q5_K": Type(176, _of_k("uint", 5, 32, "int8"), _q5_k),
    "Q6_K": Type(210, _of_k("int", 6, 16), _q6_k),
    "IQ4_NL": Type(18, Form("iq4nl", 4, 32), _q4),
    "IQ4_XS": Type(136, _of_k("iq4nl", 4, 32), _iq4_xs),
    "MXFP4": Type(17, Form("fp4", 4, 32, "e8m0"), _mxfp4),
    "NVFP4": Type(36, Form("fp4", 4, 16, "e4m3"), _nvfp4),
}
assert OUTER == 256  # columns of a block of the types with K in their name
