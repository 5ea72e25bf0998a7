"""Muse-Glimmer's text model (Meta 2026, huggingface.co/meta-models/Muse-Glimmer-30B).

It differs from models.llama.Transformer in four points: attention's output passes a gate made from
its input; embeddings, queries and keys are normed without weights, and queries multiplied by a
number; other norms multiply by 1 + weight; those behind attention and feed-forward network have an
epsilon of their own. Windows, layers without rotation and the cap of logits are in `ModelConfig`.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.models.config import ModelConfig
from quantbench.models.config_checks import COUNT, POSITIVE, Accepts, list_of
from quantbench.models.gemma import OffsetNorm
from quantbench.models.llama import Attention, Block, Transformer
from quantbench.models.registry import ATTENTION_BIAS, NORMS_BEHIND, Architecture, unrotated

QUERY_SCALE, POST_NORM_EPS, LOGITS = 3.87, 1e-8, 0.19611613513818404  # if config.json has no others
_BASE = Accepts("a number of at least 0", lambda value: value == 0 or POSITIVE.test(value))


def described(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The config with the rotary base of each layer, 0 for none: of every fourth from the last."""
    layers = config.get("num_hidden_layers")
    if not COUNT.test(layers) or config.get("layer_rope_theta") is not None:
        return dict(config)
    return {**config, "layer_rope_theta": [(layers - 1 - i) % 4 for i in range(layers)]}


# fmt: off
ROW = Architecture("quantbench.models.muse_glimmer:MuseGlimmer",
    described="quantbench.models.muse_glimmer:described",
    window=lambda number, config: (config["num_hidden_layers"] - 1 - number) % 4 != 0,
    defaults={"max_position": 131072, "num_kv_heads": 2, "head_dim": 128, "norm_eps": 1e-5,
              "sliding_window": 2048, "logit_softcap": 20.0, "logits_divisor": 1 / LOGITS,
              "post_norms": True},
    fields={**ATTENTION_BIAS, "final_logit_softcapping": ("logit_softcap",),
            "output_multiplier": ("logits_divisor",), "layer_rope_theta": ("no_rope_layers",)},
    converted={"logits_divisor": lambda multiplier: 1 / multiplier, "no_rope_layers": unrotated},
    accepts={"layer_rope_theta": list_of(_BASE, "a list of numbers of at least 0")},
    extras=dict.fromkeys(("qk_scale_factor", "post_norm_eps"), POSITIVE),
    fixed={"hidden_activation": "silu"},
    weights={**NORMS_BEHIND, "ffn_norm": ("pre_feedforward_layernorm",),
             "attention.gate": ("self_attn.gate_proj",)})
# fmt: on


class MuseGlimmer(Transformer):
    """The whole model; see models.llama.Transformer."""

    def block(self, number: int) -> Block:
        config, block = self.config, Block(self.config, number)
        block.attention = GatedAttention(config, number)
        behind = dict(config.extras).get("post_norm_eps", POST_NORM_EPS)
        for name, norm in [*block.named_children()]:
            if isinstance(norm, nn.RMSNorm):
                epsilon = behind if "post" in name else config.norm_eps
                block.set_submodule(name, OffsetNorm(config.dim, epsilon))
        return block

    def embed(self, tokens: Tensor) -> Tensor:
        return F.rms_norm(self.tok_embeddings(tokens), (self.config.dim,), eps=self.config.norm_eps)


class GatedAttention(Attention):
    """Attention whose outputs are multiplied by sigmoid(gate(x))."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__(config, number)
        self.gate = nn.Linear(config.dim, self.num_heads * self.head_dim, bias=False)
        factor = dict(config.extras).get("qk_scale_factor", QUERY_SCALE)
        self.q_norm, self.k_norm = UnitNorm(config.norm_eps, factor), UnitNorm(config.norm_eps)

    def projected(self, x: Tensor, y: Tensor) -> Tensor:
        return self.wo(y * self.gate(x).sigmoid())


class UnitNorm(nn.Module):
    """An RMS norm (…, E) without weights, times a number."""

    def __init__(self, epsilon: float, factor: float = 1.0) -> None:
        super().__init__()
        self.epsilon, self.factor = epsilon, factor

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.epsilon) * self.factor
