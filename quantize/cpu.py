"""The C++ kernels for the CPU (ops/cpu/linear.py), for every scheme: a layer keeps its weight
in the one order that they read it in, and nothing else."""

from typing import Any

import torch
from torch import Tensor, nn

from quantize.activation import rounded
from quantize.packed import PackedWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedLinear(nn.Linear):
    """A linear layer whose weight is bytes that only the kernel understands, in a plain tensor."""

    activation: str | None = None  # how activations are rounded here, and not by the kernel
    rounded = False  # whether they are by the kernel

    @property
    def in_cpp(self) -> bool:
        """Whether other C++ kernels can call this one's: `forward` does nothing besides."""
        return self.activation is None

    def forward(self, x: Tensor) -> Tensor:
        from ops.cpu.linear import linear

        if self.activation is None:
            y = linear(x, self.weight, self.out_features, self.rounded)
        else:
            numbers, scale = rounded(x.float(), self.activation)
            y = (linear(numbers, self.weight, self.out_features) * scale).to(x.dtype)
        return y if self.bias is None else y + self.bias


def as_cpu(layer: nn.Linear, spec: Any) -> nn.Module:
    """A layer with a PackedWeight, or with a weight in full precision, for the C++ kernel.

    Raises KernelError for scales that are not finite.
    """
    from ops.cpu.linear import ROUNDINGS, pack

    weight, columns = layer.weight.data, layer.in_features
    quantized = isinstance(weight, PackedWeight)
    activation = weight.activation if quantized else None
    inside = activation if activation in ROUNDINGS else None
    packed = PackedLinear(columns, layer.out_features, False, "meta")
    bytes_ = pack(weight.parts if quantized else weight, columns, inside)
    packed.weight = nn.Parameter(bytes_, requires_grad=False)
    packed.bias = layer.bias
    packed.activation = None if inside else activation
    packed.rounded = inside is not None
    return packed


def no_cpu(spec: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return "the C++ kernels run on the CPU"
    if dtype not in DTYPES:
        return f"the C++ kernels take float32, bfloat16 and float16, not {str(dtype)[6:]}"
    from ops.cpu import build

    return build.refusal()
