"""-hqq on the CPU, in C++: the same numbers as ops/hqq.py gives.

scale, zero = fit(w, scale, zero, bits)
"""

import torch
from torch import Tensor

from quantbench.ops.cpu import build

torch.library.define(
    "quantbench::cpu_hqq", "(Tensor w, Tensor scale, Tensor zero, int bits) -> (Tensor, Tensor)"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.register_fake("quantbench::cpu_hqq")
def _(w, scale, zero, bits):
    return torch.empty_like(scale), torch.empty_like(zero)


def fit(w: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scale and zero point that ops.hqq.fit finds, in C++.

    w is float32, bfloat16 or float16; scale and zero are float16 with float16 weights and bfloat16
    with the others; group sizes are multiples of 4, at most 256.

    Raises KernelError if the C++ kernels cannot be built.
    """
    build.load()
    return torch.ops.quantbench.cpu_hqq(w.contiguous(), scale.contiguous(), zero.contiguous(), bits)
