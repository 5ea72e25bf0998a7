"""bnb-int8, bnb-nf4 and bnb-fp4: bitsandbytes' numbers and kernels.

bnb-int8 is LLM.int8() without its outlier columns, which are picked while the product runs and so
cannot be compiled into one graph: its threshold is 0. The 4-bit formats take blocks of 64 along a
row with one float32 scale each, without nested quantization of the scales.
"""

import importlib.util
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import CheckpointError, KernelError
from quantize.packed import PackedWeight
from quantize.scheme import Kernel, Scheme, in_row_blocks, our_kernels
from quantize.spec import BitsAndBytes

BLOCK = 64
MISSING = "bitsandbytes is not installed: pip install bitsandbytes"


def load() -> None:
    """Import bitsandbytes, which registers torch.ops.bitsandbytes; KernelError if it is not there.

    It looks for kernels of Hugging Face's package `kernels`, finds ours, and would say so.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise KernelError(MISSING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes  # noqa: F401


def quantize(w: Tensor, spec: BitsAndBytes) -> PackedWeight:
    if not w.is_meta:
        load()
    if spec.form == "int8":
        return in_row_blocks(_quantize_int8, w).replaced(activation="int8-bitsandbytes")
    return in_row_blocks(lambda rows: _quantize_4bit(rows, spec.form), w)


def _quantize_int8(w: Tensor) -> PackedWeight:
    if w.is_meta:
        codes, largest = w.to(torch.int8), w.new_empty(w.shape[0], dtype=torch.float32)
    else:
        codes, largest, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(w.half(), 0.0)
        if not largest.isfinite().all():
            raise CheckpointError("bnb-int8 takes float16 weights; here one is beyond 65504")
    return PackedWeight.make(
        [codes], largest[:, None] / 127, format="int", bits=8, columns=w.shape[1], dtype=w.dtype
    )


def _quantize_4bit(w: Tensor, form: str) -> PackedWeight:
    N, K = w.shape
    if w.is_meta:
        codes = w.new_empty(N * K // 2, dtype=torch.uint8)
        largest = w.new_empty(N * K // BLOCK, dtype=torch.float32)
    else:
        codes, largest = torch.ops.bitsandbytes.quantize_4bit(
            w.contiguous(), BLOCK, form, torch.uint8
        )
    return PackedWeight.make(
        [_swapped(codes).reshape(N, K // 2)],
        largest.reshape(N, K // BLOCK),
        format="nf4" if form == "nf4" else "bnb-fp4",
        bits=4,
        columns=K,
        dtype=w.dtype,
        group_size=BLOCK,
    )


def _swapped(codes: Tensor) -> Tensor:
    """bitsandbytes keeps the first of two codes in a byte's high bits, we in its low ones."""
    return (codes << 4) | (codes >> 4)


def as_bitsandbytes(layer: nn.Linear, spec: BitsAndBytes) -> nn.Module:
    load()
    return Int8Linear(layer) if spec.form == "int8" else FourBitLinear(layer, spec.form)


class Int8Linear(nn.Module):
    """Activations rounded to int8 per token, int32 sums, by bitsandbytes' ops."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        ours = layer.weight.data
        self.weight, self.bias = nn.Parameter(ours.plane0, requires_grad=False), layer.bias
        self.largest = nn.Parameter(ours.scale[:, 0] * 127, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        ops, rows = torch.ops.bitsandbytes, x.flatten(0, -2)
        codes, largest, _ = ops.int8_vectorwise_quant(rows.half(), 0.0)
        y = ops.int8_scaled_mm(codes, self.weight, largest, self.largest, None, x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.unflatten(0, x.shape[:-1])


class FourBitLinear(nn.Module):
    """Weights dequantized by bitsandbytes' op, then multiplied by torch."""

    def __init__(self, layer: nn.Linear, form: str) -> None:
        super().__init__()
        ours = layer.weight.data
        self.form, self.shape = form, tuple(ours.shape)
        codes = _swapped(ours.plane0).reshape(-1, 1)
        self.weight, self.bias = nn.Parameter(codes, requires_grad=False), layer.bias
        self.largest = nn.Parameter(ours.scale.reshape(-1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.ops.bitsandbytes.dequantize_4bit(
            self.weight, self.largest, BLOCK, self.form, self.shape, x.dtype
        )
        return F.linear(x, weight, self.bias)


def _unavailable(spec: BitsAndBytes, device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("bitsandbytes") is None:
        return MISSING
    return None if device.type in ("cpu", "cuda", "xpu") else "bitsandbytes needs the CPU or a GPU"


def _refuses(spec: BitsAndBytes, in_features: int) -> str | None:
    multiple = 1 if spec.form == "int8" else BLOCK
    if in_features % multiple == 0:
        return None
    return f"has in_features {in_features}; {spec} takes multiples of {multiple}"


SCHEME = Scheme(quantize, our_kernels(bitsandbytes=Kernel(as_bitsandbytes, _unavailable)), _refuses)
