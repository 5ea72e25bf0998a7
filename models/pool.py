"""Weights side by side in large pieces of memory, so that they lie in huge pages.

    pool = Pool()
    pool.move(layer)            # its weights are copied, and what they took before is free

The CPU finds a page of 2 MB in its tables as fast as one of 4 KB, so a kernel that reads weights
from memory waits less (docs/LOG.md). The system gives such pages to whole, aligned 2 MB alone: a
matrix of 1.6 MB, as experts have them, gets none, and one of 3 MB one at most.
"""

import torch
from torch import Tensor, nn

from quantbench.devices import return_freed

PIECE = 64 << 20  # bytes of memory that weights share
LARGEST = 16 << 20  # bytes of a weight that is moved: the system gives larger ones huge pages
LINE = 64  # bytes; each weight is aligned to a cache line
KEPT = 1 << 20  # bytes of weights that were moved away, after which malloc returns their memory


class Pool:
    """Pieces of the CPU's memory that are filled with weights."""

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.uint8, device="cpu")  # the newest piece's rest
        self.moved = 0  # bytes since malloc returned memory

    def move(self, module: nn.Module) -> None:
        """Copy the module's parameters into the pool; they stay the same Parameters.

        What is large, elsewhere than on the CPU or in a tensor subclass stays where it is.
        """
        for parameter in module.parameters():
            weight = parameter.data
            size = weight.numel() * weight.element_size()
            moves = type(weight) is Tensor and weight.device.type == "cpu" and size <= LARGEST
            if moves and weight.is_contiguous():
                parameter.data = self._take(size).view(weight.dtype).view(weight.shape)
                parameter.data.copy_(weight)
                self.moved += size
        if self.moved > KEPT:  # or the heap would grow by holes: loading peaked 80 MB higher
            return_freed()
            self.moved = 0

    def _take(self, size: int) -> Tensor:
        lines = -(-size // LINE) * LINE
        if lines > len(self.free):
            self.free = torch.empty(PIECE, dtype=torch.uint8, device="cpu")
        # numpy gives each weight a separate storage. To torch.compile, parts of one
        # storage are aliases, and a region that is compiled once for all layers takes none.
        taken = torch.from_numpy(self.free[:size].numpy())
        self.free = self.free[lines:]
        return taken
