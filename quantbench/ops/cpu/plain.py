"""The product with an unquantized weight on the CPU, in C++.

    y = linear(x, weight)           # computes torch.nn.functional.linear(x, weight)

For a few rows of x it reads the weight at the memory's speed; torch's library (oneDNN) reaches two
thirds of that. For many rows of 16-bit numbers on a CPU without instructions for them it converts
tiles of the weight to float32, and is 1.5 to 4 times as fast as torch (docs/LOG.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.ops.cpu import build

torch.library.define("quantbench::cpu_plain", "(Tensor x, Tensor weight) -> Tensor")

MAX_ROWS = 16  # rows of x; for more, torch's library may be faster: _takes_many
# Instruction sets of x86 without products of bfloat16.
WITHOUT_BF16 = ("avx2", "avxvnni", "avx512", "avx512vnni")


@torch.library.register_fake("quantbench::cpu_plain")
def _(x, weight):
    return x.new_empty((x.shape[0], weight.shape[0]))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…, K) times weight (N, K) → (…, N) in their dtype; sums are float32, and rounded once.

    float32, bfloat16 or float16. Raises RuntimeError for anything else.
    """
    build.ready()
    flat = x.reshape(-1, x.shape[-1])
    if not ours(x.dtype, flat.shape[0], x.shape[-1]):
        return F.linear(x, weight)
    y = torch.ops.quantbench.cpu_plain(flat, weight)
    return y.view(*x.shape[:-1], y.shape[-1])


def ours(dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether `linear` multiplies so many rows of x (…, columns) in C++."""
    return rows <= MAX_ROWS or _takes_many(dtype, columns)


@build.constant_when_traced
def _takes_many(dtype: torch.dtype, columns: int) -> bool:
    """Whether C++ is faster than torch for many rows of x: with AMX, and where oneDNN has no
    instructions for the dtype and torch multiplies without vectors."""
    isa = build.isa()
    if dtype == torch.bfloat16:
        return isa in WITHOUT_BF16 or (isa == "amx" and columns % 32 == 0)
    if dtype == torch.float32 or isa == "portable":
        return False
    return isa in ("avx2", "avxvnni") or not torch.ops.mkldnn._is_mkldnn_fp16_supported()
