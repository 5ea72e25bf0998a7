"""mxfp4 and nvfp4: weights in 4-bit floating point (E2M1) with a small scale for every few columns.

mxfp4 is the OCP Microscaling format: powers of two (E8M0) for every 32 columns. nvfp4 is NVIDIA's:
E4M3 scales for every 16 columns, and one float32 scale for the whole weight.
"""

import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
from torchao.prototype.mx_formats.nvfp4_tensor import (
    NVFP4Tensor,
    nvfp4_quantize,
    per_tensor_amax_to_scale,
)

from quantize.packed import PackedWeight
from quantize.scheme import Kernel, Scheme, in_row_blocks, multiple_refuses, our_kernels
from quantize.spec import Spec

MX_COLUMNS, NV_COLUMNS = 32, 16


def quantize_mx(w: Tensor, spec: Spec) -> PackedWeight:
    """Scales are rounded up to the power of two that saturates nothing."""
    return in_row_blocks(_quantize_mx, w)


def _quantize_mx(w: Tensor) -> PackedWeight:
    theirs = MXTensor.to_mx(
        w.float().contiguous(),
        torch.float4_e2m1fn_x2,
        MX_COLUMNS,
        scaling_mode=ScaleCalculationMode.RCEIL,
    )
    return _packed(w, theirs.qdata, theirs.scale, MX_COLUMNS, None)


def quantize_nv(w: Tensor, spec: Spec) -> PackedWeight:
    least, most = w.aminmax()
    # A weight of zeros would make the scale, which divides, zero.
    amax = torch.maximum(-least, most).float().clamp(min=torch.finfo(torch.float32).tiny * 2**20)
    tensor_scale = per_tensor_amax_to_scale(amax)
    return in_row_blocks(lambda rows: _quantize_nv(rows, tensor_scale), w)


def _quantize_nv(w: Tensor, tensor_scale: Tensor) -> PackedWeight:
    scale, codes = nvfp4_quantize(w.float().contiguous(), NV_COLUMNS, tensor_scale)
    return _packed(w, codes, scale, NV_COLUMNS, tensor_scale)


def _packed(
    w: Tensor, codes: Tensor, scale: Tensor, columns: int, tensor_scale: Tensor | None
) -> PackedWeight:
    return PackedWeight.make(
        [codes.view(torch.uint8).reshape(w.shape[0], -1)],
        scale.reshape(w.shape[0], -1),
        format="fp4",
        bits=4,
        columns=w.shape[1],
        dtype=w.dtype,
        group_size=columns,
        tensor_scale=tensor_scale,
    )


def as_torchao(layer: nn.Linear, spec: Spec) -> nn.Module:
    ours = layer.weight.data
    theirs = NVFP4Tensor(ours.plane0, ours.scale, NV_COLUMNS, ours.dtype, ours.tensor_scale)
    layer.weight = nn.Parameter(theirs, requires_grad=False)
    return layer


def _unavailable(spec: Spec, device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype == torch.float16:
        return "torchao's nvfp4 takes --precision bfloat16 or float32, not float16"
    return None


MX = Scheme(quantize_mx, our_kernels(), multiple_refuses(MX_COLUMNS))
NV = Scheme(
    quantize_nv,
    {**our_kernels(), "torchao": Kernel(as_torchao, _unavailable)},
    multiple_refuses(NV_COLUMNS),
)
