"""Kernel "cpu" of quantized weights: C++ (ops/cpu). For plain ones: schemes/full_precision.py."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.errors import KernelError
from quantbench.ops.cpu import build, linear
from quantbench.quantize.activation import rounded
from quantbench.quantize.kernel import Kernel, RoundingLinear
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.parts_tensor import PartsTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedLinear(RoundingLinear):
    """The weight is bytes in the one order in which the C++ kernel reads them, and nothing else."""

    @classmethod
    def of(cls, layer: nn.Linear, spec: Any) -> nn.Module:
        """Raises KernelError for scales that are not finite, and if the library cannot be built."""
        weight = cast(PackedWeight, layer.weight.data)
        activation = weight.activation
        in_kernel = activation if activation in linear.ROUNDINGS else None
        linear_layer = cls.like(layer, linear.pack(weight.parts, layer.in_features, in_kernel))
        linear_layer.round_as(weight)
        return linear_layer

    @property
    def rounds_before(self) -> str | None:
        """How activations are rounded in Python before the product; None if they are not rounded,
        or if the kernel does it, as the bytes' header says."""
        return None if self.activation in linear.ROUNDINGS else self.activation

    def share(self, embedding: nn.Embedding) -> None:
        """Let an embedding of the same PackedWeight look its rows up in this layer's bytes."""
        weight = cast(PackedWeight, embedding.weight.data)
        table = PackedTable(self.weight.data, weight[:0].clone(), weight.shape[0])
        embedding.weight = nn.Parameter(table, requires_grad=False)

    @property
    def fused_weight(self) -> Tensor | None:
        """The bytes, unless activations are rounded in Python."""
        return self.weight if self.rounds_before is None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.rounds_before is None:
            y = linear.linear(x, self.weight, self.out_features)
        else:
            numbers, scale = rounded(x.float(), self.rounds_before, self.activation_scale)
            y = (linear.linear(numbers, self.weight, self.out_features) * scale).to(x.dtype)
        return y if self.bias is None else y + self.bias


class PackedTable(PartsTensor):
    """The table (V, K) of an embedding whose rows are those of a PackedLinear."""

    tensors = ("packed", "like")
    attributes = ("rows",)
    packed: Tensor
    like: PackedWeight
    rows: int

    def __new__(cls, packed: Tensor, like: PackedWeight, rows: int) -> "PackedTable":
        """packed: the layer's bytes. like: the weight that they were made of, without its rows."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, (rows, like.columns), dtype=like.dtype, device=packed.device, requires_grad=False
        )
        self.packed, self.like, self.rows = packed, like, rows
        return self


@PackedTable.implements(F.embedding)
def _(func: Any, input: Tensor, weight: PackedTable, *_: Any, **options: Any) -> Tensor:
    like = weight.like
    rows = linear.rows_of(weight.packed, like.parts, like.columns, input.flatten())
    return PackedWeight.of(rows, like.columns, like.dtype).dequantize().unflatten(0, input.shape)


@PackedTable.implements(torch.ops.aten.embedding.default)
def _(func: Any, weight: PackedTable, indices: Tensor, *_: Any, **options: Any) -> Tensor:
    return F.embedding(indices, weight)


@PackedTable.implements(torch.ops.aten._to_copy.default)
def _(
    func: Any, input: PackedTable, *, dtype: Any = None, device: Any = None, **options: Any
) -> Tensor:
    """Rows have another dtype; the bytes stay shared."""
    packed = input.packed.to(device or input.device)
    return PackedTable(packed, input.like.replaced(dtype=dtype or input.dtype), input.rows)


def no_cpu(spec: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the C++ kernels cannot run there, as far as can be said without building them."""
    if device.type != "cpu":
        return "the C++ kernels run on the CPU"
    if dtype not in DTYPES:
        return f"the C++ kernels take float32, bfloat16 and float16, not {str(dtype)[6:]}"
    return build.unavailable()


def prepare() -> None:
    """Load the C++ library, built first if the cache has none: up to four minutes.

    Raises KernelError with the reason.
    """
    if reason := build.refusal():
        raise KernelError(reason)


PACKED = Kernel(PackedLinear.of, no_cpu, prepare=prepare, takes_shapes=True)
