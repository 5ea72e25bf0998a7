"""Layers that a Hugging Face folder holds quantized: several tensors X.… in place of X.weight.

    found = weights(tensors, gptq.layouts(config))      # each X.weight as one Stored

Each method of quantization is a module in this folder. It has

    METHOD              quant_method in config.json's quantization_config
    check(config, where)    CheckpointError for a configuration that is not read
    layouts(config)     how its layers may be stored
    label(config)       what logs call it, such as gptq-4-128
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantbench.errors import CheckpointError
from quantbench.models.config_checks import COUNT, list_of
from quantbench.models.formats.packed import PackedForm
from quantbench.models.formats.tensor_files import StoredTensor
from quantbench.ops.formats import Packed, dequantize
from quantbench.ops.packing import pack, unpack
from quantbench.text import shown

BLOCK = list_of(COUNT, "a list of two sizes", 2)
HINT = "or give the full-precision checkpoint and --quantization"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Keys that AutoRound adds to a layout's: how it tuned, and activations that stay floats; and those
# whose other values would change the result.
_AUTO_ROUND = {
    "act_data_type", "act_dynamic", "act_group_size", "act_sym", "amp", "autoround_version",
    "batch_size", "data_type", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "enable_quanted_input", "extra_config", "gradient_accumulate_steps", "iters",
    "low_gpu_mem_usage", "lr", "minmax_lr", "nsamples", "provider", "quant_block_list",
    "regex_config", "scale_dtype", "seqlen", "static_attention_granularity",
    "static_kv_granularity", "super_bits", "super_group_size", "supported_types",
    "to_quant_block_names",
}  # fmt: skip
AUTO_ROUND: dict[str, tuple[Any, ...]] = {
    "act_bits": (None, 16, 32),
    "rotation_config": (None, {}),
    "rotation_configs": (None, []),
    "static_attention_dtype": (None,),
    "static_kv_dtype": (None,),
}


@dataclass(frozen=True)
class Parts:
    """The tensors of one layer X, by the ends of their names."""

    layer: str
    stored: Mapping[str, StoredTensor]
    on_meta: bool = False  # whether `tensor` gives shapes and dtypes alone

    def tensor(self, end: str, dtypes: Sequence[torch.dtype], *shape: int | None) -> Tensor:
        """A tensor of one of these dtypes and of this shape, where None is any size.

        Raises CheckpointError for another one.
        """
        like = self.like(end)
        sizes = zip(like.shape, shape, strict=False)
        fits = like.ndim == len(shape) and all(want in (None, size) for size, want in sizes)
        if like.dtype not in dtypes or not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(end, f"expected is {kinds} of shape ({wanted})")
        return like.to("meta") if self.on_meta else self.stored[end].read()

    def like(self, end: str) -> Tensor:
        """A tensor whose shape and dtype are known, though its values may not be read."""
        stored = self.stored[end]
        return stored.read() if stored.like is None else stored.like

    def small(self, end: str) -> Tensor:
        """A tensor of few values, which are there though others are on the meta device."""
        like = self.like(end)
        return self.stored[end].read() if like.is_meta else like

    def error(self, end: str, why: str) -> CheckpointError:
        """What is wrong with a tensor."""
        like = self.like(end)
        return CheckpointError(
            f"{self.stored[end].file}: tensor {self.layer}.{end} is {like.dtype} of shape "
            f"{tuple(like.shape)}; {why}"
        )


@dataclass(frozen=True)
class Layout:
    """One way to store a layer."""

    # The ends of the tensors that the layer has; the first of them shows that it is stored so.
    ends: tuple[str, ...]
    # Reads the weight, or on the meta device its shapes. None: no kernel has such groups.
    packed: Callable[[Parts], Packed | None]
    optional: tuple[str, ...] = ()
    # Reads it in float32, where that is not what dequantizing gives bit for bit.
    floats: Callable[[Parts], Tensor] | None = None
    # How activations are rounded, by its name in quantize.spec.Stored; and the ends of tensors that
    # may have the scale of a static rounding.
    rounding: Callable[[Parts], str] = lambda parts: ""
    static: tuple[str, ...] = ()


def weights(
    tensors: Mapping[str, StoredTensor], layouts: Sequence[Layout]
) -> dict[str, StoredTensor]:
    """The checkpoint's tensors with every quantized weight as one, float32 when read.

    Raises CheckpointError for a layer that lacks a tensor, has one of another shape, or has its
    weight twice.
    """
    out: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for layout in layouts:
        for name in sorted(tensors.keys() - used):
            layer = name.removesuffix(f".{layout.ends[0]}")
            if layer == name:
                continue
            ends = (*layout.ends, *layout.optional)
            stored = {end: tensors[key] for end in ends if (key := f"{layer}.{end}") in tensors}
            for end in layout.ends:
                if end not in stored:
                    raise CheckpointError(
                        f"{tensors[name].file} has tensor {name}, but not {layer}.{end}"
                    )
            weight = f"{layer}.weight"
            if "weight" not in stored and weight in tensors or weight in out:
                raise CheckpointError(
                    f"{tensors[name].file} has both {weight} and {name}; keep one"
                )
            used.update(f"{layer}.{end}" for end in stored)
            out[weight] = _weight(layout, Parts(layer, stored))
    return {name: stored for name, stored in tensors.items() if name not in used} | out


def _weight(layout: Layout, parts: Parts) -> StoredTensor:
    file, packed = parts.stored[layout.ends[0]].file, functools.partial(layout.packed, parts)
    shapes = layout.packed(replace(parts, on_meta=True))
    form = PackedForm.of(shapes) if shapes else None
    rounding = layout.rounding(parts)
    static = static_scale(parts, layout.static) if rounding.endswith("static") else None
    form = form and replace(form, activation=rounding, static=static)
    floats = layout.floats
    read = functools.partial(floats, parts) if floats else lambda: dequantize(packed())
    return StoredTensor(file, read, form, packed if form else None)


# ------------------------------------------------------------------------------ activations


def static_scale(parts: Parts, ends: Sequence[str]) -> float:
    """The scale of a layer's activations, in the first tensor of these names that it has.

    Raises CheckpointError if it has none, or one that is no number above 0.
    """
    for end in ends:
        if end in parts.stored:
            scale = parts.small(end)
            if scale.dtype in FLOATS and scale.numel() == 1 and 0 < float(scale) < math.inf:
                return float(scale)
            values = shown(scale.flatten()[:2].tolist())
            raise parts.error(end, f"its values are {values}; expected is one float above 0")
    file = next(iter(parts.stored.values())).file
    raise CheckpointError(
        f"{file} has no tensor {parts.layer}.{ends[0]}, the scale of activations that are static"
    )


# ------------------------------------------------------------------------------ weights


def stream(data: Tensor, bits: int) -> Tensor:
    """Codes of some bits, uint8, from integers along the last dimension: code i has its lowest bit
    at bit i · bits."""
    data = data.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        return unpack([data], bits)
    word = data.unflatten(-1, (-1, bits)).to(torch.int64)
    word = (word << torch.arange(0, 8 * bits, 8, device=word.device)).sum(-1)
    fields = [word >> shift & ((1 << bits) - 1) for shift in range(0, 8 * bits, bits)]
    return torch.stack(fields, -1).flatten(-2).to(torch.uint8)


def integers(codes: Tensor, bits: int, scale: Tensor, zero: Tensor | None) -> Packed:
    """(code - zero) · scale.

    codes: (N, K) uint8. scale: (N, groups) floats. zero: (N, groups) uint8, or None for
    2^(bits - 1).
    """
    group_size = codes.shape[1] // scale.shape[1]
    if bits < 8:
        format = "int" if zero is None else "uint"
        return Packed(pack(codes, bits), scale, zero, None, format, bits, group_size)
    offset = None if zero is None else scale.float() * (128 - zero.float())
    signed = (codes ^ 128).view(torch.int8)
    return Packed([signed], scale, offset, None, "int", 8, group_size)


def eight_bit(values: Tensor, scale: Tensor) -> Packed:
    """value · scale, of int8 or float8_e4m3fn values (N, K) and scales (N, groups)."""
    format = "int" if values.dtype == torch.int8 else "fp8"
    group_size = values.shape[1] // scale.shape[1]
    return Packed([values.contiguous()], scale, None, None, format, 8, group_size)


def float4(parts: Parts, codes: str, tensor_scale: Tensor | None) -> Packed:
    """E2M1 codes, two in a byte, the first in the low bits: X.`codes` (N, K / 2) uint8, and
    X.weight_scale (N, groups): E4M3 that `tensor_scale` multiplies, or else powers of two."""
    packed = parts.tensor(codes, (torch.uint8,), None, None)
    kind = torch.uint8 if tensor_scale is None else torch.float8_e4m3fn
    scale = parts.tensor("weight_scale", (kind,), len(packed), None)
    columns = packed.shape[1] * 2
    if not scale.shape[1] or columns % scale.shape[1]:
        raise parts.error("weight_scale", f"the weight has {columns} columns")
    if tensor_scale is None:
        scale = scale.view(torch.float8_e8m0fnu)
    return Packed([packed], scale, None, tensor_scale, "fp4", 4, columns // scale.shape[1])


def one_above_zero(parts: Parts, end: str) -> Tensor:
    """The number in a tensor of one, float32 without dimensions. Raises CheckpointError for
    another one."""
    number = parts.small(end).float()
    if number.numel() != 1 or not 0 < float(number) < math.inf:
        raise parts.error(end, "expected is one number above 0")
    return number.reshape(())


def scales(parts: Parts, end: str, shape: Sequence[int], block: Sequence[int] | None) -> Tensor:
    """The scales (N, groups) of a weight of shape (N, K). block: rows and columns that share one.

    Raises CheckpointError for a tensor that has another number of them.
    """
    rows, columns = shape
    shape_of_scales = parts.like(end).shape
    sizes = (1, 1) if math.prod(shape_of_scales) == 1 else shape_of_scales
    if block and sizes == (-(-rows // block[0]), -(-columns // block[1])):
        scale = _floats(parts, end, shape_of_scales).reshape(sizes)
        group_size = math.gcd(block[1], columns)
        scale = scale.repeat_interleave(block[0], 0)[:rows]
        scale = scale.repeat_interleave(block[1] // group_size, 1)
        return scale[:, : columns // group_size].contiguous()
    if len(sizes) != 2 or sizes[0] not in (1, rows) or not sizes[1] or columns % sizes[1]:
        raise parts.error(
            end,
            f"the weight has {rows} rows and {columns} columns: there is one for all, for each "
            "row, for equal groups of a row, or for each block",
        )
    return _floats(parts, end, shape_of_scales).reshape(sizes).expand(rows, -1).contiguous()


def _floats(parts: Parts, end: str, shape: torch.Size) -> Tensor:
    """Scales, those that are powers of two in 8 bits as float32."""
    scale = parts.tensor(end, (*FLOATS, torch.float8_e8m0fnu), *shape)
    return scale if scale.dtype in FLOATS else scale.float()


# ------------------------------------------------------------------------------ configurations


def require(
    where: str,
    config: Mapping[str, Any],
    accepted: Mapping[str, tuple[Any, ...]],
    harmless: Sequence[str] | set[str],
) -> None:
    """Raise CheckpointError unless each key has one of its values, or is harmless, or null."""
    for key, value in config.items():
        if key in accepted and value not in accepted[key]:
            takes = " or ".join("null" if v is None else str(v) for v in accepted[key] if v != {})
            text = "given" if isinstance(value, Mapping) else shown(value)
            raise CheckpointError(f"{where}: {key} {text} is not read; {takes} is, {HINT}")
        if key not in accepted and key not in harmless and value is not None:
            raise CheckpointError(
                f"{where}: key {shown(key)} is not understood, and it may change the result"
            )


def require_integers(
    where: str,
    config: Mapping[str, Any],
    accepted: Mapping[str, tuple[Any, ...]],
    harmless: set[str],
) -> None:
    """As `require`, of a layout of integers with `bits`, which AutoRound may have written."""
    config = {"bits": "missing", **config}
    require(where, config, {**AUTO_ROUND, **accepted}, harmless | _AUTO_ROUND)
