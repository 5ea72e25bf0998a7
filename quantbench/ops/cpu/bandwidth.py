"""How fast the CPU's memory can be read: the speed limit of decoding."""

import torch
from torch import Tensor

from quantbench.ops.cpu import build

torch.library.define("quantbench::cpu_read", "(Tensor x) -> int")


def read(x: Tensor) -> int:
    """Read all bytes of x on all of torch's threads. x: contiguous, a multiple of 256 KiB.

    Returns the exclusive or of all words, so that the compiler cannot remove the reads. Raises
    KernelError if the C++ kernels cannot be built.
    """
    build.load()
    return torch.ops.quantbench.cpu_read(x)
