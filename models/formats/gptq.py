"""GPTQ's weights, as AutoGPTQ, GPTQModel and optimum write them.

A layer X with N rows, K columns and codes of B bits has

    X.qweight   (K · B / 32, N) int32: down each column, code k at bit k · B
    X.qzeros    (groups, N · B / 32) int32, the codes of 0 along each row; less 1 in format "gptq"
    X.scales    (groups, N) floats
    X.g_idx     (K,) int32, each column's group; if it is missing, groups are one behind the other

and its weight is (code - zero) · scale. Act-order (desc_act) may give the columns of a group any
places; no kernel has scales for that, so such a layer is held in full precision.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from quantbench.errors import CheckpointError
from quantbench.models.formats.quantized import FLOATS, Layout, Parts, integers, stream
from quantbench.models.formats.quantized import require_integers as require
from quantbench.ops.formats import Packed, dequantize

METHOD = "gptq"
_INT = (torch.int32,)
_BITS = (2, 3, 4, 8)
_CONFIG: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "method": (None, METHOD),
    "bits": _BITS,
    "checkpoint_format": (None, "gptq", "gptq_v2"),
    "format": (None, "gptq", "gptq_v2"),
    "sym": (None, True, False),
    "desc_act": (None, True, False),
    "pack_dtype": (None, "int32"),
    "is_marlin_format": (None, False),
    "adapter": (None, {}),
    "rotation": (None, False, ""),
}
# Settings of the quantizer and of kernels. The tensors' shapes give the sizes of groups.
_HARMLESS = {
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "device", "disable_exllama", "dynamic",
    "exllama_config", "group_size", "lm_head", "max_input_length", "meta", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "modules_to_not_convert", "mse", "offload_to_disk",
    "offload_to_disk_path", "pad_token_id", "parallel_packing", "static_groups", "tokenizer",
    "true_sequential", "use_cuda_fp16", "use_exllama",
}  # fmt: skip


def check(config: dict[str, Any], where: str) -> None:
    require(where, config, _CONFIG, _HARMLESS)


def label(config: dict[str, Any]) -> str:
    size = config.get("group_size")
    text = f"{config['quant_method']}-{config['bits']}"
    return f"{text}-{size}" if type(size) is int and size > 0 else text


def _needs_order(parts: Parts, known: bool) -> None:
    """Raise CheckpointError where columns are in an order that nothing tells."""
    if not known and "g_idx" not in parts.stored:
        raise CheckpointError(
            f"{parts.stored['qweight'].file} has no tensor {parts.layer}.g_idx, the groups of "
            "columns, which desc_act permutes"
        )


def layouts(config: dict[str, Any]) -> list[Layout]:
    # Other options for some layers, as GPTQModel and AutoRound call them.
    differ = bool(config.get("dynamic") or config.get("extra_config"))
    is_symmetric, act_order = config.get("sym") is True and not differ, config.get("desc_act")
    settings = is_symmetric, act_order is True or differ, _is_first(config)
    known = act_order is not True or config.get("static_groups") is True
    return [
        Layout(
            ("qweight", "qzeros", "scales"),
            lambda parts: _needs_order(parts, known) or _packed(*settings, parts),
            ("g_idx",),
            floats=functools.partial(_floats, _is_first(config)),
        )
    ]


def _is_first(config: dict[str, Any]) -> bool:
    """Whether zeros are stored less 1."""
    return (config.get("checkpoint_format") or config.get("format") or "gptq") == "gptq"


def _packed(is_symmetric: bool, act_order: bool, is_first: bool, parts: Parts) -> Packed | None:
    codes, bits, scale, zero = _read(is_first, parts)
    columns, groups = codes.shape[1], scale.shape[1]
    if columns % groups:
        return None
    if "g_idx" in parts.stored and (act_order or not parts.on_meta):
        order = torch.arange(columns, dtype=torch.int32) // (columns // groups)
        if not torch.equal(parts.small("g_idx"), order):
            if act_order:
                return None
            raise parts.error("g_idx", "without desc_act groups are one behind the other")
    if not is_symmetric:
        return integers(codes, bits, scale, zero)
    middle = 1 << (bits - 1)
    if not parts.on_meta and not bool((zero == middle).all()):
        raise parts.error("qzeros", f"with sym every zero is {middle}")
    return integers(codes, bits, scale, None)


def _floats(is_first: bool, parts: Parts) -> Tensor:
    codes, bits, scale, zero = _read(is_first, parts)
    if "g_idx" not in parts.stored:
        return dequantize(integers(codes, bits, scale, zero))
    group = parts.small("g_idx").long()
    if group.min() < 0 or group.max() >= scale.shape[1]:
        raise parts.error("g_idx", f"there are {scale.shape[1]} groups")
    return (codes.float() - zero.float()[:, group]) * scale.float()[:, group]


def _read(is_first: bool, parts: Parts) -> tuple[Tensor, int, Tensor, Tensor]:
    """Codes (N, K), their bits, scales and zeros (N, groups)."""
    words = parts.tensor("qweight", _INT, None, None)
    if "g_idx" in parts.stored:
        columns = parts.tensor("g_idx", _INT, None).numel()
        bits = words.shape[0] * 32 // max(columns, 1)
    else:  # zeros and codes have the same number of bits
        bits = parts.tensor("qzeros", _INT, None, None).shape[1] * 32 // max(words.shape[1], 1)
        columns = words.shape[0] * 32 // max(bits, 1)
    if bits not in _BITS or bits * columns != words.shape[0] * 32:
        raise parts.error(
            "qweight", f"for {columns} columns these are no codes of 2, 3, 4 or 8 bits"
        )
    rows = words.shape[1]
    scale = parts.tensor("scales", FLOATS, None, rows)
    zero = stream(parts.tensor("qzeros", _INT, len(scale), rows * bits // 32), bits)
    zero = zero + 1 & ((1 << bits) - 1) if is_first else zero
    return stream(words.T, bits), bits, scale.T.contiguous(), zero.T.contiguous()
