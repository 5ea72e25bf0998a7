"""The product with an unquantized weight on the CPU, in C++, for a few rows of x.

    y = linear(x, weight)           # computes torch.nn.functional.linear(x, weight)

It reads the weight at the memory's speed; torch's library (oneDNN) reaches two thirds of that.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.ops.cpu import build

torch.library.define("quantbench::cpu_plain", "(Tensor x, Tensor weight) -> Tensor")

MAX_ROWS = 16  # rows of x; for more rows torch's library (oneDNN) is faster, unless there is AMX


@torch.library.register_fake("quantbench::cpu_plain")
def _(x, weight):
    return x.new_empty((x.shape[0], weight.shape[0]))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…, K) times weight (N, K) → (…, N) in their dtype; sums are float32, and rounded once.

    float32, bfloat16 or float16. Raises RuntimeError for anything else.
    """
    _ready()
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] > MAX_ROWS and not _tiles(x.dtype, x.shape[-1]):
        return F.linear(x, weight)
    y = torch.ops.quantbench.cpu_plain(flat, weight)
    return y.view(*x.shape[:-1], y.shape[-1])


@torch.compiler.assume_constant_result
def _ready() -> bool:
    """Load the C++ library, outside of what torch.compile traces."""
    build.load()
    return True


@torch.compiler.assume_constant_result
def _tiles(dtype: torch.dtype, columns: int) -> bool:
    return build.isa() == "amx" and dtype == torch.bfloat16 and columns % 32 == 0
