"""Kernels "triton" (ops/triton/linear.py) and "inductor"."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.ops.formats import Packed, check_finite
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
    scale_kind: str  # as ops.triton.linear.as_bytes gives it

    @classmethod
    def of(cls, layer: nn.Linear, spec: Any) -> nn.Module:
        """Scales that a file stores as codes become floats here, once, and not in every step.

        Raises KernelError for numbers that are not finite: a kernel reads E4M3's NaN as 480.
        """
        weight = cast(PackedWeight, layer.weight.data)
        parts = weight.parts.plain
        if not weight.is_meta:
            check_finite(parts.planes[0], parts.scale, parts.zero)
        from quantbench.ops.triton.linear import as_bytes

        linear_layer = cls.like(layer, cls.kept(parts.planes[0]))
        scale, linear_layer.scale_kind = as_bytes(parts.scale)
        for name in ("plane1", "plane2", "scale", "zero", "tensor_scale"):
            part = scale if name == "scale" else parts.tensors.get(name)
            linear_layer.register_parameter(
                name, None if part is None else nn.Parameter(part, False)
            )
        linear_layer.codes = parts.format, parts.bits, parts.group_size
        linear_layer.round_as(weight)
        return linear_layer

    @staticmethod
    def kept(plane: Tensor) -> Tensor:
        """Floats of 8 bits as bytes (ops/e4m3.py)."""
        return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, codes={self.codes}, activation={self.activation}"

    def forward(self, x: Tensor) -> Tensor:
        from quantbench.ops.triton.linear import linear

        planes = [p for p in (self.weight, self.plane1, self.plane2) if p is not None]
        weight = Packed(planes, self.scale, self.zero, self.tensor_scale, *self.codes)
        rows = x.numel() // x.shape[-1]
        multiply: Callable[[Tensor, Packed], Tensor] = partial(linear, scale_kind=self.scale_kind)
        if self._has_bytes and rows >= LEAST_INT_MM_ROWS:
            multiply = of_bytes
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


class InductorLinear(TritonLinear):
    """Numbers of 8 bits: one row of a compiled step is multiplied by what inductor makes of it, a
    matrix-vector product that widens the weight in registers. For more rows it would write the
    weight in x's dtype first, as plain torch does: they are our Triton kernel's."""

    @staticmethod
    def kept(plane: Tensor) -> Tensor:
        return plane  # which inductor converts

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() != x.shape[-1] or not torch.compiler.is_compiling():
            return super().forward(x)
        y = F.linear(x, self.weight.to(x.dtype)).float() * self.scale.flatten()
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def of_bytes(x: Tensor, weight: Packed) -> Tensor:
    """x (…, K), whole numbers of 8 bits, times a weight of bytes with a scale for each row: int8
    products, summed in int32."""
    y = torch._int_mm(x.flatten(0, -2).to(torch.int8), weight.planes[0].t())
    return (y.float() * weight.scale.t()).unflatten(0, x.shape[:-1])
