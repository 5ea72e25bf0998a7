"""int8wo and int8dq: torchao's numbers, with ours or torchao's kernels, imported where they run."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.quantize.activation import SMALLEST
from quantbench.quantize.kernel import Kernel, KernelLinear
from quantbench.quantize.kernels import LEAST_INT_MM_ROWS, by_inductor, by_torchao, our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.scheme import Scheme, in_range
from quantbench.quantize.spec import Int8DynamicActivation, Int8Embedding, Int8WeightOnly, Spec


def quantize(w: Tensor, spec: Spec) -> PackedWeight:
    """Symmetric, one float32 scale per row: int8 = round(w / scale), scale = max|w| / 127.5."""
    wide = in_range(w)
    scale = (wide.abs().amax(1, keepdim=True) / 127.5).clamp(min=SMALLEST).float()
    codes = (wide * (1 / scale)).round_().clamp_(-128, 127).to(torch.int8)
    return PackedWeight.make(w, [codes], scale, "int", 8)


def quantize_dynamic(w: Tensor, spec: Spec) -> PackedWeight:
    """The same weights; activations are rounded to int8 per token, products summed in int32."""
    return quantize(w, spec).replaced(activation="int8")


def _tensor(ours: PackedWeight, spec: Spec) -> Tensor:
    from torchao.quantization import Int8Tensor, PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

    activations = (
        QuantizeTensorToInt8Kwargs(granularity=PerRow()) if spec.rounds_activations else None
    )
    return Int8Tensor(
        ours.plane0, ours.scale, [1, ours.columns], ours.dtype, act_quant_kwargs=activations
    )


class DynamicLinear(KernelLinear):
    """Hands torchao's kernel rows: (B, S, K) goes in as (B · S, K).

    Compiled for one token, torchao's int8dq calls torch._int_mm on a (1, K) view whose row stride
    inductor is free to set to 0, and on the CPU that product reads elsewhere in memory (torch
    2.13: errors of 1e4 times the result). A row that is two-dimensional from the start keeps its
    stride. On CUDA torch._int_mm takes no fewer than LEAST_INT_MM_ROWS: zeros make up for others.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        missing = max(0, LEAST_INT_MM_ROWS - rows.shape[0]) if x.is_cuda else 0
        y = F.linear(F.pad(rows, (0, 0, 0, missing)), self.weight, self.bias)
        y = y.narrow(0, 0, rows.shape[0])
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _refuses(spec: Spec, device: torch.device, in_features: int, out_features: int) -> str | None:
    """Why torch's CPU product cannot be trusted with a layer, or None.

    Compiled, int8wo becomes aten._weight_int8pack_mm, which loads 16 weights at a time without a
    tail (torch 2.13): other widths read past the row, and give garbage or a segmentation fault.
    """
    if device.type == "cpu" and in_features % 16:
        return f"has in_features {in_features}; on the CPU that has to be a multiple of 16"
    return None


def _unavailable(spec: Spec, device: torch.device, dtype: torch.dtype) -> str | None:
    """torchao puts the product in the activations' dtype before it multiplies by the weights' scale
    (0.18; https://github.com/pytorch/ao/issues/1662): results of some 50 are infinite in float16.
    """
    if dtype == torch.float16:
        return "torchao's int8 products overflow float16; it takes --precision bfloat16 or float32"
    return None


# On CUDA ours come first. torchao's int8wo is a product that inductor writes the whole weight in
# 16 bits for, unless it is compiled and of one row; its int8dq multiplies bytes from 17 rows on, as
# Triton's does, and pads fewer.
WEIGHT_ONLY = Scheme(
    quantize,
    our_kernels(
        *("inductor", "triton"),
        inductor=by_inductor(_unavailable),
        torchao=Kernel(by_torchao(_tensor), _unavailable, _refuses),
    ),
)
DYNAMIC = Scheme(
    quantize_dynamic,
    our_kernels(
        "triton", torchao=Kernel(by_torchao(_tensor, DynamicLinear), _unavailable, rounds=True)
    ),
)
SCHEMES = {Int8WeightOnly: WEIGHT_ONLY, Int8Embedding: WEIGHT_ONLY, Int8DynamicActivation: DYNAMIC}
