"""Gemma 4's config.json in the words of models/registry.py."""

from collections.abc import Mapping
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.config_checks import COUNT, NAMES, OBJECT, TRUTH, whole
from quantbench.models.registry import (
    ATTENTION_BIAS,
    NORMALIZED,
    NORMS_BEHIND,
    Architecture,
    every_layer,
)
from quantbench.text import shown

_FULL, _NARROW = "full_attention", "sliding_attention"
_ROPE = {
    _NARROW: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_CHECKED = {  # keys of Gemma 4 alone, and others that are read here
    "num_hidden_layers": COUNT, "intermediate_size": COUNT, "layer_types": NAMES,
    "global_head_dim": COUNT, "num_global_key_value_heads": COUNT, "attention_k_eq_v": TRUTH,
    "per_layer_config": OBJECT, "num_kv_shared_layers": whole(0), "use_double_wide_mlp": TRUTH,
    "hidden_size_per_layer_input": whole(0), "vocab_size_per_layer_input": whole(0),
    "enable_moe_block": TRUTH, "num_experts": COUNT, "top_k_experts": COUNT,
    "moe_intermediate_size": COUNT,
}  # fmt: skip
_KEPT = ("num_hidden_layers", "intermediate_size")
FIELDS = (  # of ModelConfig, which `described` finds
    *("full_head_dim", "full_kv_heads", "value_is_key", "shared_layers", "shared_ffn_dim"),
    *("layer_input_dim", "layer_input_layers", "layer_input_vocab"),
)
# fmt: off
ROW = Architecture("quantbench.models.gemma4:Gemma4", window=every_layer,
    described="quantbench.models.gemma4_config:described",
    defaults={"max_position": 131072, "num_kv_heads": 4, "head_dim": 256, "sliding_window": 512,
              "tie_embeddings": True, "attention_scale": 1.0, "post_norms": True, "qk_norm": True,
              "rope_theta": 1e6, "window_rope_theta": 1e4},
    fields={**ATTENTION_BIAS, "final_logit_softcapping": ("logit_softcap",),
            "rope_local_base_freq": ("window_rope_theta",), **{key: (key,) for key in FIELDS}},
    experts={"num_experts": None, "norm_topk_prob": True}, stacked_experts="halves",
    accepts={**NORMALIZED, "moe_intermediate_size": COUNT,
             "shared_expert_intermediate_size": COUNT},
    fixed={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": "vision"},
    weights={**NORMS_BEHIND, "ffn_norm": ("pre_feedforward_layernorm",),
             "input_gate": ("per_layer_input_gate",),
             "input_projection": ("per_layer_projection",),
             "input_norm": ("post_per_layer_input_norm",), "scale.weight": ("layer_scalar",),
             "feed_forward.router": ("router.proj",),
             "feed_forward.router.scale.weight": ("router.scale",),
             "feed_forward.router.expert_scale.weight": ("router.per_expert_scale",),
             "feed_forward.shared.w13": ("mlp.gate_proj", "mlp.up_proj"),
             "feed_forward.shared.w2": ("mlp.down_proj",),
             "feed_forward.shared_norm": ("pre_feedforward_layernorm",),
             "feed_forward.shared_post_norm": ("post_feedforward_layernorm_1",),
             "feed_forward.norm": ("pre_feedforward_layernorm_2",),
             "feed_forward.post_norm": ("post_feedforward_layernorm_2",),
             "feed_forward.experts.#.w13": ("experts.#.gate_proj", "experts.#.up_proj"),
             "feed_forward.experts.#.w2": ("experts.#.down_proj",)})
# fmt: on


def described(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The config with fields of ModelConfig in the place of keys of Gemma 4 alone; what absent keys
    mean is what they mean to transformers. Raises CheckpointError for an impossible value."""
    for key, accepts in _CHECKED.items():
        if config.get(key) is not None:
            accepts.check(where, key, config[key])
    get = {key: value for key, value in config.items() if value is not None}.get
    out = {key: config[key] for key in config if key not in _CHECKED or key in _KEPT}
    layers, width, equal = (
        get("num_hidden_layers"),
        get("intermediate_size"),
        get("attention_k_eq_v"),
    )
    if layers is None or width is None:
        return out  # which is refused with the names of all keys that are missing
    kinds = list(get("layer_types") or (_FULL if i % 6 == 5 else _NARROW for i in range(layers)))
    kinds[-1] = _FULL
    wide = _of_full(get("per_layer_config"), kinds, where)
    if wide is None:
        wide = {"head_dim": get("global_head_dim", 512)}
        wide["num_key_value_heads"] = get("num_global_key_value_heads") if equal else None
    first = layers - get("num_kv_shared_layers", 0)
    if not 0 < first <= layers or not set(kinds[first:]) <= set(kinds[:first]):
        raise CheckpointError(
            f"{where}: num_kv_shared_layers is {layers - first}; accepted is a number that leaves "
            f"a layer of each kind before them, of {layers}"
        )
    out |= {
        "layer_types": kinds, "rope_parameters": get("rope_parameters", _ROPE),
        "full_head_dim": wide.get("head_dim"), "full_kv_heads": wide.get("num_key_value_heads"),
        "value_is_key": equal, "shared_layers": list(range(first, layers)),
        "shared_ffn_dim": 2 * width if get("use_double_wide_mlp") else None,
    }  # fmt: skip
    if inputs := get("hidden_size_per_layer_input", 256):
        out |= {
            "layer_input_dim": inputs, "layer_input_layers": layers,
            "layer_input_vocab": get("vocab_size_per_layer_input", 262144),
        }  # fmt: skip
    if get("enable_moe_block"):
        out |= {
            "num_experts": get("num_experts"), "num_experts_per_tok": get("top_k_experts"),
            "moe_intermediate_size": get("moe_intermediate_size"), "norm_topk_prob": True,
            "shared_expert_intermediate_size": width,
        }  # fmt: skip
    return out


def _of_full(
    given: Mapping[str, Any] | None, kinds: list[str], where: object
) -> dict[str, Any] | None:
    """What transformers 5 writes for each layer without a window, alike; None: it wrote nothing."""
    if given is None:
        return None
    full = [i for i, kind in enumerate(kinds) if kind == _FULL]
    numbered = {int(key): given[key] for key in given if str(key).isdecimal()}  # "04" of "35"
    wide = numbered.get(full[0], {})
    same = len(numbered) == len(given) and dict.fromkeys(full, wide) == numbered
    same = same and isinstance(wide, Mapping)
    if not same or not wide.keys() <= {"head_dim", "num_key_value_heads"}:
        raise CheckpointError(
            f"{where}: per_layer_config {shown(given)} is not supported; accepted are head_dim and "
            f"num_key_value_heads, alike for each {_FULL} layer"
        )
    return dict(wide)
