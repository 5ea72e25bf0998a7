"""E4M3, 8-bit floats of 4 exponent and 3 mantissa bits, by integers: for compiled code on a card.

Triton converts to and from the type from compute capability 8.9 on. Below it inductor leaves an
operation that has a tensor of the type to plain torch, and refuses one among the inputs of a
region that it compiles once for all layers.
"""

import torch
from torch import Tensor

MANTISSA = 23 - 3  # bits of a float32 that E4M3 drops
BIAS = (127 - 7) << 3  # of exponents, in front of three bits
LEAST_NORMAL = 2.0**-6


def to_bits(x: Tensor) -> Tensor:
    """uint8 codes of the numbers nearest to x, float32 from -448 to 448; halves go to even."""
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (_rounded(magnitude) >> MANTISSA) - BIAS
    subnormal = (x.abs() / 2**-9).round().int()
    codes = torch.where(x.abs() < LEAST_NORMAL, subnormal, normal)
    return (codes | ((bits >> 24) & 0x80)).to(torch.uint8)


def nearest(x: Tensor) -> Tensor:
    """The numbers themselves, float32, as `to_bits` rounds to them."""
    normal = (_rounded(x.view(torch.int32)) >> MANTISSA << MANTISSA).view(torch.float32)
    return torch.where(x.abs() < LEAST_NORMAL, (x / 2**-9).round() * 2**-9, normal)


def _rounded(bits: Tensor) -> Tensor:
    """Half of the last bit that stays is added, but for a tie whose last bit is 0."""
    return bits + (1 << (MANTISSA - 1)) - 1 + ((bits >> MANTISSA) & 1)
