"""LFM2 and LFM2.5 (https://arxiv.org/abs/2511.23404): most layers have a short convolution between
two gates in the place of attention.

    b, c, x = w_in(x)
    w_out(c · conv(b · x))
"""

from __future__ import annotations

from torch import Tensor, nn

from quantbench.kv_cache.base import LayerMemory
from quantbench.kv_cache.state import Columns
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Block, Transformer
from quantbench.models.short_conv import ShortConv


class Lfm2(Transformer):
    """The whole model; see models.llama.Transformer."""

    def block(self, number: int) -> Block:
        block = Block(self.config, number)
        if self.config.layers[number].recurrent:
            block.attention = GatedConv(self.config)
        return block


class GatedConv(nn.Module):
    """A short convolution between two gates, in the place of attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.recurrent, self.dim = config.recurrent, config.dim
        self.w_in = nn.Linear(config.dim, 3 * config.dim, bias=self.recurrent.bias)
        self.conv = ShortConv(self.recurrent, config.dim)
        self.w_out = nn.Linear(config.dim, config.dim, bias=self.recurrent.bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
        memory: LayerMemory | None = None,
    ) -> Tensor:  # fmt: skip
        """x (B, S, D) → (B, S, D); positions (S,)."""
        if memory is None:
            memory = Columns(self.recurrent, self.dim, len(x), x.dtype, x.device)
        before, behind, mixed = self.w_in(x).chunk(3, -1)
        y = self.conv(before * mixed, positions, memory).type_as(x)
        return self.w_out(behind * y)
