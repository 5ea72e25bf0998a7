"""torchao's weights in 2 to 8 bits and in float8, as transformers saves them in safetensors.

A layer X with N rows and K columns has

    X._weight_qdata         (N, K) int8 or float8_e4m3fn
    X._weight_scale         one float for all, for each row, or for each group of columns
    X._weight_zero_point    int8 zeros, beside int8 alone

and its weight is (value - zero) · scale; Intx configurations leave weights of fewer bits in int8.
The weights alone are read: activations are not rounded, and keep --precision.

Weights of 4 bits are packed, in groups of columns, with (groups, N) scales and zeros:

    plain               X._weight_qdata         (N, K / 2) int8, two signed codes each, the first in
                                                the low bits; the weight is code · scale + zero
    plain_int32         X._weight_qdata         (N, K / 8) int32, lowest bits first; the weight is
                                                (code - zero) · scale, of int8 zeros
    tile_packed_to_4d   X._weight_qdata         (N / 8, K / 128, 32, 4) int32, with N and K padded
                                                to multiples of 8 and 1024, in NVIDIA's order
                        X._weight_scale_and_zero    (groups, N, 2) bfloat16; the weight is
                                                (code - 8) · scale + zero

The layout of `preshuffled` belongs to a kernel of another package, and is not read.
"""

import functools
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quantbench.errors import CheckpointError
from quantbench.models.config_checks import COUNT
from quantbench.models.formats.quantized import (
    FLOATS,
    HINT,
    Layout,
    Parts,
    eight_bit,
    integers,
    require,
    scales,
)
from quantbench.models.formats.tensor_files import metadata
from quantbench.ops.formats import Packed
from quantbench.ops.packing import of_tinygemm
from quantbench.text import shown

METHOD = "torchao"
_VALUES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_BOTH = "_weight_scale_and_zero"
_LABELS = {  # by torchao's name of the configuration
    "Int8WeightOnlyConfig": "w8a16",
    "Int8DynamicActivationInt8WeightConfig": "w8a16",
    "Float8WeightOnlyConfig": "fp8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
    "IntxWeightOnlyConfig": "w{bits}a16",
    "Int8DynamicActivationIntxWeightConfig": "w{bits}a16",
    "Int4WeightOnlyConfig": "w4a16-{group_size}",
    "Float8DynamicActivationInt4WeightConfig": "w4a16-128",
}
_BITS = {f"int{bits}": bits for bits in range(2, 9)}
_CONFIG: dict[str, tuple[Any, ...]] = {"quant_method": (METHOD,)}
_HARMLESS = {
    "include_input_output_embeddings", "modules_to_not_convert", "quant_type",
    "untie_embedding_weights",
}  # fmt: skip


def check(config: dict[str, Any], where: str) -> None:
    require(where, config, _CONFIG, _HARMLESS)
    known: list[tuple[str, str, Iterable[str]]] = [("quant_type", _kind(config), _LABELS)]
    if "Intx" in _kind(config):
        known.append(("weight_dtype", _dtype(config), _BITS))
    if "Int4" in _kind(config):
        known.append(("int4_packing_format", _packing(config), _PACKINGS))
    for key, value, accepted in known:
        if value not in accepted:
            raise CheckpointError(
                f"{where}: {key} {shown(value)} is not read; {', '.join(accepted)} are, {HINT}"
            )
    if _kind(config) == "Int4WeightOnlyConfig":
        COUNT.check(where, "group_size", _described(config, "_data", "group_size"))
    tile = _described(config, "_data", "int4_tile_packed_ntile")
    if _packing(config) == "tile_packed_to_4d" and tile != 8:
        raise CheckpointError(
            f"{where}: int4_tile_packed_ntile {shown(tile)} is not read; 8 is, {HINT}"
        )


def _kind(config: dict[str, Any]) -> str:
    return str(_described(config, "_type"))


def _dtype(config: dict[str, Any]) -> str:
    return str(_described(config, "_data", "weight_dtype", "_data"))


def _packing(config: dict[str, Any]) -> str:
    """Of weights in 4 bits: torchao writes the name, or {"_type": …, "_data": "PLAIN"}."""
    value = _described(config, "_data", "int4_packing_format")
    return str(value.get("_data") if isinstance(value, dict) else value).lower()


def _described(config: dict[str, Any], *keys: str) -> object:
    """What torchao's JSON says: {"_type": its configuration's name, "_data": {"weight_dtype":
    {"_type": "torch.dtype", "_data": "int4"}, …}}, or the name alone."""
    value = config.get("quant_type")
    value = value.get("default") if isinstance(value, dict) else value
    for key in keys if isinstance(value, dict) else ():
        value = value.get(key) if isinstance(value, dict) else None
    return value


def label(config: dict[str, Any]) -> str:
    group_size = _described(config, "_data", "group_size")
    return _LABELS[_kind(config)].format(bits=_BITS.get(_dtype(config)), group_size=group_size)


def layouts(config: dict[str, Any]) -> list[Layout]:
    if "Int4" in _kind(config):
        return [_PACKINGS[_packing(config)]]
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


def _plain(parts: Parts) -> Packed:
    codes = parts.tensor(_VALUES, (torch.int8, torch.uint8), None, None).view(torch.uint8)
    scale, zero = _by_group(parts, codes, FLOATS)
    symmetric = not parts.small(_ZERO).any()
    return _int4(codes ^ 0x88, scale, None if symmetric else zero, "int")  # 8 added to both codes


def _plain_int32(parts: Parts) -> Packed:
    codes = parts.tensor(_VALUES, (torch.int32,), None, None).view(torch.uint8)
    scale, zero = _by_group(parts, codes, (*FLOATS, torch.int8))
    values = parts.small(_ZERO)
    if values.dtype != torch.int8 or values.min() < 0 or values.max() > 15:
        raise parts.error(
            _ZERO, f"plain_int32 is read as Intel GPUs pack it, with int8 from 0 to 15, {HINT}"
        )
    return _int4(codes, scale, zero.view(torch.uint8), "uint")


def _by_group(parts: Parts, codes: Tensor, zeros: tuple[torch.dtype, ...]) -> tuple[Tensor, Tensor]:
    """Scales and zeros (N, groups) of codes (N, K / 2); zeros: their dtypes."""
    rows, columns = codes.shape[0], codes.shape[1] * 2
    scale = parts.tensor(_SCALE, FLOATS, None, rows)
    groups = len(scale)
    if not groups or not codes.numel() or columns % groups:
        raise parts.error(_SCALE, f"the weight has {rows} rows and {columns} columns")
    return scale.T.contiguous(), parts.tensor(_ZERO, zeros, groups, rows).T.contiguous()


def _tile_packed_to_4d(parts: Parts) -> Packed:
    words = parts.tensor(_VALUES, (torch.int32,), None, None, 32, 4)
    tiles, padded, shape = words.shape[0], words.shape[1] * 128, _shape(parts)
    rows, columns = shape or (0, 0)
    if (tiles, padded) != (-(-rows // 8), -(-columns // 1024) * 1024) or not words.numel():
        raise parts.error(_VALUES, f"its shape in the file's metadata is {shown(shape)}")
    both = parts.tensor(_BOTH, (torch.bfloat16,), None, tiles * 8, 2)
    group_size = padded // max(1, len(both))
    is_unpadded = group_size in (32, 64, 128, 256) and len(both) * group_size == padded
    if not is_unpadded or columns % group_size:
        raise parts.error(_BOTH, f"the weight has {columns} columns, in the file {padded}")
    plane = of_tinygemm(words.contiguous())[:rows, : columns // 2].contiguous()
    scale, zero = both[: columns // group_size, :rows].transpose(0, 1).unbind(-1)
    return _int4(plane, scale.contiguous(), zero.contiguous(), "int")


def _shape(parts: Parts) -> list[int] | None:
    """[N, K] of a weight, which the file's metadata says."""
    try:
        described = json.loads(metadata(parts.stored[_VALUES].file)[f"{parts.layer}.weight"])
        shape = described["_data"]["shape"]
    except (LookupError, TypeError, ValueError, RecursionError):
        return None
    known = isinstance(shape, list) and len(shape) == 2 and all(map(COUNT.test, shape))
    return shape if known else None


def _int4(codes: Tensor, scale: Tensor, zero: Tensor | None, format: str) -> Packed:
    """codes: (N, K / 2) uint8. scale and zero: (N, groups)."""
    group_size = codes.shape[1] * 2 // scale.shape[1]
    return Packed([codes], scale, zero, None, format, 4, group_size)


_PACKINGS = {
    "plain": Layout((_VALUES, _SCALE, _ZERO), _plain),
    "plain_int32": Layout((_VALUES, _SCALE, _ZERO), _plain_int32),
    "tile_packed_to_4d": Layout((_VALUES, _BOTH), _tile_packed_to_4d),
}
