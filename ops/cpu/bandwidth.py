"""How fast the CPU's memory can be read: the limit that decode is measured against."""

import torch
from torch import Tensor

from ops.cpu import build

torch.library.define("quantbench::cpu_read", "(Tensor x) -> int")


def read(x: Tensor) -> int:
    """Read all of x's bytes (contiguous; whole quarters of a megabyte) on all of torch's threads.

    Returns their words' exclusive or, so that nobody can leave the reading out. Raises KernelError
    where the C++ kernels cannot be built.
    """
    build.load()
    return torch.ops.quantbench.cpu_read(x)
