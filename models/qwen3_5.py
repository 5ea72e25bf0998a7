"""Qwen3.5 to 3.8, their mixtures of experts, and Qwen3-Next: three of four layers have a gated
delta rule in the place of attention (https://arxiv.org/abs/2412.06464).

    q, k, v, z = w_in(x)                    q, k, v = silu(conv(q, k, v))
    y = delta_rule(q, k, v, decay(x), beta(x))
    w_out(norm(y) · silu(z))

The other layers have attention with a gate. Norms but that of y multiply by 1 + weight.

Shapes: B rows, S positions, D model width, H value heads, G key heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.kv_cache.base import LayerMemory
from quantbench.kv_cache.state import DeltaState
from quantbench.models.config import ModelConfig
from quantbench.models.gemma import OffsetNorm
from quantbench.models.llama import Block
from quantbench.models.mixtral import Mixtral, MixtureOfExperts
from quantbench.models.short_conv import ShortConv


class Qwen35(Mixtral):
    """The whole model; see models.llama.Transformer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norm = OffsetNorm(config.dim, config.norm_eps)

    def block(self, number: int) -> Block:
        mixture = self.config.mixture
        dense = mixture is None or mixture.is_dense(number)
        block = Block(self.config, number, None if dense else MixtureOfExperts(self.config))
        for name, norm in [*block.named_modules()]:
            if isinstance(norm, nn.RMSNorm):
                block.set_submodule(name, OffsetNorm(*norm.normalized_shape, norm.eps))
        if self.config.layers[number].recurrent:
            block.attention = GatedDelta(self.config)
        return block


class GatedDelta(nn.Module):
    """A gated delta rule behind a short convolution, in the place of attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.recurrent, self.dim = config.recurrent, config.dim
        (first, _), (_, inner) = self.recurrent.linear_shapes(config.dim).values()
        self.w_in = nn.Linear(config.dim, first, bias=False)
        self.conv = ShortConv(self.recurrent, config.dim)
        self.gates = Gates(config.dim, self.recurrent.value_heads)
        self.norm = nn.RMSNorm(self.recurrent.value_width, config.norm_eps)
        self.w_out = nn.Linear(inner, config.dim, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
        memory: LayerMemory | None = None,
    ) -> Tensor:  # fmt: skip
        """x (B, S, D) → (B, S, D); positions (S,)."""
        r, (B, S, _) = self.recurrent, x.shape
        if memory is None:
            memory = DeltaState(r, self.dim, B, x.dtype, x.device)
        mixed, gate = self.w_in(x).split((r.columns(self.dim), self.w_out.in_features), -1)
        mixed = F.silu(self.conv(mixed, positions, memory))  # float32
        keys = r.key_heads * r.key_width
        query, key, value = mixed.split((keys, keys, self.w_out.in_features), -1)
        query, key = (unit(part.view(B, S, -1, r.key_width)) for part in (query, key))
        shared = r.value_heads // r.key_heads
        if shared > 1:
            tile = (1, 1, shared, 1)
            query, key = (
                part.repeat(tile) if r.tiled else part.repeat_interleave(shared, 2)
                for part in (query, key)
            )
        value = value.view(B, S, -1, r.value_width)
        heads = (part.transpose(1, 2) for part in (query * r.key_width**-0.5, key, value))
        y = memory.update(positions, *heads, *self.gates(x)).transpose(1, 2).type_as(x)
        gate = F.silu(gate.float()).view(y.shape)
        return self.w_out((self.norm(y) * gate).type_as(x).view(B, S, -1))


def unit(x: Tensor) -> Tensor:
    """x (…, E) with length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Gates(nn.Module):
    """How much the state decays and takes from each token. They stay in full precision: they have a
    thousandth of the weights, and a state adds up their errors over the whole text."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * heads, dim))  # of beta, then of decay
        self.log_rate = nn.Parameter(torch.zeros(heads))
        self.shift = nn.Parameter(torch.ones(heads))
        nn.init.uniform_(self.weight, -0.035, 0.035)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, S, D) → decay, the logarithm of what is left, and beta; both (B, H, S) float32."""
        beta, step = F.linear(x.float(), self.weight.float()).mT.chunk(2, 1)
        step = F.softplus(step + self.shift.float()[:, None])
        return -self.log_rate.float().exp()[:, None] * step, beta.sigmoid()
