"""NVIDIA ModelOpt's weights: FP8 and NVFP4, of all layers or of some.

A layer X with N rows and K columns has, in FP8,

    X.weight            (N, K) float8_e4m3fn
    X.weight_scale      one float for all, for each row, or for each block

and in NVFP4

    X.weight            (N, K / 2) uint8, two E2M1 codes each, the first in the low bits
    X.weight_scale      (N, K / 16) float8_e4m3fn
    X.weight_scale_2    one float, which multiplies the scales

X.input_scale is of activations, which keep --precision here. What each layer has shows in its
tensors; quant_algo and exclude_modules only say it again. Older folders say it in
hf_quant_config.json alone. https://github.com/NVIDIA/Model-Optimizer
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantbench.errors import CheckpointError
from quantbench.models.formats.quantized import (
    HINT,
    Layout,
    Parts,
    eight_bit,
    float4,
    one_above_zero,
    require,
    scales,
)
from quantbench.ops.formats import Packed, dequantize
from quantbench.text import shown

METHOD = "modelopt"
_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO",
               "MIXED_PRECISION")  # fmt: skip
_CONFIG: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD, "modelopt_fp4", "modelopt_mixed"),
    "quant_algo": _ALGORITHMS,
}
_HARMLESS = {
    "config_groups", "exclude_modules", "group_size", "ignore", "kv_cache_quant_algo",
    "kv_cache_scheme", "producer", "quantized_layers", "version",
}  # fmt: skip


def check(config: dict[str, Any], where: str) -> None:
    require(where, {"quant_algo": "missing"} | config, _CONFIG, _HARMLESS)
    layers = config.get("quantized_layers") or {}
    for layer, about in layers.items() if isinstance(layers, dict) else ():
        algorithm = about.get("quant_algo") if isinstance(about, dict) else about
        if algorithm not in _ALGORITHMS:
            raise CheckpointError(
                f"{where}: quantized_layers: {shown(layer)} has quant_algo {shown(algorithm)}, "
                f"which is not read; {', '.join(_ALGORITHMS[:-1])} are, {HINT}"
            )


def label(config: dict[str, Any]) -> str:
    algorithm = str(config["quant_algo"])
    return "mixed" if algorithm == "MIXED_PRECISION" else "fp8" if "FP8" in algorithm else "nvfp4"


def layouts(config: dict[str, Any]) -> list[Layout]:
    return [
        Layout(
            ("weight_scale_2", "weight", "weight_scale"), _float4, ("input_scale",), _float4_floats
        ),
        Layout(("weight_scale", "weight"), _float8, ("input_scale",)),
    ]


def _float4(parts: Parts) -> Packed:
    return float4(parts, "weight", one_above_zero(parts, "weight_scale_2"))


def _float4_floats(parts: Parts) -> Tensor:
    """As its export multiplies: first the scales."""
    weight = _float4(parts)
    assert weight.tensor_scale is not None
    scale = weight.scale.float() * weight.tensor_scale
    return dequantize(replace(weight, scale=scale, tensor_scale=None))


def _float8(parts: Parts) -> Packed:
    values = parts.tensor("weight", (torch.float8_e4m3fn,), None, None)
    shape = parts.like("weight_scale").shape
    per_row = len(shape) == 1 and shape[0] == len(values)
    if per_row:  # scales() takes (N, 1)
        scale = parts.tensor("weight_scale", (torch.float32, torch.bfloat16), len(values))
        return eight_bit(values, scale[:, None])
    return eight_bit(values, scales(parts, "weight_scale", values.shape, None))
