"""Sums over the ranks of one machine, through memory that they share.

handle = open_memory("/dev/shm/some-file", rank, size)      # 0: not possible here
ranks = SharedMemoryRanks(rank, size, group, handle)        # exchanges on the CPU

A rank that fails in a decoding step over the ranks (step.py) ends it for all: every later call of
these or of a step raises RuntimeError on every rank.
"""

import ctypes
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from quantbench.ops.cpu import build
from quantbench.ops.ranks import Ranks

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
    """A handle for SharedMemoryRanks; 0 if the memory cannot be had. All ranks open one path.

    None may use it before all have opened it. Raises KernelError without the C++ kernels."""
    function = build.load().quantbench_ranks_open
    function.restype = ctypes.c_int64
    function.argtypes = (ctypes.c_char_p, *[ctypes.c_int64] * 3)
    return function(os.fsencode(path), rank, size, CAPACITY * torch.float32.itemsize)


class SharedMemoryRanks(Ranks):
    """Ranks that have opened one memory: `memory` is its handle.

    Their calls raise RuntimeError when another rank has ended or failed."""

    def sum(self, x: Tensor) -> Tensor:
        wide = x.float().contiguous()
        return torch.ops.quantbench.cpu_ranks_sum(wide, self.memory).to(x.dtype)

    def gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        widths = widths or [x.shape[-1]] * self.size
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        all_rows = torch.ops.quantbench.cpu_ranks_gather(rows, self.memory, list(widths))
        return all_rows.view(*x.shape[:-1], -1)
