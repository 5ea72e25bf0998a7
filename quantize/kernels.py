"""The kernels that run every PackedWeight, and what torchao's have in common."""

import importlib.util
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.quantize import cpu
from quantbench.quantize.kernel import Kernel, KernelLinear
from quantbench.quantize.packed import PackedWeight, product


class ReferenceLinear(KernelLinear):
    """Plain torch (ops/reference.py), which F.linear calls for every PackedWeight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TritonLinear(KernelLinear):
    """Our Triton kernel (ops/triton/linear.py)."""

    @classmethod
    def of(cls, layer: nn.Linear, spec: Any) -> nn.Module:
        """Scales that a file stores as codes become floats here, once, and not in every step."""
        weight = layer.weight.data
        assert isinstance(weight, PackedWeight)
        parts = weight.parts
        if (plain := parts.plain) is not parts:
            how = {"columns": weight.columns, "dtype": weight.dtype}
            weight = PackedWeight.of(plain, **how).replaced(activation=weight.activation)
        return cls.like(layer, weight)

    def forward(self, x: Tensor) -> Tensor:
        from quantbench.ops.triton.linear import linear

        return product(linear, x, self.weight, self.bias)


class TorchaoLinear(KernelLinear):
    """torchao's product: the weight is one of its tensor subclasses, which F.linear calls."""

    @classmethod
    def of(cls, layer: nn.Linear, spec: Any) -> nn.Module:
        return cls.like(layer, cls.converted(layer.weight.data, spec))

    @staticmethod
    def converted(weight: PackedWeight, spec: Any) -> Tensor:
        """torchao's tensor subclass with the same numbers, (N, K)."""
        raise NotImplementedError


def our_kernels(**others: Kernel) -> dict[str, Kernel]:
    """Kernels by name, fastest first, as far as can be said in general; `others` after cpu."""
    return {
        "cpu": cpu.PACKED,
        **others,
        "triton": Kernel(TritonLinear.of, no_triton),
        "reference": Kernel(ReferenceLinear.of),
    }


def no_triton(spec: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return "Triton needs a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return None
