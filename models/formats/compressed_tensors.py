"""Weights that compressed-tensors stored in 4 or 8 bits, read in full precision.

A layer X with N rows and K columns has these tensors instead of X.weight:

    int-, naive-, float-quantized   X.weight         (N, K) int8 or float8_e4m3fn
    pack-quantized                  X.weight_packed  (N, ceil(K · bits / 32)) int32, and
                                    X.weight_shape   (2,) integers, N and K
    all of them                     X.weight_scale   (N, 1) for a scale per row, (N, K / group) per
                                                     group of columns, (1,) for one

The weight is value · scale. Value i of a packed row has its bits at bit i · bits, lowest first, and
is stored with 2^(bits - 1) added.

compressed-tensors (https://github.com/vllm-project/compressed-tensors) is the format of vLLM's
llm-compressor. Read are checkpoints whose weights alone are quantized, symmetrically; what else a
`quantization_config` says would change the result, and is refused.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.errors import CheckpointError
from quantbench.models.accepted import OBJECT
from quantbench.models.formats.tensor_files import Stored
from quantbench.text import shown

METHOD = "compressed-tensors"
_FORMATS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized")

# The values that each key may have. A key that is not here changes no weight (_HARMLESS), or is an
# error unless it is null.
_CONFIG: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "format": (*_FORMATS, "mixed-precision"),
    "quantization_status": ("compressed",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_GROUP: dict[str, tuple[Any, ...]] = {
    "format": (*_FORMATS, None),
    "input_activations": (None,),
    "output_activations": (None,),
}
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8, 4),
    "type": ("int", "float"),
    "symmetric": (True,),
    "strategy": ("channel", "group", "tensor"),
    "dynamic": (False,),
    "actorder": (None, False, "weight", "static"),  # of others the columns are permuted
}
# Which weights are quantized, and the size of a group, show in the tensors themselves.
_HARMLESS = {
    "config_groups", "global_compression_ratio", "group_size", "ignore", "observer",
    "observer_kwargs", "scale_dtype", "targets", "version", "weights", "zp_dtype",
}  # fmt: skip
_HINT = "or give the full-precision checkpoint and --quantization"
_VALUES = (torch.int8, torch.float8_e4m3fn)
_BITS = (4, 8)  # per packed value; no value crosses a byte

# The quantization_config of a checkpoint whose linear layers are stored as `packed` returns them.
EIGHT_BIT = {
    "quant_method": METHOD,
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["re:.*mlp.gate$", "re:.*shared_expert_gate$"],  # routers
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


def packed(weight: Tensor) -> dict[str, Tensor]:
    """A weight (N, K) in 8 bits with a float32 scale for each row, by the ends of its tensors'
    names: "_packed", "_scale" and "_shape" come behind X.weight."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    values = (weight.float() / scale).round() + 128
    words = F.pad(values.to(torch.uint8), (0, -weight.shape[1] % 4)).view(torch.int32)
    return {"_packed": words, "_scale": scale, "_shape": torch.tensor(weight.shape)}


def dequantized(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The checkpoint's tensors with every quantized weight as one: X.weight, float32 when read.

    Raises CheckpointError for a weight that lacks one of its tensors, or has too many.
    """
    out: dict[str, Stored] = {}
    used: set[str] = set()
    for name, stored in tensors.items():
        layer, _, kind = name.rpartition(".")
        weight, scale, shape = (f"{layer}.weight{end}" for end in ("", "_scale", "_shape"))
        if kind == "weight_packed":
            parts = [name, shape, scale]
            for part in parts:
                if part not in tensors:
                    raise CheckpointError(f"{stored.file} has tensor {name}, but not {part}")
            if weight in tensors:
                raise CheckpointError(f"{stored.file} has both {weight} and {name}; keep one")
        elif kind == "weight" and scale in tensors and f"{name}_packed" not in tensors:
            parts = [name, scale]
        else:
            continue
        used.update(parts)
        pieces = [tensors[part] for part in parts]
        out[weight] = Stored(stored.file, functools.partial(_read, name, pieces))
    return {name: stored for name, stored in tensors.items() if name not in used} | out


def _read(name: str, pieces: list[Stored]) -> Tensor:
    """The weight (N, K) float32. pieces: its values, its shape if they are packed, its scale."""
    values, *shape, scale = (piece.read() for piece in pieces)
    where = f"{pieces[0].file}: tensor {name}"
    if shape:
        values = _unpacked(values, shape[0], where)
    elif values.dtype not in _VALUES or values.ndim != 2:
        raise CheckpointError(
            f"{where} is {values.dtype} of shape {tuple(values.shape)}; with a weight_scale it is "
            "a matrix of int8 or float8_e4m3fn"
        )
    rows, columns = values.shape
    scale = scale.view(1, 1) if scale.numel() == 1 else scale
    known = scale.is_floating_point() and scale.ndim == 2 and scale.shape[0] in (1, rows)
    if not known or not scale.shape[1] or columns % scale.shape[1]:
        raise CheckpointError(
            f"{where} has {rows} rows and {columns} columns, but its weight_scale is {scale.dtype} "
            f"of shape {tuple(scale.shape)}; there is one for all, for each row, or for equal "
            "groups of a row"
        )
    groups = values.float().view(rows, scale.shape[1], -1)
    return (groups * scale.float()[:, :, None]).view(rows, columns)


def _unpacked(packed: Tensor, shape: Tensor, where: str) -> Tensor:
    """The values (N, K) int16 that are packed in words (N, ceil(K · bits / 32)) int32."""
    size = shape.tolist() if shape.ndim == 1 and not shape.is_floating_point() else []
    fits = packed.dtype == torch.int32 and packed.ndim == 2 and len(size) == 2
    rows, columns = size if fits else (0, 0)
    bits = [b for b in _BITS if fits and packed.shape == (rows, -(-columns * b // 32))]
    if not bits:
        raise CheckpointError(
            f"{where} is {packed.dtype} of shape {tuple(packed.shape)}, and its weight_shape is "
            f"{shown(shape.tolist())}; 4 or 8 bits a value are read"
        )
    stored = packed.contiguous().view(torch.uint8)  # little-endian, as all that torch runs on
    if bits[0] == 4:
        stored = torch.stack((stored & 15, stored >> 4), -1).view(rows, -1)
    return stored[:, :columns].short() - (1 << (bits[0] - 1))


# ---------------------------------------------------------------------------------- config


def check(config: Any, where: object) -> None:
    """Raise CheckpointError unless checkpoints with this `quantization_config` are read.

    where: the file that holds it, for the message.
    """
    where = f"{where}: quantization_config"
    OBJECT.check(where, "its value", config)
    if config.get("quant_method") != METHOD:
        raise CheckpointError(
            f"{where}: quant_method {shown(config.get('quant_method'))} is not read; "
            f"{METHOD} is, {_HINT}"
        )
    _require(where, config, _CONFIG)
    groups = config.get("config_groups")
    OBJECT.check(where, "config_groups", groups)
    for name, group in groups.items():
        within = f"{where}: {shown(name)}"
        OBJECT.check(where, f"config_groups.{name}", group)
        OBJECT.check(within, "weights", group.get("weights"))
        _require(within, group, _GROUP)
        _require(f"{within}: weights", group["weights"], _WEIGHTS)


def _require(where: str, given: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]) -> None:
    for key, value in given.items():
        if key in accepted and value not in accepted[key]:
            takes = " or ".join("null" if v is None else str(v) for v in accepted[key] if v != {})
            what = "given" if isinstance(value, Mapping) else shown(value)
            raise CheckpointError(f"{where}: {key} {what} is not read; {takes} is, {_HINT}")
        if key not in accepted and key not in _HARMLESS and value is not None:
            raise CheckpointError(
                f"{where}: key {shown(key)} is not understood, and it may change the result"
            )
