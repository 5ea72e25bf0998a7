"""The experts that a Hugging Face config.json describes."""

from collections.abc import Iterable, Mapping
from typing import Any

from quantbench.models.config import Mixture
from quantbench.models.config_checks import COUNT

# Keys that describe experts. transformers 5 writes num_local_experts for Qwen's num_experts.
EXPERT_KEYS = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), COUNT)


def mixture(
    config: Mapping[str, Any], defaults: Mapping[str, Any], keys: Iterable[str], layers: int
) -> Mixture:
    """The experts that a config.json describes.

    config: its values are of the types that its architecture accepts. defaults: of absent keys.
    keys: those that this architecture has beyond EXPERT_KEYS. Raises CheckpointError for numbers
    that no model can have.
    """
    present = {key: config[key] for key in (*EXPERT_KEYS, *keys) if config.get(key) is not None}
    if "num_local_experts" in present:
        present["num_experts"] = present["num_local_experts"]
    values = {**defaults, **present}
    step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers", ())
    return Mixture(
        num_experts=values["num_experts"],
        experts_per_token=values["num_experts_per_tok"],
        expert_dim=values.get("moe_intermediate_size", config.get("intermediate_size")),
        normalized=values.get("norm_topk_prob", False),
        router_bias=values.get("router_bias", False),
        shared_dim=values.get("shared_expert_intermediate_size", 0),
        dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % step),
    )
