"""GGUF files of models that have layers without attention: what llama.cpp's converter calls their
weights, and does to them.

It orders value heads so that head i has key head i % G (https://github.com/ggml-org/llama.cpp,
pull request 19468), as ModelConfig.recurrent then says. A_log becomes -exp(A_log), and norms get 1
more.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from quantbench.models.formats.tensor_files import StoredTensor

KINDS = {
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
}
WORDS = {  # behind "ARCHITECTURE."
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
    "shortconv.l_cache": "conv_L_cache",
}
MIXTURE_WORDS = {  # of lfm2moe
    "leading_dense_block_count": "num_dense_layers",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_gating_func": "expert_gating_func",
}
# Read below, or said by other keys.
OTHERS = {"ssm.inner_size", "nextn_predict_layers", "rope.dimension_sections",
          "attention.recurrent_layers"}  # fmt: skip
_COUNTS = "block_count", "attention.head_count_kv"
_BLOCK = re.compile(r"blk\.(\d+)\.")


def described(
    metadata: Mapping[str, Any], prefix: str, blocks: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Further keys of the config.json that the model has."""
    layers, heads = (metadata.get(prefix + key) for key in _COUNTS)
    drafting = metadata.get(f"{prefix}nextn_predict_layers", 0)
    if type(layers) is int and type(drafting) is int:
        layers -= drafting
        yield "num_hidden_layers", layers
    if prefix in ("lfm2.", "lfm2moe."):
        yield "block_auto_adjust_ff_dim", False
        yield "conv_bias", any(name.endswith("shortconv.in_proj.bias") for name in blocks)
        yield "use_expert_bias", any("exp_probs_b" in name for name in blocks)
        if isinstance(heads, list):
            yield "num_key_value_heads", max(heads, default=0)
            kinds = "conv", "full_attention"
            yield "layer_types", [kinds[bool(count)] for count in heads[:layers]]
        return
    yield "linear_value_heads_tiled", prefix != "qwen3next."
    inner, values = (metadata.get(f"{prefix}ssm.{key}") for key in ("inner_size", "time_step_rank"))
    if type(inner) is int and type(values) is int and values:
        yield "linear_value_head_dim", inner // values


def weights(
    table: Mapping[str, tuple[str, ...]], blocks: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The names in registry rows, with those of Hugging Face that the converter has others for."""
    names = dict(table)
    if "feed_forward.router.bias" in names:
        names |= {
            "feed_forward.router.bias": ("feed_forward.expert_bias.bias",),
            "feed_forward.experts.#.w13": ("mlp.experts.#.gate_proj", "mlp.experts.#.up_proj"),
            "feed_forward.experts.#.w2": ("mlp.experts.#.down_proj",),
        }
    if "attention.gates.shift" in names:
        names["attention.gates.shift"] = ("linear_attn.dt_proj.bias",)
        if not any(name.endswith("ssm_in.weight") for name in blocks):  # as it wrote once
            names["attention.w_in"] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    return names


def stored(name: str, tensor: StoredTensor) -> StoredTensor:
    """A tensor of the file as Hugging Face has it."""
    change: Callable[[Tensor], Tensor] | None = None
    if name.endswith(".ssm_a"):
        change = _log
    elif name.endswith(("ssm_conv1d.weight", "shortconv.conv.weight")):
        change = _with_channel
    return tensor if change is None else replace(tensor, read=lambda: change(tensor.read()))


def _log(rates: Tensor) -> Tensor:
    return (-rates).log()


def _with_channel(weight: Tensor) -> Tensor:
    return weight.unsqueeze(1) if weight.ndim == 2 else weight


def drafts(name: str, layers: int) -> bool:
    """Whether a tensor is of the layers behind the model's, which draft tokens."""
    match = _BLOCK.match(name)
    return match is not None and int(match[1]) >= layers
