"""Kernel "triton" (ops/triton/linear.py)."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from quantbench.ops.formats import Packed
from quantbench.quantize.kernel import RoundingLinear
from quantbench.quantize.kernels import LEAST_INT_MM_ROWS
from quantbench.quantize.packed import PackedWeight, product

BYTES = ("int8", "int8-static", "int8-bitsandbytes")  # activations whose numbers are int8


class TritonLinear(RoundingLinear):
    """Our Triton kernel (ops/triton/linear.py). Its parameters are plain tensors: torch.compile
    guards every tensor subclass, and takes none into a region that it compiles once for all layers.
    """

    # A PackedWeight's fields; `weight` is its plane0.
    plane1: nn.Parameter | None
    plane2: nn.Parameter | None
    scale: nn.Parameter
    zero: nn.Parameter | None
    tensor_scale: nn.Parameter | None
    codes: tuple[str, int, int]  # format, bits, group_size

    @classmethod
    def of(cls, layer: nn.Linear, spec: Any) -> nn.Module:
        """Scales that a file stores as codes become floats here, once, and not in every step."""
        weight = cast(PackedWeight, layer.weight.data)
        parts = weight.parts.plain
        linear_layer = cls.like(layer, parts.planes[0])
        for name in ("plane1", "plane2", "scale", "zero", "tensor_scale"):
            part = parts.tensors.get(name)
            linear_layer.register_parameter(
                name, None if part is None else nn.Parameter(part, False)
            )
        linear_layer.codes = parts.format, parts.bits, parts.group_size
        linear_layer.round_as(weight)
        return linear_layer

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, codes={self.codes}, activation={self.activation}"

    def forward(self, x: Tensor) -> Tensor:
        from quantbench.ops.triton.linear import linear

        planes = [p for p in (self.weight, self.plane1, self.plane2) if p is not None]
        weight = Packed(planes, self.scale, self.zero, self.tensor_scale, *self.codes)
        rows = x.numel() // x.shape[-1]
        multiply = of_bytes if self._has_bytes and rows >= LEAST_INT_MM_ROWS else linear
        return product(multiply, x, weight, self.activation, self.bias, self.activation_scale)

    @property
    def _has_bytes(self) -> bool:
        """Whether weights and rounded activations are bytes that torch._int_mm takes."""
        return (
            self.codes == ("int", 8, self.in_features)
            and self.zero is None
            and self.tensor_scale is None
            and self.activation in BYTES
            and not (self.in_features % 8 or self.out_features % 8)
        )


def of_bytes(x: Tensor, weight: Packed) -> Tensor:
    """x (…, K), whole numbers of 8 bits, times a weight of bytes with a scale for each row: int8
    products, summed in int32."""
    y = torch._int_mm(x.flatten(0, -2).to(torch.int8), weight.planes[0].t())
    return (y.float() * weight.scale.t()).unflatten(0, x.shape[:-1])
