"""Sums over the ranks of one machine, through memory that they share.

handle = open_memory("/dev/shm/some-file", rank, size)      # 0: not possible here
y = total(x, handle)                                        # x float32, of the same shape on all
y = gathered(x, handle, [3, 2])                             # (rows, 3) and (rows, 2) to (rows, 5)

A rank that fails in a decoding step over the ranks (step.py) ends it for all: every later call of
these or of a step raises RuntimeError on every rank.
"""

import ctypes
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from quantbench.ops.cpu import build

torch.library.define("quantbench::cpu_ranks_sum", "(Tensor x, int handle) -> Tensor")
torch.library.define(
    "quantbench::cpu_ranks_gather", "(Tensor x, int handle, int[] widths) -> Tensor"
)
CAPACITY = 1 << 16  # float32 numbers that are exchanged at once: 256 KB for each rank, twice


@torch.library.register_fake("quantbench::cpu_ranks_sum")
def _(x, handle):
    return x.new_empty(x.shape)


@torch.library.register_fake("quantbench::cpu_ranks_gather")
def _(x, handle, widths):
    return x.new_empty((x.shape[0], sum(widths)))


def open_memory(path: str, rank: int, size: int) -> int:
    """A handle for the functions below; 0 if the memory cannot be had. All ranks open one path.

    None may use it before all have opened it. Raises KernelError without the C++ kernels."""
    function = build.load().quantbench_ranks_open
    function.restype = ctypes.c_int64
    function.argtypes = (ctypes.c_char_p, *[ctypes.c_int64] * 3)
    handle: int = function(os.fsencode(path), rank, size, CAPACITY * torch.float32.itemsize)
    return handle


def total(x: Tensor, handle: int) -> Tensor:
    """The sum over ranks of x, float32 and contiguous; the same bits on all of them.

    Raises RuntimeError when another rank has ended or failed."""
    return torch.ops.quantbench.cpu_ranks_sum(x, handle)


def gathered(x: Tensor, handle: int, widths: Sequence[int]) -> Tensor:
    """All ranks' x (rows, K), contiguous, side by side in the order of ranks. widths: each one's K.

    Raises RuntimeError when another rank has ended or failed."""
    return torch.ops.quantbench.cpu_ranks_gather(x, handle, list(widths))
