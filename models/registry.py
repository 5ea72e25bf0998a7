"""Which file computes which models. A new architecture is a file in this folder and a row here.

    ARCHITECTURES["qwen2"]          # how a config.json of this model_type is read
    build(config)                   # weights as torch initializes them, on torch's default device

The file holds a class like models.llama.Transformer, most simply a child of it. Until others are
taught the class, they refuse it: the C++ ops (run/decoding.py), ranks (`splits`) and peers.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from quantbench.errors import CheckpointError, UsageError
from quantbench.models.accepted import COUNT, TRUTH, Accepts
from quantbench.models.mixture import NORMALIZED, QWEN_KEYS

if TYPE_CHECKING:
    from quantbench.models.config import ModelConfig
    from quantbench.models.llama import Transformer
    from quantbench.models.split import Split

# Which layers have config.json's sliding_window: none; all; all, if use_sliding_window; those from
# max_window_layers on, if use_sliding_window; every second one, if use_sliding_window.
Window = Literal["none", "all", "all if used", "last if used", "every second if used"]
NameTable = Mapping[str, tuple[str, ...]]  # as models/formats/names.py has it

ATTENTION_BIAS = {"attention_bias": ("qkv_bias", "attention_out_bias")}


@dataclass(frozen=True)
class Architecture:
    """How models of one model_type are read and computed. Keys are those of config.json."""

    model: str  # the class, named and not imported, so that only the one in use is loaded
    # What absent keys mean to Hugging Face's config class, by field of ModelConfig.
    defaults: Mapping[str, Any]
    # Fields of ModelConfig that a key sets, beyond those that it sets for every architecture.
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    window: Window = "none"
    # A mixture of experts' own keys: what they may hold, and what it means that one is absent.
    experts: Mapping[str, Any] = field(default_factory=dict)
    experts_accept: Mapping[str, Accepts] = field(default_factory=dict)
    # Keys that no other architecture has, and what they may hold. The model finds the values that
    # are given in ModelConfig.extras.
    extras: Mapping[str, Accepts] = field(default_factory=dict)
    # Keys with the only value that is supported, if it is not that of models/hugging_face.py.
    fixed: Mapping[str, object] = field(default_factory=dict)
    # Parameter in the model → its names in the checkpoint, where they are not Llama's.
    weights: NameTable = field(default_factory=dict)
    splits: bool = False  # whether ranks can share it, cut as models/split.py says

    @property
    def name(self) -> str:
        """The name of its file in models/, which is ModelConfig.architecture."""
        return self.model.partition(":")[0].rpartition(".")[2]


LLAMA, MIXTRAL = "quantbench.models.llama:Transformer", "quantbench.models.mixtral:Mixtral"
MIXTRAL_EXPERTS: NameTable = {
    "feed_forward.router": ("block_sparse_moe.gate",),
    "feed_forward.experts.#.w13": (
        "block_sparse_moe.experts.#.w1",
        "block_sparse_moe.experts.#.w3",
    ),
    "feed_forward.experts.#.w2": ("block_sparse_moe.experts.#.w2",),
}
# fmt: off
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(LLAMA, {"max_position": 2048}, splits=True,
        fields={**ATTENTION_BIAS, "mlp_bias": ("mlp_bias",)}),
    "mistral": Architecture(LLAMA, window="all", splits=True,
        defaults={"max_position": 131072, "num_kv_heads": 8, "sliding_window": 4096}),
    "qwen2": Architecture(LLAMA, window="last if used", splits=True,
        defaults={"max_position": 32768, "num_kv_heads": 32, "qkv_bias": True}),
    "qwen3": Architecture(LLAMA, fields=ATTENTION_BIAS, window="last if used", splits=True,
        defaults={"max_position": 32768, "num_kv_heads": 32, "head_dim": 128, "qk_norm": True}),
    "mixtral": Architecture(MIXTRAL, window="all", splits=True, weights=MIXTRAL_EXPERTS,
        defaults={"max_position": 131072, "num_kv_heads": 8, "norm_eps": 1e-5,
                  "rope_theta": 1000000.0},
        experts={"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "olmoe": Architecture(MIXTRAL, fields=ATTENTION_BIAS, splits=True,
        defaults={"norm_eps": 1e-5, "max_position": 4096, "qk_norm": True, "joint_qk_norm": True},
        experts={"num_experts": 64, "num_experts_per_tok": 8}, experts_accept=NORMALIZED),
    "qwen2_moe": Architecture(MIXTRAL, fields={"qkv_bias": ("qkv_bias",)}, splits=True,
        window="every second if used",
        defaults={"max_position": 32768, "num_kv_heads": 16, "qkv_bias": True},
        experts={"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                 "shared_expert_intermediate_size": 5632},
        experts_accept={**QWEN_KEYS, "shared_expert_intermediate_size": COUNT, "qkv_bias": TRUTH}),
    "qwen3_moe": Architecture(MIXTRAL, fields=ATTENTION_BIAS, window="all if used", splits=True,
        defaults={"max_position": 32768, "num_kv_heads": 4, "qk_norm": True},
        experts={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        experts_accept=QWEN_KEYS),
}
# fmt: on


def of_config(config: ModelConfig) -> Architecture:
    """A row whose class computes the model. Raises CheckpointError for a name that no row has."""
    rows = {row.name: row for row in ARCHITECTURES.values()}
    if config.architecture not in rows:
        raise CheckpointError(
            f"{config.name}: architecture {config.architecture!r} is not supported; there are "
            f"{', '.join(rows)}"
        )
    return rows[config.architecture]


def check_split(config: ModelConfig, ranks: int) -> None:
    """Raise UsageError for a model that ranks cannot share."""
    if not of_config(config).splits:
        raise UsageError(
            f"--tp {ranks}: how ranks share a model of architecture {config.architecture} is not "
            "known yet; leave out --tp"
        )


def build(config: ModelConfig, split: Split | None = None) -> Transformer:
    """The model of this config, its weights as torch initializes them, on torch's default device.

    split: one rank's share of it, if several ranks compute it.
    Raises CheckpointError for an architecture without a class.
    """
    kind: type[Transformer] = pkgutil.resolve_name(of_config(config).model)
    if split is None:
        return kind(config)
    from quantbench.models.tensor_parallel import build_share

    return build_share(kind, split)
