"""float8wo and float8dq: E4M3 weights, and activations, with torchao's kernels or ours."""

import torch
from torch import Tensor, nn
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Float8Tensor, PerRow, PerTensor
from torchao.quantization.quant_primitives import _quantize_affine_float8
from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
    QuantizeTensorToFloat8Kwargs,
)

from quantize.activation import E4M3_MAX
from quantize.packed import PackedWeight
from quantize.scheme import Kernel, Scheme, in_row_blocks, our_kernels
from quantize.spec import Float8DynamicActivation, Spec


def quantize(w: Tensor, spec: Spec) -> PackedWeight:
    """e4m3 = w / scale, scale = max|w| / 448 of the row, float32."""
    return in_row_blocks(lambda rows: _quantize(rows, rows.abs().amax(1, keepdim=True)), w)


def quantize_dynamic(w: Tensor, spec: Float8DynamicActivation) -> PackedWeight:
    if spec.granularity == "row":
        return quantize(w, spec).replaced(activation="float8-row")
    least, most = w.aminmax()
    amax = torch.maximum(-least, most).reshape(1, 1)
    packed = in_row_blocks(lambda rows: _quantize(rows, amax.expand(rows.shape[0], 1)), w)
    return packed.replaced(activation="float8-tensor")


def _quantize(w: Tensor, amax: Tensor) -> PackedWeight:
    scale = amax.float().clamp(min=1e-12) / E4M3_MAX
    codes = _quantize_affine_float8(w, scale, torch.float8_e4m3fn)
    return PackedWeight.make(
        [codes], scale, format="fp8", bits=8, columns=w.shape[1], dtype=w.dtype
    )


def as_torchao(layer: nn.Linear, spec: Spec) -> nn.Module:
    ours = layer.weight.data
    block = [1, ours.columns]
    theirs = Float8Tensor(ours.plane0, ours.scale, block_size=block, dtype=ours.dtype)
    layer.weight = nn.Parameter(theirs, requires_grad=False)
    return layer


def as_torchao_dynamic(layer: nn.Linear, spec: Float8DynamicActivation) -> nn.Module:
    ours = layer.weight.data
    by_row = spec.granularity == "row"
    theirs = Float8Tensor(
        ours.plane0,
        ours.scale if by_row else ours.scale[:1].clone(),
        block_size=[1, ours.columns] if by_row else list(ours.shape),
        mm_config=Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(
            granularity=PerRow() if by_row else PerTensor()
        ),
        dtype=ours.dtype,
    )
    layer.weight = nn.Parameter(theirs, requires_grad=False)
    return layer


def _unavailable(
    spec: Float8DynamicActivation, device: torch.device, dtype: torch.dtype
) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return "torchao's float8 products need a GPU of compute capability 8.9 or more"
    if spec.granularity == "row" and dtype != torch.bfloat16:
        return f"torchao's row-wise float8 takes --precision bfloat16, not {str(dtype)[6:]}"
    return None


def _refuses(spec: Spec, device: torch.device, in_features: int, out_features: int) -> str | None:
    if in_features % 16 or out_features % 16:
        return f"is {out_features} by {in_features}; torchao's float8 takes multiples of 16"
    return None


WEIGHT_ONLY = Scheme(quantize, our_kernels(torchao=Kernel(as_torchao)))
DYNAMIC = Scheme(
    quantize_dynamic,
    our_kernels(torchao=Kernel(as_torchao_dynamic, _unavailable, _refuses)),
)
