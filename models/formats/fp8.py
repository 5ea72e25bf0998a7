"""Weights in float8 (E4M3) as transformers' fp8, DeepSeek's and AutoFP8's folders have them.

A layer X with N rows and K columns has

    X.weight            (N, K) float8_e4m3fn
    X.weight_scale_inv  one float for each block of weight_block_size rows and columns, or
    X.weight_scale      one for all, or for each row

and its weight is value · scale. activation_scheme says how activations are rounded: "dynamic" with
a scale for each token, in blocks for each 128 columns of it; "static" with X.activation_scale or
X.input_scale, of one number. With blocks of other widths, or scales that are powers of two
(scale_fmt), dynamic activations are not rounded.
"""

import functools
from typing import Any

import torch

from quantbench.models.formats.quantized import BLOCK, Layout, Parts, eight_bit, require, scales
from quantbench.ops.formats import Packed

METHOD = "fp8"
_CONFIG: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "activation_scheme": (None, "dynamic", "static"),
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
}
_HARMLESS = {
    "dequantize", "ignored_layers", "kv_cache_scheme", "modules_to_convert",
    "modules_to_not_convert", "weight_block_size",
}  # fmt: skip
_ACTIVATIONS = ("activation_scale", "input_scale")


def check(config: dict[str, Any], where: str) -> None:
    require(where, config, _CONFIG, _HARMLESS)
    if config.get("weight_block_size") is not None:
        BLOCK.check(where, "weight_block_size", config["weight_block_size"])


def label(config: dict[str, Any]) -> str:
    return METHOD + _rounding(config).removeprefix("float8")


def layouts(config: dict[str, Any]) -> list[Layout]:
    block, rounding = config.get("weight_block_size"), _rounding(config)
    return [
        Layout(
            (end, "weight"),
            functools.partial(_packed, end, block),
            _ACTIVATIONS,
            rounding=lambda parts: rounding,
            static=_ACTIVATIONS,
        )
        for end in ("weight_scale_inv", "weight_scale")
    ]


def _rounding(config: dict[str, Any]) -> str:
    """How activations are rounded, as quantize.spec.Stored names it."""
    block, scheme = config.get("weight_block_size"), config.get("activation_scheme")
    if scheme == "static":
        return "float8-static"
    if scheme is None or config.get("scale_fmt") == "ue8m0":
        return ""
    return "float8-row" if block is None else "float8-128" if block[1] == 128 else ""


def _packed(end: str, block: list[int] | None, parts: Parts) -> Packed:
    values = parts.tensor("weight", (torch.float8_e4m3fn,), None, None)
    return eight_bit(values, scales(parts, end, values.shape, block))
