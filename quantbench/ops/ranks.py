"""Ranks: processes that compute one model together, each a part of it. What they exchange.

    ranks.sum(x)        # the sum of all ranks' x, the same numbers on every rank
    ranks.gather(x)     # all ranks' x (…, K), one behind the other along the last dimension

Both go through torch.distributed's functional collectives, which torch.compile traces, so that a
model of one rank compiles into one graph. Ranks on the CPU of one machine exchange through memory
that they share (ops/cpu/ranks.py). Every rank has to call them in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of one model."""

    rank: int  # its number, from 0
    size: int  # how many there are
    group: str = ""  # the name of torch.distributed's group; not used if there is one rank
    memory: int = 0  # handle of the memory that they share (ops/cpu/ranks.py); 0: none

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in x's dtype: summed in float32 on the CPU, and rounded once.

        The result is the same on all ranks, bit by bit.
        """
        if self.size == 1:
            return x
        wide = x.float() if x.device.type == "cpu" else x.contiguous()
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(wide, "sum", self.group)).to(x.dtype)

    def gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        """All ranks' x (…, K), in the order of ranks: (…, size · K).

        widths: each rank's K, where they differ.
        """
        if self.size == 1:
            return x
        widths = widths or [x.shape[-1]] * self.size
        most = max(widths)
        x = F.pad(x, (0, most - x.shape[-1])) if min(widths) < most else x.contiguous()
        ops = torch.ops._c10d_functional
        flat = x.reshape(1, -1)
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(flat, self.size, self.group))
        parts = gathered.view(self.size, *x.shape).movedim(0, -2)  # (…, size, K)
        if min(widths) == most:
            return parts.flatten(-2)
        return torch.cat([parts[..., i, :width] for i, width in enumerate(widths)], -1)

    def total(self, values: Sequence[float], device: torch.device | str = "cpu") -> list[float]:
        """The sums of all ranks' values, in float64; for numbers that are reported."""
        if self.size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64, device=device)
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", self.group)).tolist()

    def first(self, values: Sequence[float], device: torch.device | str = "cpu") -> list[float]:
        """Rank 0's values."""
        return self.total([x if self.rank == 0 else 0.0 for x in values], device)

    def meet(self) -> None:
        """Wait until all ranks have come here."""
        if self.size > 1:
            torch.distributed.barrier()


ALONE = Ranks(0, 1)
