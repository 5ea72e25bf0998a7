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

from quantbench.errors import CheckpointError
from quantbench.ops.formats import TABLES
from quantbench.ops.packing import pack
from quantbench.quantize.kernel import Kernel, KernelLinear
from quantbench.quantize.kernels import our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.scheme import Scheme, multiple_refuses
from quantbench.quantize.spec import BitsAndBytes

BLOCK = 64


def load() -> None:
    """Import bitsandbytes, which registers torch.ops.bitsandbytes.

    It looks for kernels of Hugging Face's package `kernels`, finds ours, and would say so.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes  # noqa: F401


def quantize(w: Tensor, spec: BitsAndBytes) -> PackedWeight:
    """Weights (N, K): int8 with a scale per row, or 4 bits with one per block of 64, float32.

    The numbers are bitsandbytes' bit for bit and need only torch. Raises CheckpointError for
    bnb-int8 weights beyond float16.
    """
    if spec.form == "int8":
        return _quantize_int8(w).replaced(activation="int8-bitsandbytes")
    return _quantize_4bit(w, "nf4" if spec.form == "nf4" else "bnb-fp4")


def _quantize_int8(w: Tensor) -> PackedWeight:
    half = w.half()
    largest = half.abs().amax(1, keepdim=True).float()
    if not largest.isfinite().all():
        raise CheckpointError("bnb-int8 takes float16 weights; here a weight is beyond 65504")
    codes = (half * (127 / largest)).nan_to_num_(0).round_().to(torch.int8)  # rows of zeros
    return PackedWeight.make(w, [codes], largest / 127, "int", 8)


def _quantize_4bit(w: Tensor, format: str) -> PackedWeight:
    """Codes of the nearest numbers of the format's table, of two that are as near the smaller; the
    scale is max|w| of each block.

    On the CPU bitsandbytes itself searches for each weight, which takes longer.
    """
    blocks = w.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    inverse = 1.0 / largest.clamp(min=1e-38)
    numbers = (blocks * inverse[..., None]).clamp_(-1, 1).flatten(-2)
    values, order = torch.tensor(TABLES[format], device="cpu").sort(stable=True)
    places = torch.zeros_like(numbers, dtype=torch.uint8)
    larger = torch.empty_like(numbers, dtype=torch.bool)
    for border in ((values[1:] + values[:-1]) / 2).tolist():
        places += torch.gt(numbers, border, out=larger).view(torch.uint8)
    if format != "nf4":  # whose table is in this order
        places = order.to(w.device, torch.uint8)[places.int()]
    return PackedWeight.make(w, pack(places, 4), largest, format, 4, BLOCK)


def build(layer: nn.Linear, spec: BitsAndBytes) -> nn.Module:
    return Int8Linear.of(layer, spec) if spec.form == "int8" else FourBitLinear.of(layer, spec)


class Int8Linear(KernelLinear):
    """Activations rounded to int8 per token, int32 sums, by bitsandbytes' ops."""

    largest: nn.Parameter  # max|w| of each row, (N,) float32

    @classmethod
    def of(cls, layer: nn.Linear, spec: BitsAndBytes) -> nn.Module:
        packed = layer.weight.data
        linear = cls.like(layer, packed.plane0)
        linear.largest = nn.Parameter(packed.scale[:, 0] * 127, requires_grad=False)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        ops, rows = torch.ops.bitsandbytes, x.reshape(-1, x.shape[-1])
        codes, largest, _ = ops.int8_vectorwise_quant(rows.half(), 0.0)
        y = ops.int8_scaled_mm(codes, self.weight, largest, self.largest, None, x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], y.shape[-1])


class FourBitLinear(KernelLinear):
    """bitsandbytes' own product for any number of rows: its matmul_4bit calls it, too."""

    form: str  # "nf4" or "fp4"
    largest: nn.Parameter  # max|w| of each block of 64, (N · K / 64,) float32

    @classmethod
    def of(cls, layer: nn.Linear, spec: BitsAndBytes) -> nn.Module:
        packed = layer.weight.data
        # bitsandbytes keeps the first of two codes in a byte's high bits, we in its low ones.
        swapped = (packed.plane0 << 4) | (packed.plane0 >> 4)
        linear = cls.like(layer, swapped.reshape(-1, 1))
        linear.form = spec.form
        linear.largest = nn.Parameter(packed.scale.reshape(-1), requires_grad=False)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        shape, ops = (self.out_features, self.in_features), torch.ops.bitsandbytes
        if hasattr(ops, "gemm_4bit"):  # from bitsandbytes 0.50 on
            return ops.gemm_4bit(x, self.weight, shape, self.largest, BLOCK, self.form, self.bias)
        weight = ops.dequantize_4bit(self.weight, self.largest, BLOCK, self.form, shape, x.dtype)
        return F.linear(x, weight, self.bias)


def _unavailable(spec: BitsAndBytes, device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed: pip install bitsandbytes"
    return None if device.type in ("cpu", "cuda", "xpu") else "bitsandbytes needs the CPU or a GPU"


def _refuses(spec: BitsAndBytes, in_features: int) -> str | None:
    return None if spec.form == "int8" else multiple_refuses(BLOCK)(spec, in_features)


KERNELS = our_kernels(bitsandbytes=Kernel(build, _unavailable, prepare=load, rounds=True))
SCHEMES = {BitsAndBytes: Scheme(quantize, KERNELS, _refuses)}
