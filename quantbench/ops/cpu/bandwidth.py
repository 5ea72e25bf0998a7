"""How fast the CPU's memory can be read, and how many products it makes a second: the speed limits
of decoding and of prompts."""

import torch
from torch import Tensor

from quantbench.ops.cpu import build

torch.library.define("quantbench::cpu_read", "(Tensor x) -> int")
torch.library.define(
    "quantbench::cpu_spin", "(Tensor weight, ScalarType dtype, int tokens, int rounds) -> int"
)


def read(x: Tensor) -> int:
    """Read all bytes of x on all of torch's threads. x: contiguous, a multiple of 256 KiB.

    Returns the exclusive or of all words, so that the compiler cannot remove the reads. Raises
    KernelError if the C++ kernels cannot be built.
    """
    build.load()
    return torch.ops.quantbench.cpu_read(x)


def spin(weight: Tensor, dtype: torch.dtype, tokens: int, rounds: int) -> int:
    """Repeat the instructions with which so many rows of x are multiplied by a weight, packed or
    plain, on numbers that are at hand, on all of torch's threads.

    Returns the number of products; 0 where another library multiplies, or a loop that has no such
    form (AMX, and a few rows). Raises KernelError if the C++ kernels cannot be built.
    """
    build.load()
    return torch.ops.quantbench.cpu_spin(weight, dtype, tokens, rounds)
