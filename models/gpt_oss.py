"""gpt-oss (OpenAI 2025, https://arxiv.org/abs/2508.10925): models.mixtral.Mixtral and three points.

Attention has sinks; experts bound gate and up, and add 1 to up; all linear layers and the router
have biases. Windows by layer and YaRN are in `ModelConfig`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantbench.models.config import ModelConfig
from quantbench.models.config_checks import POSITIVE
from quantbench.models.llama import Attention, Block, FeedForward
from quantbench.models.mixtral import Mixtral, MixtureOfExperts
from quantbench.models.registry import ATTENTION_BIAS, Architecture
from quantbench.ops.attend import attend
from quantbench.ops.kv import Scoring

# fmt: off
ROW = Architecture("quantbench.models.gpt_oss:GptOss", fields=ATTENTION_BIAS,
    window=lambda number, _: number % 2 == 0, stacked_experts="rows",
    defaults={"max_position": 131072, "num_kv_heads": 8, "head_dim": 64, "norm_eps": 1e-5,
              "rope_theta": 150000.0, "sliding_window": 128, "qkv_bias": True,
              "attention_out_bias": True, "mlp_bias": True, "attention_sinks": True},
    experts={"num_experts": 128, "num_experts_per_tok": 4, "norm_topk_prob": True,
             "router_bias": True},
    extras=dict.fromkeys(("swiglu_alpha", "swiglu_limit"), POSITIVE),
    harmless=("experts_per_token", "initial_context_length"),
    weights={"feed_forward.router": ("mlp.router",),
             "attention.sinks.weight": ("self_attn.sinks",)})
# fmt: on


class GptOss(Mixtral):
    """The whole model; see models.llama.Transformer."""

    def block(self, number: int) -> Block:
        block = Block(self.config, number, BoundedExperts(self.config))
        block.attention = SinkAttention(self.config, number)
        return block


class SinkAttention(Attention):
    """Attention whose heads may look at nothing: at a position with a learned score."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__(config, number)
        self.sinks = Sinks(config.num_heads)

    def attend(self, *arguments: Any) -> Tensor:  # type: ignore[override]
        *tensors, (scale, softcap, _) = arguments
        return attend(*tensors, Scoring(scale, softcap, self.sinks.weight.float()))


class Sinks(nn.Module):
    """The scores (H,), in a module, because loaders take a model's parameters by its modules."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))


class BoundedFeedForward(FeedForward):
    """w2((up + 1) · gate · sigmoid(alpha · gate)), where gate ≤ limit and |up| ≤ limit."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__(config, width)
        extras = dict(config.extras)
        self.alpha, self.limit = (
            extras.get("swiglu_alpha", 1.702),
            extras.get("swiglu_limit", 7.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x (…, D) → (…, D)."""
        gate, up = self.w13(x).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.w2((up + 1) * gate * (gate * self.alpha).sigmoid())


class BoundedExperts(MixtureOfExperts):
    """models.mixtral.MixtureOfExperts of these networks."""

    expert = BoundedFeedForward
