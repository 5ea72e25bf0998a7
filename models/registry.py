"""Which file computes which models. A new architecture is a file in this folder and a row here.

    ARCHITECTURES["qwen2"]          # how a config.json of this model_type is read
    build(config)                   # weights as torch initializes them, on torch's default device

The file holds a class like models.llama.Transformer, most simply a child of it. Until others are
taught the class, they refuse it: the C++ op (run/cpu_step.py), ranks (`splits`) and peers.
"""

from __future__ import annotations

import pkgutil
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantbench.errors import CheckpointError
from quantbench.models.config_checks import COUNT, NUMBERS, TRUTH, Accepts

if TYPE_CHECKING:
    from quantbench.models.config import ModelConfig
    from quantbench.models.llama import Transformer
    from quantbench.models.split import Split

# Whether a layer, by its number from 0, has config.json's sliding_window, if no layer_types say so.
HasWindow = Callable[[int, Mapping[str, Any]], bool]
NameTable = Mapping[str, tuple[str, ...]]  # as models/formats/names.py has it

MAX_WINDOW_LAYERS = 28  # of Qwen's config.json, if absent


def every_layer(number: int, config: Mapping[str, Any]) -> bool:
    return True


def if_used(number: int, config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_sliding_window"))


def last_if_used(number: int, config: Mapping[str, Any]) -> bool:
    return if_used(number, config) and number >= config.get("max_window_layers", MAX_WINDOW_LAYERS)


def first_even_if_used(number: int, config: Mapping[str, Any]) -> bool:
    is_below = number < config.get("max_window_layers", MAX_WINDOW_LAYERS)
    return if_used(number, config) and is_below and number % 2 == 0


ATTENTION_BIAS = {"attention_bias": ("qkv_bias", "attention_out_bias")}
BIASES = ATTENTION_BIAS | {"mlp_bias": ("mlp_bias",)}


@dataclass(frozen=True)
class Architecture:
    """How models of one model_type are read and computed. Keys are those of config.json."""

    model: str  # the class, named and not imported, so that only the one in use is loaded
    # What absent keys mean to Hugging Face's config class, by field of ModelConfig.
    defaults: Mapping[str, Any]
    # Fields of ModelConfig that a key sets, beyond those that it sets for every architecture.
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    window: HasWindow | None = None
    # Values of fields from those of the keys that set them.
    converted: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    # Accepted values of keys that this architecture alone has, and that set more than a field.
    accepts: Mapping[str, Accepts] = field(default_factory=dict)
    # A mixture of experts: what it means that one of its keys is absent.
    experts: Mapping[str, Any] = field(default_factory=dict)
    # Keys of this architecture alone, and what they may hold. The model finds the values that
    # are given in ModelConfig.extras.
    extras: Mapping[str, Accepts] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()  # keys that change no logit, beyond models/hugging_face.py's
    # Keys with the only value that is supported, if it is not that of models/hugging_face.py.
    fixed: Mapping[str, object] = field(default_factory=dict)
    # Parameter in the model → its names in the checkpoint, where they are not Llama's.
    weights: NameTable = field(default_factory=dict)
    # How files may have experts stacked (models/formats/mxfp4.py): gate and up as "halves" of the
    # rows, or each of every second row ("rows"); "": they have each on its own.
    stacked_experts: str = ""
    interleaved: bool = False  # whether the checkpoint's rotary pairs are (2i, 2i + 1)
    # The share of a head that rotates, if absent; None: the key is understood as 1 alone.
    partial_rotary: float | None = None
    required: tuple[str, ...] = ()  # keys beyond those that every architecture has
    # A function of a config.json and its name in messages: the same in the words of this table.
    described: str = ""
    recurrent: Any = None  # the models.recurrent.Keys of layers without attention

    @property
    def name(self) -> str:
        """The name of its file in models/, which is ModelConfig.architecture."""
        return self.model.partition(":")[0].rpartition(".")[2]

    @property
    def splits(self) -> bool:
        """Whether ranks can share it, cut as models/split.py says."""
        return self.model in (LLAMA, MIXTRAL)


class Rows(UserDict[str, Any]):
    """Architectures by model_type. One that is named by "module:NAME" is imported when it is used:
    the row of a family that has more than numbers of its own is in the family's file."""

    def __getitem__(self, kind: str) -> Architecture:
        row = super().__getitem__(kind)
        return pkgutil.resolve_name(row) if isinstance(row, str) else row


LLAMA, MIXTRAL = "quantbench.models.llama:Transformer", "quantbench.models.mixtral:Mixtral"
GEMMA = "quantbench.models.gemma:Gemma"
FUSED = (LLAMA, MIXTRAL, GEMMA)  # that the C++ op computes (run/cpu_step.py)
MIXTRAL_EXPERTS: NameTable = {
    "feed_forward.router": ("block_sparse_moe.gate",),
    "feed_forward.experts.#.w13": (
        "block_sparse_moe.experts.#.w1",
        "block_sparse_moe.experts.#.w3",
    ),
    "feed_forward.experts.#.w2": ("block_sparse_moe.experts.#.w2",),
}
NORMS_BEHIND: NameTable = {
    "attention_post_norm": ("post_attention_layernorm",),
    "ffn_post_norm": ("post_feedforward_layernorm",),
}
GEMMA_DEFAULTS = {
    "num_kv_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_embeddings": True,
    "attention_scale": 256**-0.5, "post_norms": True,
}  # fmt: skip
GEMMAS: dict[str, Any] = {
    "fields": {
        **ATTENTION_BIAS,
        "query_pre_attn_scalar": ("attention_scale",),
        "attn_logit_softcapping": ("attention_softcap",),
        "final_logit_softcapping": ("logit_softcap",),
        "rope_local_base_freq": ("window_rope_theta",),
    },
    "converted": {"attention_scale": lambda width: width**-0.5},
    "fixed": {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    "harmless": ("sliding_window_size", "hidden_act"),
    "accepts": {"sliding_window_pattern": COUNT},
    "weights": {**NORMS_BEHIND, "ffn_norm": ("pre_feedforward_layernorm",)},
}
NORMALIZED = {"norm_topk_prob": TRUTH}
QWEN_KEYS = NORMALIZED | {
    "moe_intermediate_size": COUNT,
    "decoder_sparse_step": COUNT,
    "mlp_only_layers": NUMBERS,
}


def unrotated(rotates: list[int]) -> tuple[int, ...]:
    """The layers without rotation, from a 0 or 1 for each layer."""
    return tuple(i for i, rotated in enumerate(rotates) if not rotated)


OLMO_DEFAULTS = {
    "max_position": 2048, "norm_eps": 1e-5, "qk_norm": True, "joint_qk_norm": True,
    "pre_norms": False, "post_norms": True,
}  # fmt: skip
GRANITE_KEYS = {
    "embedding_multiplier": ("embedding_multiplier",),
    "residual_multiplier": ("residual_multiplier",),
    "attention_multiplier": ("attention_scale",),
    "logits_scaling": ("logits_divisor",),
}
# fmt: off
ARCHITECTURES = Rows({
    "llama": Architecture(LLAMA, {"max_position": 2048}, fields=BIASES),
    "mistral": Architecture(LLAMA, window=every_layer,
        defaults={"max_position": 131072, "num_kv_heads": 8, "sliding_window": 4096}),
    "qwen2": Architecture(LLAMA, window=last_if_used,
        defaults={"max_position": 32768, "num_kv_heads": 32, "qkv_bias": True}),
    "qwen3": Architecture(LLAMA, fields=ATTENTION_BIAS, window=last_if_used,
        defaults={"max_position": 32768, "num_kv_heads": 32, "head_dim": 128, "qk_norm": True}),
    "gemma2": Architecture(GEMMA, window=lambda number, _: number % 2 == 0, **GEMMAS,
        defaults={**GEMMA_DEFAULTS, "max_position": 8192, "attention_softcap": 50.0,
                  "logit_softcap": 30.0}),
    "gemma3_text": Architecture(GEMMA, **GEMMAS,
        window=lambda n, config: (n + 1) % (config.get("sliding_window_pattern") or 6) != 0,
        defaults={**GEMMA_DEFAULTS, "max_position": 131072, "rope_theta": 1e6, "qk_norm": True,
                  "window_rope_theta": 1e4}),
    "gemma4_text": "quantbench.models.gemma4_config:ROW",
    "mixtral": Architecture(MIXTRAL, window=every_layer, weights=MIXTRAL_EXPERTS,
        defaults={"max_position": 131072, "num_kv_heads": 8, "norm_eps": 1e-5,
                  "rope_theta": 1000000.0},
        experts={"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "olmoe": Architecture(MIXTRAL, fields=ATTENTION_BIAS,
        defaults={"norm_eps": 1e-5, "max_position": 4096, "qk_norm": True, "joint_qk_norm": True},
        experts={"num_experts": 64, "num_experts_per_tok": 8}, accepts=NORMALIZED),
    "qwen2_moe": Architecture(MIXTRAL, window=first_even_if_used,
        fields={"qkv_bias": ("qkv_bias",)},
        defaults={"max_position": 32768, "num_kv_heads": 16, "qkv_bias": True},
        experts={"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                 "shared_expert_intermediate_size": 5632},
        accepts={**QWEN_KEYS, "shared_expert_intermediate_size": COUNT}),
    "qwen3_moe": Architecture(MIXTRAL, fields=ATTENTION_BIAS, window=if_used,
        defaults={"max_position": 32768, "num_kv_heads": 4, "qk_norm": True},
        experts={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        accepts=QWEN_KEYS),
    "muse_glimmer_text": "quantbench.models.muse_glimmer:ROW",
    "granitemoehybrid": "quantbench.models.granite_hybrid:ROW",
    "gpt_oss": "quantbench.models.gpt_oss:ROW",
    "phi3": Architecture(LLAMA, {"max_position": 4096, "norm_eps": 1e-5}, window=every_layer,
        partial_rotary=1.0, accepts={"original_max_position_embeddings": COUNT},
        weights={"attention.wqkv": ("self_attn.qkv_proj",),
                 "feed_forward.w13": ("mlp.gate_up_proj",)}),
    "smollm3": Architecture(LLAMA,
        defaults={"max_position": 32768, "num_kv_heads": 4, "rope_theta": 2e6,
                  "tie_embeddings": True},
        fields={**BIASES, "no_rope_layers": ("no_rope_layers",)},
        described="quantbench.models.rotary_scaling:of_smollm3",
        accepts={"no_rope_layer_interval": COUNT},
        converted={"no_rope_layers": unrotated},
        fixed={"use_sliding_window": False, "sliding_window": None}),
    "granite": Architecture(LLAMA, {"max_position": 2048, "attention_scale": 1.0},
        fields={**BIASES, **GRANITE_KEYS, "no_rope_layers": ("no_rope_layers",)}),
    "ministral3": Architecture(LLAMA, window=every_layer, required=("rope_parameters",),
        defaults={"max_position": 262144, "num_kv_heads": 8, "head_dim": 128, "norm_eps": 1e-5}),
    "olmo2": Architecture(LLAMA, OLMO_DEFAULTS, fields=ATTENTION_BIAS, weights=NORMS_BEHIND),
    "olmo3": Architecture(LLAMA, window=lambda number, _: (number + 1) % 4 != 0,
        defaults={**OLMO_DEFAULTS, "sliding_window": 4096, "rope_theta": 5e5,
                  "window_rope_theta": 5e5},
        fields={**ATTENTION_BIAS, "rope_theta": ("window_rope_theta",),
                "rope_local_base_freq": ("window_rope_theta",)}, weights=NORMS_BEHIND),
    "arcee": Architecture(LLAMA, fields=BIASES, fixed={"hidden_act": "relu2"},
        defaults={"max_position": 4096, "norm_eps": 1e-5, "squared_relu": True},
        weights={"feed_forward.w13": ("mlp.up_proj",)}),
    "glm4": Architecture(LLAMA, interleaved=True, partial_rotary=0.5,
        defaults={"max_position": 131072, "num_kv_heads": 2, "head_dim": 128,
                  "norm_eps": 1.5625e-7, "qkv_bias": True, "post_norms": True},
        fields={"attention_bias": ("qkv_bias",)},
        weights={"attention_post_norm": ("post_self_attn_layernorm",),
                 "ffn_norm": ("post_attention_layernorm",),
                 "ffn_post_norm": ("post_mlp_layernorm",),
                 "feed_forward.w13": ("mlp.gate_up_proj",)}),
    "qwen3_5_text": "quantbench.models.recurrent:QWEN_3_5",
    "qwen3_5_moe_text": "quantbench.models.recurrent:QWEN_3_5_MIXTURE",
    "qwen3_next": "quantbench.models.recurrent:QWEN_3_NEXT_MIXTURE",
    "lfm2": "quantbench.models.recurrent:LFM_2",
    "lfm2_moe": "quantbench.models.recurrent:LFM_2_MIXTURE",
})
# fmt: on


def of_config(config: ModelConfig) -> Architecture:
    """A row whose class computes the model. Raises CheckpointError for a name that no row has."""
    names = dict[str, None]()
    for row in ARCHITECTURES.values():
        if row.name == config.architecture:
            return row
        names[row.name] = None
    raise CheckpointError(
        f"{config.name}: architecture {config.architecture!r} is not supported; there are "
        f"{', '.join(names)}"
    )


def build(config: ModelConfig, split: Split | None = None) -> Transformer:
    """The model of this config, its weights as torch initializes them, on torch's default device.

    split: one rank's share of it, if several ranks compute it.
    Raises CheckpointError for an architecture without a class.
    """
    kind: type[Transformer] = pkgutil.resolve_name(of_config(config).model)
    if split is None:
        return kind(config)
    from quantbench.models.split import build_share

    return build_share(kind, split)
