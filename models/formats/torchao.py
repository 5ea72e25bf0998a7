"""torchao's weights in 2 to 8 bits and in float8, as transformers saves them in safetensors.

A layer X with N rows and K columns has

    X._weight_qdata         (N, K) int8 or float8_e4m3fn
    X._weight_scale         one float for all, for each row, or for each group of columns
    X._weight_zero_point    int8 zeros, beside int8 alone

and its weight is (value - zero) · scale; Intx configurations leave weights of fewer bits in int8.
The weights alone are read: activations are not rounded, and keep --precision. What torchao packs
(Int4WeightOnlyConfig) has layouts that belong to kernels of other packages, and is not read.
"""

import functools
from typing import Any

import torch

from quantbench.errors import CheckpointError
from quantbench.models.formats.quantized import (
    HINT,
    Layout,
    Parts,
    eight_bit,
    integers,
    require,
    scales,
)
from quantbench.ops.formats import Packed
from quantbench.text import shown

METHOD = "torchao"
_VALUES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_LABELS = {  # by torchao's name of the configuration
    "Int8WeightOnlyConfig": "w8a16",
    "Int8DynamicActivationInt8WeightConfig": "w8a16",
    "Float8WeightOnlyConfig": "fp8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
    "IntxWeightOnlyConfig": "w{bits}a16",
    "Int8DynamicActivationIntxWeightConfig": "w{bits}a16",
}
_BITS = {f"int{bits}": bits for bits in range(2, 9)}
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
    if "Intx" in _kind(config) and _dtype(config) not in _BITS:
        raise CheckpointError(
            f"{where}: weight_dtype {shown(_dtype(config))} is not read; {', '.join(_BITS)} are, "
            f"{HINT}"
        )


def _kind(config: dict[str, Any]) -> str:
    return str(_described(config, "_type"))


def _dtype(config: dict[str, Any]) -> str:
    return str(_described(config, "_data", "weight_dtype", "_data"))


def _described(config: dict[str, Any], *keys: str) -> object:
    """What torchao's JSON says: {"_type": its configuration's name, "_data": {"weight_dtype":
    {"_type": "torch.dtype", "_data": "int4"}, …}}, or the name alone."""
    value = config.get("quant_type")
    value = value.get("default") if isinstance(value, dict) else value
    for key in keys if isinstance(value, dict) else ():
        value = value.get(key) if isinstance(value, dict) else None
    return value


def label(config: dict[str, Any]) -> str:
    return _LABELS[_kind(config)].format(bits=_BITS.get(_dtype(config)))


def layouts(config: dict[str, Any]) -> list[Layout]:
    bits = _BITS[_dtype(config)] if "Intx" in _kind(config) else 8
    packed = functools.partial(_few_bits, bits) if bits < 8 else _packed
    return [Layout((_VALUES, _SCALE), packed, (_ZERO,))]


def _packed(parts: Parts) -> Packed:
    values = parts.tensor(_VALUES, (torch.int8, torch.float8_e4m3fn), None, None)
    if _ZERO in parts.stored and parts.small(_ZERO).any():
        raise parts.error(_ZERO, "symmetric weights are read, whose zeros are 0")
    return eight_bit(values, scales(parts, _SCALE, values.shape, None))


def _few_bits(bits: int, parts: Parts) -> Packed:
    values = parts.tensor(_VALUES, (torch.int8,), None, None)
    scale, most = scales(parts, _SCALE, values.shape, None), 1 << (bits - 1)
    if not values.is_meta and not (values.min() >= -most and values.max() < most):
        raise parts.error(_VALUES, f"expected are {bits} bits, from {-most} to {most - 1}")
    zero = None
    if _ZERO in parts.stored and parts.small(_ZERO).any():
        zero = (parts.tensor(_ZERO, (torch.int8,), *scale.shape) + most).to(torch.uint8)
    return integers((values + most).to(torch.uint8), bits, scale, zero)
