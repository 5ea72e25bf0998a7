"""Layers without attention: what they are made of, and how config.json describes them. No other
model imports this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.config_checks import (
    COUNT,
    NUMBERS,
    POSITIVE,
    TRUTH,
    Accepts,
    by_field,
    check_fields,
    whole,
)
from quantbench.models.registry import (
    ATTENTION_BIAS,
    NORMALIZED,
    QWEN_KEYS,
    Architecture,
    HasWindow,
)
from quantbench.text import shown


@dataclass(frozen=True)
class Recurrent:
    """A layer without attention: a short convolution (LFM2), or one in front of a gated delta rule
    (Yang et al., https://arxiv.org/abs/2412.06464), whose state is a matrix for each value head.

    Raises CheckpointError for values that no model can have.
    """

    kernel: int  # columns that the convolution sees, the newest included
    key_heads: int = 0  # 0: a short convolution alone
    value_heads: int = 0  # a multiple of key_heads
    key_width: int = 0  # of a head
    value_width: int = 0
    bias: bool = False  # of the short convolution, and of the linear layers around it
    # Whether value head i has key head i % key_heads, as llama.cpp orders them, and not
    # i // (value_heads / key_heads).
    tiled: bool = False

    def __post_init__(self) -> None:
        check_fields("layer without attention", RECURRENT_FIELDS, self)
        if self.key_heads and self.value_heads % self.key_heads:
            raise CheckpointError(
                f"layer without attention: {self.value_heads} value heads cannot share "
                f"{self.key_heads} key heads evenly"
            )

    @property
    def is_delta(self) -> bool:
        """Whether it has a gated delta rule."""
        return self.key_heads > 0

    def columns(self, dim: int) -> int:
        """The width of what is convolved, in a model of width dim."""
        keys, values = self.key_heads * self.key_width, self.value_heads * self.value_width
        return 2 * keys + values if self.is_delta else dim

    def linear_shapes(self, dim: int) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of its linear layers by their names in the model's layer."""
        inner = self.value_heads * self.value_width if self.is_delta else dim
        first = self.columns(dim) + inner if self.is_delta else 3 * dim
        return {"attention.w_in": (first, dim), "attention.w_out": (dim, inner)}

    def other_parameters(self, dim: int) -> int:
        """The number of parameters that are in no linear layer, but for biases of these."""
        convolution = self.columns(dim) * (self.kernel + self.bias)
        gates = 2 * self.value_heads * (dim + 1)
        return convolution + gates + self.value_width


RECURRENT_FIELDS = by_field(
    Recurrent, **dict.fromkeys(("key_heads", "value_heads", "key_width", "value_width"), whole(0))
)


@dataclass(frozen=True)
class Keys:
    """How a config.json describes layers without attention."""

    kind: str  # what layer_types calls them
    has: HasWindow  # whether a layer is one, if there are no layer_types
    # Keys with what they may hold, the field of Recurrent that each sets, and its value if absent.
    fields: Mapping[str, tuple[Accepts, str, Any]]

    @property
    def accepted(self) -> dict[str, Accepts]:
        return {key: accepts for key, (accepts, *_) in self.fields.items()}

    def read(self, config: Mapping[str, Any], count: int, where: object) -> dict[str, Any]:
        """The fields of ModelConfig of a model of `count` layers. Raises CheckpointError."""
        kinds = config.get("layer_types") or [
            self.kind if self.has(i, config) else "full_attention" for i in range(count)
        ]
        if len(kinds) != count or not {"full_attention", self.kind} >= set(kinds):
            raise CheckpointError(
                f"{where}: layer_types {', '.join(map(shown, sorted(set(kinds))))} of {len(kinds)} "
                f"layers; accepted are full_attention and {self.kind}, one for each of the {count} "
                "layers"
            )
        values = {
            name: default if config.get(key) is None else config[key]
            for key, (_, name, default) in self.fields.items()
        }
        try:
            recurrent = Recurrent(**values)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        layers = tuple(i for i in range(count) if kinds[i] == self.kind)
        return {"recurrent": recurrent if layers else None, "recurrent_layers": layers}


DELTA = Keys(
    "linear_attention",
    lambda number, config: (number + 1) % (config.get("full_attention_interval") or 4) != 0,
    {
        "linear_conv_kernel_dim": (COUNT, "kernel", 4),
        "linear_num_key_heads": (COUNT, "key_heads", 16),
        "linear_num_value_heads": (COUNT, "value_heads", 32),
        "linear_key_head_dim": (COUNT, "key_width", 128),
        "linear_value_head_dim": (COUNT, "value_width", 128),
        "linear_value_heads_tiled": (TRUTH, "tiled", False),  # a word of ours, for GGUF files
    },
)
QWEN_3_5_DENSE: dict[str, Any] = {
    "model": "quantbench.models.qwen3_5:Qwen35",
    "recurrent": DELTA,
    "partial_rotary": 0.25,
    "fields": ATTENTION_BIAS,
    "accepts": {"full_attention_interval": COUNT},
    "fixed": {"attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": []},
    "harmless": (*("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),),
    "weights": {
        "attention.w_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "attention.conv": ("linear_attn.conv1d",),
        "attention.gates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        "attention.gates.log_rate": ("linear_attn.A_log",),
        "attention.gates.shift": ("linear_attn.dt_bias",),
        "attention.norm": ("linear_attn.norm",),
        "attention.w_out": ("linear_attn.out_proj",),
    },
}
QWEN_3_5_DEFAULTS = {
    "max_position": 32768, "num_kv_heads": 4, "head_dim": 256, "qk_norm": True,
    "gated_attention": True,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": COUNT, "shared_expert_intermediate_size": COUNT}
QWEN_3_5_MOE: dict[str, Any] = {
    **QWEN_3_5_DENSE,
    "fixed": QWEN_3_5_DENSE["fixed"] | {"norm_topk_prob": True},
    "accepts": QWEN_3_5_DENSE["accepts"] | EXPERTS,
}
QWEN_3_NEXT: dict[str, Any] = {
    **QWEN_3_5_DENSE,
    "fixed": {},
    "accepts": QWEN_3_5_DENSE["accepts"] | EXPERTS | QWEN_KEYS,
    "weights": QWEN_3_5_DENSE["weights"]
    | {
        "attention.w_in": ("linear_attn.in_proj_qkvz",),
        "attention.gates": ("linear_attn.in_proj_ba",),
    },
}


_WIDTHS = {  # keys from which LFM2 has the width of its feed-forward networks
    "intermediate_size": COUNT, "block_ff_dim": COUNT, "block_multiple_of": COUNT,
    "block_ffn_dim_multiplier": POSITIVE, "block_auto_adjust_ff_dim": TRUTH,
}  # fmt: skip


def described(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """A config of LFM2 with the width of its feed-forward networks as intermediate_size. Raises
    CheckpointError for an impossible value."""
    for key, accepts in _WIDTHS.items():
        if config.get(key) is not None:
            accepts.check(where, key, config[key])
    width = config.get("block_ff_dim") or config.get("intermediate_size") or 12288
    if config.get("block_auto_adjust_ff_dim") is not False:
        width = int(2 * width / 3)
        if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
            unit = config.get("block_multiple_of") or 256
            width = -(-int(factor * width) // unit) * unit
    return {**config, "intermediate_size": width}


def described_mixture(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """A config of LFM2's mixtures in Qwen's words: the first layers have no experts, and a bias in
    the router unless it is denied."""
    given = {key: config[key] for key in config if config[key] is not None}
    dense, layers = given.get("num_dense_layers", 2), given.get("num_hidden_layers", 0)
    whole(0).check(where, "num_dense_layers", dense)
    return {
        **config,
        "mlp_only_layers": [*range(min(dense, layers))],
        "router_bias": given.get("use_expert_bias", True),
    }


CONVOLUTIONS = Keys(
    "conv",
    lambda number, config: number not in (config.get("full_attn_idxs") or (number,)),
    {"conv_L_cache": (COUNT, "kernel", 3), "conv_bias": (TRUTH, "bias", False)},
)
LFM_2 = Architecture(
    model="quantbench.models.lfm2:Lfm2",
    recurrent=CONVOLUTIONS,
    defaults={
        "max_position": 128000, "num_kv_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6,
        "qk_norm": True, "tie_embeddings": True, "ffn_dim": 8192,
    },
    fields={"norm_eps": ("norm_eps",), "tie_embedding": ("tie_embeddings",)},
    described="quantbench.models.recurrent:described",
    accepts={"full_attn_idxs": NUMBERS, **_WIDTHS},
    harmless=("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
              "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out",
              "conv_use_xavier_init", "num_heads", "use_pos_enc", "theta"),
    weights={
        "norm.weight": ("model.embedding_norm.weight",),
        "attention_norm": ("operator_norm",),
        "ffn_norm": ("ffn_norm",),
        "feed_forward.w13": ("feed_forward.w1", "feed_forward.w3"),
        "feed_forward.w2": ("feed_forward.w2",),
        "attention.wo": ("self_attn.out_proj",),
        "attention.q_norm": ("self_attn.q_layernorm",),
        "attention.k_norm": ("self_attn.k_layernorm",),
        "attention.w_in": ("conv.in_proj",),
        "attention.conv": ("conv.conv",),
        "attention.w_out": ("conv.out_proj",),
    },
)  # fmt: skip
LFM_2_MIXTURE = replace(
    LFM_2,
    described="quantbench.models.recurrent:described_mixture",
    required=("layer_types",),
    experts={
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
        "norm_topk_prob": True,
    },
    accepts={
        **NORMALIZED,
        **dict.fromkeys(("use_expert_bias", "router_bias"), TRUTH),
        **{"moe_intermediate_size": COUNT, "mlp_only_layers": NUMBERS},
        "num_dense_layers": whole(0),
    },
    extras={"routed_scaling_factor": POSITIVE},
    fixed={"expert_gating_func": 2},  # sigmoid, of GGUF files
    harmless=(),
    weights={
        **LFM_2.weights,
        "feed_forward.router": ("feed_forward.gate",),
        "feed_forward.router.bias": ("feed_forward.expert_bias",),
        "feed_forward.experts.#.w13": (
            "feed_forward.experts.#.w1",
            "feed_forward.experts.#.w3",
        ),
        "feed_forward.experts.#.w2": ("feed_forward.experts.#.w2",),
    },
)  # fmt: skip
OF_512 = {
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
QWEN_3_5 = Architecture(defaults=QWEN_3_5_DEFAULTS, **QWEN_3_5_DENSE)
QWEN_3_5_MIXTURE = Architecture(
    defaults=QWEN_3_5_DEFAULTS | {"num_kv_heads": 2, "ffn_dim": 512},
    experts=OF_512 | {"num_experts": 256, "num_experts_per_tok": 8},
    stacked_experts="halves",
    **QWEN_3_5_MOE,
)
QWEN_3_NEXT_MIXTURE = Architecture(
    defaults=QWEN_3_5_DEFAULTS | {"num_kv_heads": 2, "ffn_dim": 5632},
    experts=OF_512,
    **QWEN_3_NEXT,
)
