"""Experts that are stacked: Gemma 4's, and gpt-oss', in mxfp4 as OpenAI published them.

A layer's X experts with N rows and K columns have, where gate and up are the even and the odd rows:

    mlp.experts.gate_up_proj            (X, K, N) floats, or in mxfp4
    mlp.experts.gate_up_proj_blocks     (X, N, K / 32, 16) uint8, two E2M1 codes each, and
    mlp.experts.gate_up_proj_scales     (X, N, K / 32) uint8, powers of two (E8M0)
    mlp.experts.gate_up_proj_bias       (X, N)

and mlp.experts.down_proj the same. Gemma 4 and Qwen3.5 have experts.gate_up_proj (X, N, K), whose
first half of rows is the gate, and experts.down_proj. https://huggingface.co/openai/gpt-oss-20b
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantbench.models.formats.quantized import Layout, Parts, require
from quantbench.models.formats.tensor_files import StoredTensor
from quantbench.ops.formats import Packed

METHOD = "mxfp4"
_HARMLESS = ("modules_to_not_convert", "dequantize")
_STACKED = re.compile(r"(.*\.(?:mlp|\d+)\.experts)\.(gate_up|down)_proj(?:_(blocks|scales|bias))?")
_ROWS = {
    "gate_up": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down": {"down_proj": slice(None)},
}


def _halves(rows: int) -> dict[str, dict[str, slice]]:
    gate, up = slice(None, rows // 2), slice(rows // 2, None)
    return {"gate_up": {"gate_proj": gate, "up_proj": up}, "down": _ROWS["down"]}


def check(config: Mapping[str, Any], where: str) -> None:
    require(where, config, {"quant_method": (METHOD,)}, _HARMLESS)


def label(config: Mapping[str, Any]) -> str:
    return METHOD


def layouts(config: Mapping[str, Any]) -> list[Layout]:
    return [Layout(("blocks", "scales"), _packed)]


def _packed(parts: Parts) -> Packed:
    blocks = parts.tensor("blocks", (torch.uint8,), None, None, 16)
    scale = parts.tensor("scales", (torch.uint8,), *blocks.shape[:2])
    scale = scale.contiguous().view(torch.float8_e8m0fnu)
    return Packed([blocks.flatten(1).contiguous()], scale, None, None, "fp4", 4, 32)


def separated(tensors: Mapping[str, StoredTensor], layout: str) -> dict[str, StoredTensor]:
    """The checkpoint's tensors with those of each expert under Llama's names. layout: as
    registry.Architecture.stacked_experts has it."""
    halves = layout == "halves"
    out: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        match = _STACKED.fullmatch(name)
        like = stored.read() if match and stored.like is None else stored.like
        if not match or like is None or like.ndim < 2:
            out[name] = stored
            continue
        experts, matrix, kind = match.groups()
        parts = _halves(like.shape[1])[matrix] if halves else _ROWS[matrix]
        for expert in range(len(like)):
            for linear, rows in parts.items():
                take = functools.partial(_taken, expert, rows, kind is None and not halves)
                read = functools.partial(lambda take, read: take(read()), take, stored.read)
                out[f"{experts}.{expert}.{linear}.{kind or 'weight'}"] = replace(
                    stored, read=read, like=take(like)
                )
    return out


def _taken(expert: int, rows: slice, transposed: bool, stack: Tensor) -> Tensor:
    return (stack[expert].mT if transposed else stack[expert])[rows]
