"""mxfp4 and nvfp4: weights in 4-bit floating point (E2M1) with a small scale for every few columns.

mxfp4 is the OCP Microscaling format: powers of two (E8M0) for every 32 columns. nvfp4 is NVIDIA's:
E4M3 scales for every 16 columns, and one float32 scale for the whole weight.
"""

import torch
from torch import Tensor
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
from torchao.prototype.mx_formats.nvfp4_tensor import (
    NVFP4Tensor,
    nvfp4_quantize,
    per_tensor_amax_to_scale,
)

from quantbench.quantize.kernel import Kernel
from quantbench.quantize.kernels import by_torchao, our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.scheme import Scheme, in_row_blocks, multiple_refuses
from quantbench.quantize.spec import MxFloat4, NvFloat4, Spec

MX_COLUMNS, NV_COLUMNS = 32, 16


def quantize_mx(w: Tensor, spec: Spec) -> PackedWeight:
    """Scales are rounded up to the power of two that saturates nothing."""
    stock = MXTensor.to_mx(
        w.float().contiguous(),
        torch.float4_e2m1fn_x2,
        MX_COLUMNS,
        scaling_mode=ScaleCalculationMode.RCEIL,
    )
    return _packed(w, stock.qdata, stock.scale, MX_COLUMNS, None)


def quantize_nv(w: Tensor, spec: Spec) -> PackedWeight:
    least, most = w.aminmax()
    # The scale divides, so it must not be zero for a weight of zeros.
    amax = torch.maximum(-least, most).float().clamp(min=torch.finfo(torch.float32).tiny * 2**20)
    tensor_scale = per_tensor_amax_to_scale(amax)
    return in_row_blocks(lambda rows: _quantize_nv(rows, tensor_scale), w)


def _quantize_nv(w: Tensor, tensor_scale: Tensor) -> PackedWeight:
    scale, codes = nvfp4_quantize(w.float().contiguous(), NV_COLUMNS, tensor_scale)
    return _packed(w, codes, scale, NV_COLUMNS, tensor_scale)


def _packed(
    w: Tensor, codes: Tensor, scale: Tensor, columns: int, tensor_scale: Tensor | None
) -> PackedWeight:
    plane, scale = (part.reshape(w.shape[0], -1) for part in (codes.view(torch.uint8), scale))
    return PackedWeight.make(w, [plane], scale, "fp4", 4, columns, tensor_scale=tensor_scale)


def _nv_tensor(weight: PackedWeight, spec: Spec) -> NVFP4Tensor:
    return NVFP4Tensor(weight.plane0, weight.scale, NV_COLUMNS, weight.dtype, weight.tensor_scale)


def _unavailable(spec: Spec, device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype == torch.float16:
        return "torchao's nvfp4 takes --precision bfloat16 or float32, not float16"
    return None


# torchao dequantizes the weights at each step, as reference does: it comes last.
NV_KERNELS = {**our_kernels(), "torchao": Kernel(by_torchao(_nv_tensor), _unavailable)}
SCHEMES = {
    MxFloat4: Scheme(quantize_mx, our_kernels(), multiple_refuses(MX_COLUMNS)),
    NvFloat4: Scheme(
        quantize_nv, NV_KERNELS, multiple_refuses(NV_COLUMNS), needs_all_rows=lambda spec: True
    ),
}
