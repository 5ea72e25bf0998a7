"""int4wo-G and int8dq-int4wo-G: torchao's 4-bit numbers, with torchao's kernels or ours.

torchao has two layouts that need no extra package: tinygemm's for the CPU and for CUDA. Both are
made from the PackedWeight here, so the numbers are the same whichever kernel runs.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.ops.formats import Packed
from quantbench.ops.packing import of_tinygemm, pack, unpack
from quantbench.quantize.kernel import Kernel, KernelLinear
from quantbench.quantize.kernels import by_torchao, no_triton, our_kernels
from quantbench.quantize.packed import PackedWeight, product
from quantbench.quantize.scheme import Scheme, groups_refuse, in_range
from quantbench.quantize.schemes.uintx import quantize
from quantbench.quantize.spec import Int4WeightOnly, Int8DynamicActivationInt4Weight

ROWS_OF_A_BLOCK = 64 * 32  # tinygemm's CPU layout interleaves 64 rows at a time
CUBLAS_ROWS = 64  # of x: from here on our Triton kernel unpacks weights for cuBLAS


def quantize_dynamic(w: Tensor, spec: Int8DynamicActivationInt4Weight) -> PackedWeight:
    """Symmetric 4-bit weights; activations rounded to int8 per token, with a zero point."""
    return symmetric(w, spec.group_size).replaced(activation="int8-asymmetric")


def symmetric(w: Tensor, group_size: int) -> PackedWeight:
    """w ≈ q · scale with q from -8 to 7, and scale = max|w| / 7.5 in each group, 16 bits."""
    dtype = torch.float16 if w.dtype == torch.float16 else torch.bfloat16
    groups = in_range(w).unflatten(-1, (-1, group_size))
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-6).to(dtype)
    codes = (groups * (1 / scale.to(groups.dtype))).round_().clamp_(-8, 7).add_(8)
    planes = pack(codes.to(torch.uint8).flatten(-2), 4)
    return PackedWeight.make(w, planes, scale.squeeze(-1), "int", 4, group_size)


def _tinygemm(layer: nn.Linear, spec: Int4WeightOnly) -> nn.Module:
    if layer.weight.device.type == "cuda":
        return CudaLinear.of(layer, spec)
    return KernelLinear.like(layer, _cpu_tensor(layer.weight.data))


def _cpu_tensor(weight: PackedWeight) -> Tensor:
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    planes = weight.plane0.split(ROWS_OF_A_BLOCK)
    # The conversion takes int32 codes, eight times the size: some rows at a time.
    packed = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack([plane], 4).int(), 1)
        for plane in planes
    ]
    scale_and_zero = _together(weight.scale, weight.zero, weight.dtype)
    block = [1, weight.group_size]
    return Int4OpaqueTensor(torch.cat(packed), scale_and_zero, block, weight.shape)


def _together(scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """(K // group_size, N, 2), as tinygemm's kernels read them."""
    return torch.stack((scale, zero), -1).transpose(0, 1).to(dtype).contiguous()


class CudaLinear(KernelLinear):
    """tinygemm for a few rows. It converts the weights anew for every 16: a prompt's rows are
    multiplied by cuBLAS, as our Triton kernel does it."""

    @classmethod
    def of(cls, layer: nn.Linear, spec: Int4WeightOnly) -> nn.Module:
        from torchao.quantization import Int4TilePackedTo4dTensor

        weight = cast(PackedWeight, layer.weight.data)
        rows, columns = weight.shape
        to_rows, to_columns = -rows % 8, -columns % 1024  # what the layout wants multiples of
        # In the layout the first of two codes has a byte's high bits, here the low; 0x88 is zero.
        swapped = (weight.plane0 << 4) | (weight.plane0 >> 4)
        padded = F.pad(swapped, (0, to_columns // 2, 0, to_rows), value=0x88)
        groups = (0, to_columns // weight.group_size, 0, to_rows)
        scale_and_zero = _together(
            F.pad(weight.scale, groups), F.pad(weight.zero, groups), torch.bfloat16
        )
        packed = torch.ops.aten._convert_weight_to_int4pack(padded, 8)
        block = [1, weight.group_size]
        tiles = Int4TilePackedTo4dTensor(packed, scale_and_zero, block, weight.shape)
        return cls.like(layer, tiles)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() < CUBLAS_ROWS or no_triton(None, x.device, x.dtype):
            return super().forward(x)
        from quantbench.ops.triton.linear import linear

        tiles = self.weight
        N, K, group_size = *tiles.shape, tiles.block_size[1]
        plane = of_tinygemm(tiles.qdata)[:N, : K // 2]
        scale, zero = tiles.scale_and_zero[: K // group_size, :N].permute(2, 1, 0)
        weight = Packed([plane], scale, zero, None, "int", 4, group_size)
        return product(linear, x, weight, None, self.bias)


def _unavailable(spec: Int4WeightOnly, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return "torchao's int4 kernels need the CPU or CUDA"
    if dtype != torch.bfloat16:
        return f"torchao's CUDA kernel takes --precision bfloat16, not {str(dtype)[6:]}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "torchao's CUDA kernel needs compute capability 8.0 or more"
    return None


def _refuses(
    spec: Int4WeightOnly, device: torch.device, in_features: int, out_features: int
) -> str | None:
    if device.type == "cpu" and out_features % 16:
        return f"has out_features {out_features}; torchao's CPU kernel takes multiples of 16"
    return None


def _dynamic_tensor(weight: PackedWeight, spec: Int8DynamicActivationInt4Weight) -> Tensor:
    """torchao keeps these weights a byte each and multiplies by what they dequantize to."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    return IntxUnpackedToInt8Tensor(
        unpack([weight.plane0], 4).to(torch.int8) - 8,
        weight.scale.to(weight.dtype),
        torch.zeros_like(weight.scale, dtype=torch.int8),
        torch.int4,
        (1, weight.group_size),
        weight.dtype,
        "int8_asym_per_token",
    )


KERNELS = our_kernels(torchao=Kernel(_tinygemm, _unavailable, _refuses))
# torchao's kernel for int8 activations dequantizes the weights at each step, as reference does,
# from twice the bytes: it is there to compare with, and last.
DYNAMIC_KERNELS = {**our_kernels(), "torchao": Kernel(by_torchao(_dynamic_tensor), rounds=True)}
SCHEMES = {
    Int4WeightOnly: Scheme(quantize, KERNELS, groups_refuse),
    Int8DynamicActivationInt4Weight: Scheme(quantize_dynamic, DYNAMIC_KERNELS, groups_refuse),
}
