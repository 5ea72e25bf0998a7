"""Weights in compressed-tensors' format, which vLLM's llm-compressor writes.

A layer X with N rows and K columns has these tensors in place of X.weight:

    int-, naive-, float-quantized   X.weight         (N, K) int8 or float8_e4m3fn
    pack-quantized                  X.weight_packed  (N, ceil(K · bits / 32)) int32, and
                                    X.weight_shape   (2,) integers, N and K
    nvfp4-, mxfp4-pack-quantized    X.weight_packed  (N, K / 2) uint8, two E2M1 codes each
    all of them                     X.weight_scale   (N, 1) for a scale per row, (N, K / group) per
                                                     group of columns, (1,) for one, or one for each
                                                     block of rows and columns
    asymmetric                      X.weight_zero_point, of a value for each scale
    nvfp4-pack-quantized            X.weight_global_scale   (1,), which divides the scales

The weight is (value - zero) · scale. Value i of a packed row has its bits at bit i · bits, lowest
first, and is stored with 2^(bits - 1) added; packed zeros are packed the same way along the rows.

input_activations of a group of layers says how their activations are rounded; a static scale is
X.input_scale, of one number. What quantize/activation.py has is done (_ROUNDINGS); other
activations keep --precision. What else would change the result is refused.
https://github.com/vllm-project/compressed-tensors
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import regex
import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.errors import CheckpointError
from quantbench.models.config_checks import OBJECT, Accepts, list_of
from quantbench.models.formats.quantized import (
    BLOCK,
    Layout,
    Parts,
    eight_bit,
    float4,
    integers,
    one_above_zero,
    require,
    scales,
    stream,
)
from quantbench.ops.formats import Packed, dequantize
from quantbench.text import shown

METHOD = "compressed-tensors"
_FORMATS = (
    *("int-quantized", "naive-quantized", "float-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)

# The values that each key may have. A key that is not here changes no weight (_HARMLESS), or is an
# error unless it is null.
_CONFIG: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "format": (*_FORMATS, "mixed-precision"),
    "sparsity_config": (None, {}),  # or one that says dense
    "transform_config": (None, {}),
}
_GROUP: dict[str, tuple[Any, ...]] = {"format": (*_FORMATS, None), "output_activations": (None,)}
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8, 4),
    "type": ("int", "float"),
    "symmetric": (True, False),
    "strategy": ("channel", "group", "tensor", "block", "tensor_group"),
    "dynamic": (False,),
    "actorder": (None, False, "weight", "static"),  # of others the columns are permuted
}


def _is_target(value: Any) -> bool:
    try:
        return len(value) <= _LENGTH and bool(regex.compile(value.removeprefix("re:")))
    except (regex.error, AttributeError, TypeError, RecursionError, ValueError):
        return False


_LENGTH, _SECONDS = 1000, 0.1  # of a target, and of comparing it with a layer's name
_TARGETS = list_of(
    Accepts("", _is_target),
    f"a list of names of layers, or of patterns behind re:, of at most {_LENGTH} characters",
)
# Which weights are quantized, and the size of a group, show in the tensors themselves.
_HARMLESS = {
    "block_structure", "config_groups", "global_compression_ratio", "group_size", "ignore",
    "input_activations", "kv_cache_scheme", "observer", "observer_kwargs", "provider",
    "quantization_status", "scale_dtype", "targets", "version", "weights", "zp_dtype",
}  # fmt: skip
_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale"),
    *("output_scale", "output_zero_point"),
)
_INT8 = (torch.int8,)
# How activations of 8 bits are rounded, symmetrically: type, dynamic, strategy and group_size.
_ROUNDINGS = {
    "int8": ("int", True, "token", None),
    "int8-static": ("int", False, "tensor", None),
    "float8-row": ("float", True, "token", None),
    "float8-tensor": ("float", True, "tensor", None),
    "float8-128": ("float", True, "group", 128),
    "float8-static": ("float", False, "tensor", None),
}
_NAMED = {"": "a16", "int8": "a8", "float8": "afp8"}  # in labels


def written(weight: Packed) -> dict[str, Tensor]:
    """A weight of 4 or 8 bits without zero points, by the ends of its tensors' names: "_packed",
    "_scale" and "_shape" follow X.weight; a float8 weight is X.weight itself, its end ""."""
    plane, scale = weight.planes[0], weight.scale
    if weight.format == "fp8":
        return {"": plane, "_scale": scale}
    columns = plane.shape[1] * 8 // weight.bits
    codes = plane if weight.bits == 4 else plane.view(torch.uint8) ^ 128
    words = F.pad(codes, (0, -codes.shape[1] % 4)).view(torch.int32)
    return {"_packed": words, "_scale": scale, "_shape": torch.tensor([len(plane), columns])}


def group(weight: Packed, targets: list[str]) -> dict[str, Any]:
    """The entry of config_groups for layers whose weights are stored as this one."""
    per_row = weight.scale.shape[1] == 1
    weights = {
        "num_bits": weight.bits,
        "type": "float" if weight.format == "fp8" else "int",
        "symmetric": True,
        "strategy": "channel" if per_row else "group",
        "group_size": None if per_row else weight.group_size,
        "dynamic": False,
    }
    form = "float-quantized" if weight.format == "fp8" else "pack-quantized"
    return {"targets": targets, "format": form, "weights": weights}


def layouts(config: Mapping[str, Any]) -> list[Layout]:
    optional = ("weight_shape", "weight_zero_point", "weight_global_scale", *_ACTIVATIONS)
    plain = functools.partial(_plain, next(iter(_blocks(config)), None))
    roundings = [_rounding(group) for group in config["config_groups"].values()]

    def rounding(parts: Parts) -> str:
        return roundings[0] if len(set(roundings)) == 1 else _rounding(_group_of(config, parts))

    settings: dict[str, Any] = {
        "optional": optional,
        "rounding": rounding,
        "static": ("input_scale",),
    }
    return [
        Layout(("weight_packed", "weight_scale"), _packed, floats=_packed_floats, **settings),
        Layout(("weight_scale", "weight"), plain, **settings),
    ]


def _group_of(config: Mapping[str, Any], parts: Parts) -> Mapping[str, Any]:
    """The entry of config_groups that a layer belongs to. A target is its name, or re: and a
    pattern of it, or its class; in this order the package takes the first that matches."""
    layer = parts.layer
    targets = {
        target: group
        for group in config["config_groups"].values()
        for target in group.get("targets") or ()
    }
    kind = "Embedding" if layer.endswith("embed_tokens") else "Linear"
    patterns = sorted(target for target in targets if target.startswith("re:"))
    matching = [target for target in patterns if _matches(target, parts)]
    return next((targets[target] for target in (layer, *matching, kind) if target in targets), {})


def _matches(target: str, parts: Parts) -> bool:
    """Raises CheckpointError for a pattern that takes too long, as "re:(.+)+x" may."""
    try:
        return regex.match(target[3:], parts.layer, timeout=_SECONDS) is not None
    except TimeoutError:
        file = next(iter(parts.stored.values())).file.with_name("config.json")
        raise CheckpointError(
            f"{file}: quantization_config: target {shown(target)} takes more than {_SECONDS} s of "
            "comparing with a layer's name; write a simpler one"
        ) from None


def _rounding(group: Mapping[str, Any]) -> str:
    """How a group's activations are rounded, as quantize.spec.Stored names it."""
    activations = group.get("input_activations")
    if not activations or (activations.get("num_bits", 8), activations.get("symmetric", True)) != (
        8,
        True,
    ):
        return ""
    size = activations.get("group_size")
    strategy = activations.get("strategy") or ("group" if size else "tensor")
    described = activations.get("type", "int"), activations.get("dynamic", False), strategy, size
    known = (rounding for rounding, key in _ROUNDINGS.items() if key == described)
    return "" if activations.get("scale_dtype") else next(known, "")


def _plain(block: list[int] | None, parts: Parts) -> Packed:
    values = parts.tensor("weight", (torch.int8, torch.float8_e4m3fn), None, None)
    scale = scales(parts, "weight_scale", values.shape, block)
    zero = _zero(parts, 8, *scale.shape)
    if zero is None:
        return eight_bit(values, scale)
    if values.dtype != torch.int8:
        raise parts.error("weight_zero_point", "weights are float8, which have no zero point")
    return integers(values.view(torch.uint8) ^ 128, 8, scale, zero)


def _packed(parts: Parts) -> Packed:
    if parts.like("weight_packed").dtype == torch.uint8:
        return _float4(parts)
    name, file = f"{parts.layer}.weight_packed", parts.stored["weight_packed"].file
    if "weight_shape" not in parts.stored:
        raise CheckpointError(f"{file} has tensor {name}, but not {parts.layer}.weight_shape")
    words, shape = parts.tensor("weight_packed", (torch.int32,), None, None), _shape(parts)
    rows, columns = shape
    bits = [b for b in (4, 8) if tuple(words.shape) == (rows, -(-columns * b // 32))]
    if not bits:
        stored_shape = shown(parts.small("weight_shape").tolist())
        raise parts.error(
            "weight_packed", f"its weight_shape is {stored_shape}, and 4 or 8 bits a value are read"
        )
    scale = scales(parts, "weight_scale", shape, None)
    codes = stream(words, bits[0])[:, :columns].contiguous()
    return integers(codes, bits[0], scale, _zero(parts, bits[0], *scale.shape))


def _shape(parts: Parts) -> list[int]:
    """[N, K]; [0, 0] for what is no shape."""
    shape = parts.small("weight_shape").tolist()
    known = isinstance(shape, list) and len(shape) == 2 and all(type(size) is int for size in shape)
    return shape if known else [0, 0]


def _float4(parts: Parts) -> Packed:
    end = "weight_global_scale"
    whole = 1 / one_above_zero(parts, end) if end in parts.stored else None
    return float4(parts, "weight_packed", whole)


def _packed_floats(parts: Parts) -> Tensor:
    weight = _packed(parts)
    if weight.tensor_scale is not None:  # as the package rounds: the scales are divided first
        scale = weight.scale.float() / parts.small("weight_global_scale").float()
        weight = replace(weight, scale=scale, tensor_scale=None)
    return dequantize(weight)


def _zero(parts: Parts, bits: int, rows: int, groups: int) -> Tensor | None:
    """The codes (N, groups) of 0, uint8; None for symmetric weights."""
    end = "weight_zero_point"
    if end not in parts.stored:
        return None
    if parts.like(end).dtype == torch.int32:
        words = parts.tensor(end, (torch.int32,), -(-rows * bits // 32), groups)
        return stream(words.T, bits)[:, :rows].T.contiguous()
    scale = parts.like("weight_scale").shape
    values = parts.tensor(end, _INT8, *scale).short() + (1 << (bits - 1))
    return values.to(torch.uint8).reshape(-1, scale[-1]).expand(rows, groups).contiguous()


# ---------------------------------------------------------------------------------- config


def check(config: Mapping[str, Any], where: str) -> None:
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") == "dense":
        config = {**config, "sparsity_config": None}
    require(where, config, _CONFIG, _HARMLESS)
    groups = config.get("config_groups")
    OBJECT.check(where, "config_groups", groups)
    for name, group in groups.items():
        within = f"{where}: {shown(name)}"
        OBJECT.check(where, f"config_groups.{name}", group)
        OBJECT.check(within, "weights", group.get("weights"))
        require(within, group, _GROUP, _HARMLESS)
        require(f"{within}: weights", group["weights"], _WEIGHTS, _HARMLESS)
        _TARGETS.check(within, "targets", group.get("targets", []))
        OBJECT.check(within, "input_activations", group.get("input_activations") or {})
    blocks = _blocks(config)
    BLOCK.check(where, "block_structure", blocks[0] if blocks else [1, 1])
    if any(block != blocks[0] for block in blocks):
        raise CheckpointError(f"{where}: groups have blocks of several sizes; one size is read")


def _blocks(config: Mapping[str, Any]) -> list[list[int]]:
    """Rows and columns of the weights that share a scale, of each group that has such blocks."""
    blocks = (group["weights"].get("block_structure") for group in config["config_groups"].values())
    return [block for block in blocks if block is not None]


def label(config: Mapping[str, Any]) -> str:
    """fp8, nvfp4, mxfp4, w8a16 or, in groups, w4a16-128; mixed where layers differ."""
    names = {_name(group) for group in config["config_groups"].values()}
    return names.pop() if len(names) == 1 else "mixed"


def _name(group: Mapping[str, Any]) -> str:
    weights = group["weights"]
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    rounding = _rounding(group)
    kind, _, scales = rounding.partition("-")
    if weights.get("type") == "float":
        name = {(4, 16): "nvfp4", (4, 32): "mxfp4"}.get((bits, size), "fp8")
        return name + (rounding and f"-{rounding.removeprefix('float8-')}")
    grouped = f"-{size}" if type(size) is int and size > 0 else ""
    return f"w{bits}{_NAMED[kind]}{grouped}" + (scales and f"-{scales}")
