"""AWQ's weights in 4 bits, as AutoAWQ's versions GEMM and GEMV write them.

A layer X with N rows and K columns has

    X.qweight   (K, N / 8) int32: 8 rows of a column, in the order 0, 2, 4, 6, 1, 3, 5, 7
    X.qzeros    (groups, N / 8) int32, the codes of 0 in the same order
    X.scales    (groups, N) floats

and its weight is (code - zero) · scale. A word of GEMV has 8 columns of a
row, in their order; groups are padded to a multiple of 8, 16 where they have 64 columns, 32 where
they have 32:

    X.qweight   (N, K / 8) int32
    X.qzeros    (N, padded / 8) int32
    X.scales    (N, padded) floats
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantbench.models.formats.gptq import label
from quantbench.models.formats.quantized import FLOATS, Layout, Parts, integers, stream
from quantbench.models.formats.quantized import require_integers as require
from quantbench.ops.formats import Packed

__all__ = ["METHOD", "check", "label", "layouts"]

METHOD = "awq"
_INT = (torch.int32,)
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of rows 0, 1, … in a word
_CONFIG: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "method": (None, METHOD),
    "bits": (4,),
    "version": (None, "gemm", "GEMM", "gemv", "GEMV"),
    "format": (None, "gemm", "GEMM", "gemv", "GEMV"),
    "checkpoint_format": (None, "gemm", "GEMM", "gemv", "GEMV"),
    "zero_point": (None, True, False),  # the file has zeros in any case
    "pack_dtype": (None, "int32"),
    "dynamic": (None, {}, False),
    "rotation": (None, False, ""),
    "is_marlin_format": (None, False),
    "adapter": (None, {}),
    "do_fuse": (None, False),
}
_HARMLESS = {
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "desc_act", "exllama_config",
    "fuse_max_seq_len", "group_size", "lm_head", "max_input_length", "meta", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse",
    "modules_to_not_convert", "pad_token_id", "sym", "tokenizer", "true_sequential",
}  # fmt: skip


def check(config: dict[str, Any], where: str) -> None:
    sizes = {"group_size": (-1, 32, 64, 128)} if _is_by_rows(config) else {}
    require(where, config, _CONFIG | sizes, _HARMLESS)


def _is_by_rows(config: dict[str, Any]) -> bool:
    names = (config.get(key) for key in ("version", "checkpoint_format", "format"))
    return str(next(filter(None, names), "gemm")).lower() == "gemv"


def layouts(config: dict[str, Any]) -> list[Layout]:
    packed: Callable[[Parts], Packed] = _packed
    if _is_by_rows(config):
        packed = functools.partial(_by_rows, config.get("group_size", 128))
    return [Layout(("qweight", "qzeros", "scales"), packed)]


def _packed(parts: Parts) -> Packed:
    words = parts.tensor("qweight", _INT, None, None)
    columns, rows = words.shape[0], words.shape[1] * 8
    scale = parts.tensor("scales", FLOATS, None, rows)
    groups = len(scale)
    if not groups or columns % groups:
        raise parts.error("scales", f"the weight has {columns} columns")
    zero = parts.tensor("qzeros", _INT, groups, words.shape[1])
    return integers(_codes(words), 4, scale.T.contiguous(), _codes(zero))


def _by_rows(group_size: int, parts: Parts) -> Packed:
    words = parts.tensor("qweight", _INT, None, None)
    rows, columns = words.shape[0], words.shape[1] * 8
    group_size = columns if group_size == -1 else group_size
    if columns % group_size:
        raise parts.error("qweight", f"a row is no multiple of a group's {group_size} columns")
    groups, unit = columns // group_size, 8 * max(1, 128 // group_size)
    padded = -(-groups // unit) * unit
    scale = parts.tensor("scales", FLOATS, rows, padded)[:, :groups].contiguous()
    zero = stream(parts.tensor("qzeros", _INT, rows, padded // 8), 4)[:, :groups].contiguous()
    return integers(stream(words, 4), 4, scale, zero)


def _codes(words: Tensor) -> Tensor:
    """(N, …) uint8 from (…, N / 8)."""
    return stream(words, 4).unflatten(-1, (-1, 8))[..., _PLACES].flatten(-2).T.contiguous()
