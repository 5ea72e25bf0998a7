"""LFM2 and LFM2.5 (https://arxiv.org/abs/2511.23404): most layers have a short convolution between
two gates in the place of attention.

    b, c, x = w_in(x)
    w_out(c · conv(b · x))

In its mixtures of experts each weight is one expert's probability alone, and a bias helps to
choose the experts of a token alone.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.kv_cache.base import LayerMemory
from quantbench.kv_cache.state import Columns
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Block
from quantbench.models.mixtral import Mixtral, MixtureOfExperts, Router
from quantbench.models.short_conv import ShortConv


class Lfm2(Mixtral):
    """The whole model; see models.llama.Transformer."""

    def block(self, number: int) -> Block:
        mixture = self.config.mixture
        dense = mixture is None or mixture.is_dense(number)
        block = Block(self.config, number, None if dense else SigmoidExperts(self.config))
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


class SigmoidExperts(MixtureOfExperts):
    """models.mixtral.MixtureOfExperts by a SigmoidRouter."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.router = SigmoidRouter(config.dim, config.mixture)
        self.router.scale = dict(config.extras).get("routed_scaling_factor") or 1.0


class SigmoidRouter(Router):
    """A router whose bias is added to the experts' probabilities, and to no weight."""

    scale = 1.0  # of the weights

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As Router.forward."""
        weights = F.linear(tokens.float(), self.weight.float()).sigmoid()
        scores = weights if self.bias is None else weights + self.bias.float()
        chosen = scores.topk(self.mixture.experts_per_token).indices
        weights = weights.gather(-1, chosen)
        if self.mixture.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
        return chosen, weights * self.scale
