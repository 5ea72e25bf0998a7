"""uintx-N-G: N-bit weights in groups of G columns, each with a scale and a zero point.

    w ≈ (code - 2**(N - 1)) · scale + zero

which is torchao's "tinygemm" convention; its zero point is a number, not a code, so that a group
far from zero loses nothing. -hqq looks for the scale and zero that fit a group best: ops/hqq.py.
-gptq and -awq begin with these (quantize/gptq.py, run/awq.py).
"""

import torch
from torch import Tensor

from quantbench.ops import hqq as in_torch
from quantbench.ops.cpu import build
from quantbench.ops.cpu import hqq as in_cpp
from quantbench.ops.packing import pack
from quantbench.quantize.kernels import our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.scheme import Scheme, groups_refuse, in_range
from quantbench.quantize.spec import Int4WeightOnly, UintX

# The scale of a group of equal weights, which has no range. About torchao's 1e-6, but this and its
# multiples are exact in 16 bits, so that zeros stay zeros.
SMALLEST_SCALE = 2.0**-20


def quantize(w: Tensor, spec: UintX | Int4WeightOnly) -> PackedWeight:
    """Weights (N, K) in groups along K; scale and zero are (N, K // group_size), 16 bits each."""
    bits, group_size = spec.bits, spec.group_size
    dtype = torch.float16 if w.dtype == torch.float16 else torch.bfloat16
    most = torch.finfo(dtype).max
    scale, zero = (x.clamp(max=most).to(dtype) for x in _from_range(w, bits, group_size))
    if spec.way:
        scale, zero = _fitted(w, scale, zero, bits)
    codes = _codes(w, bits, group_size, scale, zero).to(torch.uint8)
    return PackedWeight.make(w, pack(codes, bits), scale, "int", bits, group_size, zero)


def _from_range(w: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Scale and zero, (N, K // group_size) float32, that span each group from least to most."""
    groups = in_range(w).unflatten(-1, (-1, group_size))
    least, most = groups.amin(-1), groups.amax(-1)
    scale = ((most - least) / (2**bits - 1)).clamp(min=SMALLEST_SCALE)
    return scale.float(), (least + scale * 2 ** (bits - 1)).float()


def _fitted(w: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The best scale and zero of every group, from those of its range; the same on all devices."""
    cpp = w.device.type == "cpu" and w.dtype in in_cpp.DTYPES and build.refusal() is None
    return (in_cpp if cpp else in_torch).fit(w, scale, zero, bits)


def _codes(w: Tensor, bits: int, group_size: int, scale: Tensor, zero: Tensor) -> Tensor:
    """The nearest codes (N, K), for the scale and zero that will be stored."""
    groups = w.float().unflatten(-1, (-1, group_size))
    steps = (groups - zero.float()[..., None]).div_(scale.float()[..., None])
    return steps.round_().add_(1 << (bits - 1)).clamp_(0, 2**bits - 1).flatten(-2)


SCHEMES = {UintX: Scheme(quantize, our_kernels(), groups_refuse)}
