"""-hqq on the CPU, in C++: the same numbers as ops/hqq.py gives.

scale, zero = fit(w, scale, zero, bits)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.ops.cpu import build

torch.library.define("quantbench::cpu_hqq", "(Tensor groups, int bits, bool half) -> Tensor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 16  # groups: hqq.h


def fit(w: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scale and zero point that ops.hqq.fit finds, in C++.

    w is float32, bfloat16 or float16; scale and zero are float16 or bfloat16; group sizes are
    multiples of 4, at most 256.

    Raises KernelError if the C++ kernels cannot be built, RuntimeError for other shapes or dtypes.
    """
    build.load()
    dtype = scale.dtype
    torch._check(
        dtype == zero.dtype and dtype in (torch.float16, torch.bfloat16),
        lambda: f"scale and zero are float16 or bfloat16, not {dtype} and {zero.dtype}",
    )
    groups = w.float().unflatten(-1, (scale.shape[1], -1))
    rows = torch.cat((groups, scale.float()[..., None], zero.float()[..., None]), -1).flatten(0, 1)
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % AT_ONCE)).unflatten(0, (-1, AT_ONCE))
    best = torch.ops.quantbench.cpu_hqq(blocks.mT.contiguous(), bits, dtype == torch.float16)
    fitted = best.mT.flatten(0, 1)[: len(rows)].to(dtype).view(*scale.shape, 2)
    return fitted[..., 0].contiguous(), fitted[..., 1].contiguous()
