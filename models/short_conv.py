"""The short convolution of layers without attention: each column sees itself and a few before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantbench.kv_cache.state import Columns
from quantbench.models.recurrent import Recurrent


class ShortConv(nn.Module):
    """Every channel's own product with the last columns, oldest first."""

    def __init__(self, recurrent: Recurrent, dim: int) -> None:
        """dim: the model's width."""
        super().__init__()
        channels = recurrent.columns(dim)
        self.weight = nn.Parameter(torch.empty(channels, 1, recurrent.kernel))
        self.bias = nn.Parameter(torch.zeros(channels)) if recurrent.bias else None
        nn.init.kaiming_uniform_(self.weight)

    def forward(self, x: Tensor, positions: Tensor, memory: Columns) -> Tensor:
        """x (B, S, C) → (B, S, C) in float32."""
        columns, count = memory.convolved(positions, x).float(), x.shape[1]
        weight = self.weight.float()[:, 0].unbind(1)
        y = sum(columns[:, i : i + count] * part for i, part in enumerate(weight))
        return y if self.bias is None else y + self.bias.float()
