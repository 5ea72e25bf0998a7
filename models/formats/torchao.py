"""torchao's weights in int8 and float8, as transformers saves them in safetensors.

A layer X with N rows and K columns has

    X._weight_qdata         (N, K) int8 or float8_e4m3fn
    X._weight_scale         one float for all, for each row, or for each group of columns
    X._weight_zero_point    int8 zeros, beside int8 alone

and its weight is value · scale. The weights alone are read: activations are not rounded, and keep
--precision.
"""

from typing import Any

import torch

from quantbench.errors import CheckpointError
from quantbench.models.formats.quantized import HINT, Layout, Parts, eight_bit, require, scales
from quantbench.ops.formats import Packed
from quantbench.text import shown

METHOD = "torchao"
_VALUES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_LABELS = {  # by torchao's name of the configuration
    "Int8WeightOnlyConfig": "w8a16",
    "Int8DynamicActivationInt8WeightConfig": "w8a16",
    "Float8WeightOnlyConfig": "fp8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
}
_CONFIG: dict[str, tuple[Any, ...]] = {"quant_method": (METHOD,)}
_HARMLESS = {
    "include_input_output_embeddings", "modules_to_not_convert", "quant_type",
    "untie_embedding_weights",
}  # fmt: skip


def check(config: dict[str, Any], where: str) -> None:
    require(where, config, _CONFIG, _HARMLESS)
    if _kind(config) not in _LABELS:
        raise CheckpointError(
            f"{where}: quant_type {shown(_kind(config))} is not read; {', '.join(_LABELS)} are, "
            f"{HINT}"
        )


def _kind(config: dict[str, Any]) -> str:
    described = config.get("quant_type")
    default = described.get("default") if isinstance(described, dict) else described
    return str(default.get("_type") if isinstance(default, dict) else default)


def label(config: dict[str, Any]) -> str:
    return _LABELS[_kind(config)]


def layouts(config: dict[str, Any]) -> list[Layout]:
    return [Layout((_VALUES, _SCALE), _packed, (_ZERO,))]


def _packed(parts: Parts) -> Packed:
    values = parts.tensor(_VALUES, (torch.int8, torch.float8_e4m3fn), None, None)
    if _ZERO in parts.stored and parts.small(_ZERO).any():
        raise parts.error(_ZERO, "symmetric weights are read, whose zeros are 0")
    return eight_bit(values, scales(parts, _SCALE, values.shape, None))
