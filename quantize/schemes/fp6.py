"""fp6: weights in 6-bit floating point (E3M2), one scale per row.

The format of FP6-LLM (Xia et al. 2024, https://arxiv.org/abs/2401.14112), which torchao once had;
here its bits lie in two planes, and it takes bfloat16, float16 and float32 activations alike.
"""

import torch
from torch import Tensor

from quantbench.ops.packing import pack
from quantbench.quantize.kernels import our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.scheme import Scheme, multiple_refuses
from quantbench.quantize.spec import Float6

E3M2_MAX = 28.0


def quantize(w: Tensor, spec: Float6) -> PackedWeight:
    """The nearest E3M2 number, ties to even, to w / scale; scale = max|w| / 28 of the row."""
    w32 = w.float()
    scale = w32.abs().amax(1, keepdim=True) / E3M2_MAX
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    scaled = (w32 * inverse.clamp(max=torch.finfo(torch.float32).max)).clamp(-E3M2_MAX, E3M2_MAX)
    return PackedWeight.make(w, pack(_codes(scaled), 6), scale, "fp6", 6)


def _codes(x: Tensor) -> Tensor:
    """The nearest E3M2 codes, ties to even, of float32 numbers up to 28: a sign, an exponent from
    -2 on, below which steps are no finer, and two bits of mantissa."""
    size = x.abs()
    exponent = size.clamp(min=2**-2).view(torch.int32) >> 23  # + 127
    finest = (256 - exponent << 23).view(torch.float32)  # 2 to the power of 2 - exponent
    steps = (size * finest).round_().int()  # up to 8, which is the next exponent's 4
    return (steps + 4 * (exponent - 125) + 32 * x.signbit()).to(torch.uint8)


SCHEMES = {Float6: Scheme(quantize, our_kernels(), multiple_refuses(4))}
