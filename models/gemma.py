"""Gemma 2 (https://arxiv.org/abs/2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).

They differ from models.llama.Transformer in three points: embeddings are multiplied by the root of
the model's width, norms multiply by 1 + weight, and the gate goes through GELU instead of SiLU. The
rest is in `ModelConfig`: windows and rotary bases by layer, caps of scores and logits, norms behind
attention and feed-forward network.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.models.config import ModelConfig
from quantbench.models.llama import Block, Transformer


class Gemma(Transformer):
    """The whole model; see models.llama.Transformer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norm = OffsetNorm(config.dim, config.norm_eps)

    def block(self, number: int) -> Block:
        block = Block(self.config, number)
        block.feed_forward.activation = gelu
        for name, norm in [*block.named_modules()]:
            if isinstance(norm, nn.RMSNorm):
                block.set_submodule(name, OffsetNorm(*norm.normalized_shape, norm.eps))
        return block

    def embed(self, tokens: Tensor) -> Tensor:
        x = super().embed(tokens)
        return x * torch.tensor(self.config.dim**0.5, dtype=x.dtype)  # rounded, as in training


def gelu(x: Tensor) -> Tensor:
    """GELU with a tanh in place of the normal distribution."""
    return F.gelu(x, approximate="tanh")


class OffsetNorm(nn.RMSNorm):
    """An RMS norm that multiplies by 1 + weight, in float32."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, D) → the same shape and dtype."""
        scale = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).type_as(x)


class Scale(nn.Module):
    """Factors (n,), in a module, because loaders take a model's parameters by its modules."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count))
