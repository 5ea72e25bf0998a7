"""Weights that compressed-tensors stored in 4 or 8 bits, read in full precision.

A layer X with N rows and K columns has these tensors instead of X.weight:

    int-, naive-, float-quantized   X.weight         (N, K) int8 or float8_e4m3fn
    pack-quantized                  X.weight_packed  (N, ceil(K · bits / 32)) int32, and
                                    X.weight_shape   (2,) integers, N and K
    all of them                     X.weight_scale   (N, 1) for a scale per row, (N, K / group) per
                                                     group of columns, (1,) for one

The weight is value · scale. Value i of a packed row has its bits at bit i · bits, lowest first, and
is stored with 2^(bits - 1) added. `models/compression.py` says which checkpoints are read.
"""

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.errors import CheckpointError
from quantbench.models import compression
from quantbench.models.checkpoints.tensor_files import Stored
from quantbench.text import shown

_VALUES = (torch.int8, torch.float8_e4m3fn)
_BITS = (4, 8)  # of packed values; none of them crosses a byte


# The quantization_config of a checkpoint whose linear layers are stored as `packed` returns them.
EIGHT_BIT = {
    "quant_method": compression.METHOD,
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
