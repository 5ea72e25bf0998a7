"""Granite 4's config.json, of models whose layers all have attention, as that of a Granite."""

from collections.abc import Mapping
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.config_checks import COUNT, NAMES
from quantbench.models.registry import ATTENTION_BIAS, GRANITE_KEYS, LLAMA, Architecture
from quantbench.text import shown

_ATTENTION = ("attention", "full_attention")
_OF_STATES = ("mamba_", "time_step_")  # keys of layers that there are none of


def described(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Raises CheckpointError for layers with a state, and for experts."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    NAMES.check(where, "layer_types", kinds)
    if other := sorted(set(kinds) - set(_ATTENTION)):
        raise CheckpointError(
            f"{where}: layers of type {shown(other[0])} (Mamba) are not supported; accepted are "
            "Granite 4 models whose layers are all attention"
        )
    if config.get("num_local_experts", 8) != 0:
        raise CheckpointError(
            f"{where}: num_local_experts is {shown(config.get('num_local_experts', 8))}; accepted "
            "is 0: Granite 4 models without experts"
        )
    out = {key: config[key] for key in config if not key.startswith(_OF_STATES)}
    for key in ("layer_types", "layers_block_type", "num_local_experts", "num_experts_per_tok"):
        out.pop(key, None)
    rotates, layers = out.pop("position_embedding_type", None), config.get("num_hidden_layers")
    if rotates != "rope" and COUNT.test(layers):
        out["no_rope_layers"] = list(range(layers))
    out["intermediate_size"] = out.pop("shared_intermediate_size", None)
    return out


# fmt: off
ROW = Architecture(LLAMA, {"max_position": 2048, "attention_scale": 1.0},
    described="quantbench.models.granite_hybrid:described",
    fields={**ATTENTION_BIAS, **GRANITE_KEYS, "no_rope_layers": ("no_rope_layers",)},
    weights={"feed_forward.w13": ("shared_mlp.input_linear",),
             "feed_forward.w2": ("shared_mlp.output_linear",)})
# fmt: on
