"""bitsandbytes' weights, as transformers saves them: nf4 and fp4 in blocks, or int8.

A layer X with N rows and K columns has, in 4 bits,

    X.weight            (N · K / 2, 1) uint8, the first of two codes in the high bits
    X.weight.absmax     float32, one for each block of codes; or uint8, of nested quantization:
                        nested_quant_map[absmax] · nested_absmax of its block + nested_offset
    X.weight.quant_map  the 16 values of the codes
    X.weight.quant_state.bitsandbytes__nf4      JSON in uint8: block sizes and the shape

and in int8

    X.weight            (N, K) int8
    X.SCB               (N,) float32, the largest of each row: the weight is value · SCB / 127

Activations keep --precision; bitsandbytes rounds them to int8 where weights are int8.
"""

import functools
import json
import math
from typing import Any

import torch
from torch import Tensor

from quantbench.models.config_checks import COUNT
from quantbench.models.formats.quantized import Layout, Parts, eight_bit, require
from quantbench.ops.formats import TABLES, Packed

METHOD = "bitsandbytes"
_STATE = "weight.quant_state.bitsandbytes__"
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_FORMATS = {"nf4": "nf4", "fp4": "bnb-fp4"}  # in ops/formats.py
_STORAGE = {  # dtypes that bytes of codes may be stored as
    name: getattr(torch, name) for name in ("uint8", "bfloat16", "float16", "float32")
}
_PER_STEP = 7.874015718698502e-3  # bitsandbytes' 1 / 127
_CONFIG: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "bnb_4bit_quant_type": (None, *_FORMATS),
    "bnb_4bit_quant_storage": (None, *_STORAGE),
    "load_in_4bit": (None, True, False),
    "load_in_8bit": (None, True, False),
    "llm_int8_has_fp16_weight": (None, False),
}
_HARMLESS = {
    "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_skip_modules", "llm_int8_threshold",
}  # fmt: skip


def check(config: dict[str, Any], where: str) -> None:
    require(where, config, _CONFIG, _HARMLESS)


def label(config: dict[str, Any]) -> str:
    if config.get("load_in_8bit"):
        return "bnb-int8"
    return f"bnb-{config.get('bnb_4bit_quant_type') or 'fp4'}"


def layouts(config: dict[str, Any]) -> list[Layout]:
    ends = "weight", "weight.absmax", "weight.quant_map"
    four_bits = [
        Layout((_STATE + kind, *ends), functools.partial(_four_bit, kind), _NESTED)
        for kind in _FORMATS
    ]
    return [*four_bits, Layout(("SCB", "weight"), _int8, ("weight_format",), _int8_floats)]


def _four_bit(kind: str, parts: Parts) -> Packed:
    state = _state(kind, parts)
    rows, columns = state["shape"]
    block, format = state["blocksize"], _FORMATS[kind]
    values = parts.small("weight.quant_map")
    if values.shape != (16,) or not torch.allclose(values, torch.tensor(TABLES[format]), 1e-6):
        raise parts.error("weight.quant_map", f"these are not the values of {kind}")
    kind = parts.like("weight").dtype
    count = rows * columns // 2 // (kind.itemsize if kind in _STORAGE.values() else 1)
    stored = parts.tensor("weight", tuple(_STORAGE.values()), count, 1)
    codes = stored.view(torch.uint8).view(rows, -1)
    blocks = -(-rows * columns // block)
    largest = _largest(parts, blocks, state)
    # A block may end in the next row: a group is the most columns that never cross two blocks.
    group_size = math.gcd(block, columns)
    if group_size != block:
        first = torch.arange(0, rows * columns, group_size, device=largest.device)
        largest = largest[first // block]
    planes = [codes << 4 | codes >> 4]
    return Packed(planes, largest.view(rows, -1), None, None, format, 4, group_size)


def _largest(parts: Parts, blocks: int, state: dict[str, Any]) -> Tensor:
    """The largest number of each block, float32."""
    missing = [end for end in _NESTED if end not in parts.stored]
    if len(missing) == len(_NESTED):
        return parts.tensor("weight.absmax", (torch.float32,), blocks)
    if missing or "nested_blocksize" not in state or "nested_offset" not in state:
        raise parts.error("weight.absmax", "its nested quantization is not whole")
    nested = -(-blocks // state["nested_blocksize"])
    scale, values = (
        parts.tensor(end, (torch.float32,), size)
        for end, size in zip(_NESTED, (nested, 256), strict=True)
    )
    codes = parts.tensor("weight.absmax", (torch.uint8,), blocks)
    scale = scale.repeat_interleave(state["nested_blocksize"])[:blocks]
    return values[codes.long()] * scale + state["nested_offset"]


def _state(kind: str, parts: Parts) -> dict[str, Any]:
    """Block sizes and the shape. Raises CheckpointError."""
    end = _STATE + kind
    try:
        state = json.loads(bytes(parts.small(end).tolist()))
        sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise parts.error(end, "expected is JSON with a shape and a blocksize") from None
    if len(sizes) != 4 or not all(map(COUNT.test, sizes)) or sizes[1] % 2:
        raise parts.error(end, "its shape or its blocksize is not one that is read")
    if not isinstance(state.get("nested_offset", 0.0), float):
        raise parts.error(end, "its nested_offset is no number")
    return dict(state)


def _int8(parts: Parts) -> Packed:
    values, largest = _values(parts)
    return eight_bit(values, (largest * _PER_STEP)[:, None])


def _int8_floats(parts: Parts) -> Tensor:
    """As bitsandbytes multiplies: first by the largest of the row."""
    values, largest = _values(parts)
    return values.float() * largest[:, None] * _PER_STEP


def _values(parts: Parts) -> tuple[Tensor, Tensor]:
    values = parts.tensor("weight", (torch.int8,), None, None)
    if "weight_format" in parts.stored and parts.small("weight_format").any():
        raise parts.error("weight_format", "rows alone are read, which is 0")
    return values, parts.tensor("SCB", (torch.float32,), len(values))
