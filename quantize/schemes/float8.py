"""float8wo and float8dq: E4M3 weights, and activations, with torchao's kernels or ours."""

import torch
from torch import Tensor

from quantbench.quantize.activation import E4M3_MAX
from quantbench.quantize.kernel import Kernel
from quantbench.quantize.kernels import by_inductor, by_torchao, our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.scheme import Scheme, in_row_blocks
from quantbench.quantize.spec import Float8DynamicActivation, Float8WeightOnly, Spec


def quantize(w: Tensor, spec: Spec) -> PackedWeight:
    """e4m3 = w / scale, scale = max|w| / 448 of the row, float32."""
    return _quantize(w, w.abs().amax(1, keepdim=True))


def quantize_dynamic(w: Tensor, spec: Float8DynamicActivation) -> PackedWeight:
    """Like `quantize` for "row"; for "tensor" every row has the scale of the whole weight."""
    if spec.granularity == "row":
        return quantize(w, spec).replaced(activation="float8-row")
    least, most = w.aminmax()
    amax = torch.maximum(-least, most).reshape(1, 1)
    packed = in_row_blocks(lambda rows: _quantize(rows, amax.expand(rows.shape[0], 1)), w)
    return packed.replaced(activation="float8-tensor")


def _quantize(w: Tensor, amax: Tensor) -> PackedWeight:
    scale = amax.float().clamp(min=1e-12) / E4M3_MAX
    codes = (w.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return PackedWeight.make(w, [codes], scale, "fp8", 8)


def _tensor(weight: PackedWeight, spec: Spec) -> Tensor:
    from torchao.quantization import Float8Tensor

    block = [1, weight.columns]
    return Float8Tensor(weight.plane0, weight.scale, block_size=block, dtype=weight.dtype)


def _dynamic_tensor(weight: PackedWeight, spec: Float8DynamicActivation) -> Tensor:
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
        QuantizeTensorToFloat8Kwargs,
    )

    by_row = spec.granularity == "row"
    granularity = PerRow() if by_row else PerTensor()
    return Float8Tensor(
        weight.plane0,
        weight.scale if by_row else weight.scale[:1].clone(),
        block_size=[1, weight.columns] if by_row else list(weight.shape),
        mm_config=Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=granularity),
        dtype=weight.dtype,
    )


def _no_e4m3(spec: Spec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Triton has no conversion of E4M3 below 8.9: inductor falls back to plain torch, which writes
    every weight in 16 bits, and 2.11 and 2.12 fail (https://github.com/pytorch/pytorch/issues/167082).
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "inductor multiplies float8 from compute capability 8.9 on"
    return None


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


DYNAMIC_KERNELS = our_kernels(
    torchao=Kernel(by_torchao(_dynamic_tensor), _unavailable, _refuses, rounds=True)
)
SCHEMES = {
    Float8WeightOnly: Scheme(
        quantize,
        our_kernels(
            *("inductor", "triton"),
            inductor=by_inductor(_no_e4m3),
            torchao=Kernel(by_torchao(_tensor), _no_e4m3),
        ),
    ),
    Float8DynamicActivation: Scheme(
        quantize_dynamic, DYNAMIC_KERNELS, needs_all_rows=lambda spec: spec.granularity == "tensor"
    ),
}
