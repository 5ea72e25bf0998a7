"""What a kernel is: a module class, one mechanism by which a layer multiplies by its weight.

A scheme's kernels are a table of `Kernel`s by name (quantize/scheme.py); the registry picks one for
each layer and calls its `build`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn


class KernelLinear(nn.Linear):
    """A linear layer that multiplies by one kernel; each subclass is one."""

    @classmethod
    def of(cls, layer: nn.Linear, spec: Any) -> nn.Module:
        """The layer in this kernel's form.

        layer: its weight is a PackedWeight, or a plain (N, K) tensor for scheme none; it may be
        changed. Raises KernelError for weights that the kernel cannot take.
        """
        return cls.like(layer, layer.weight)

    @classmethod
    def like(cls, layer: nn.Linear, weight: Tensor) -> Self:
        """A layer of this class with that weight and with `layer`'s shape and bias.

        A Parameter stays the same object, for it may be tied to an embedding's.
        """
        linear = cls(layer.in_features, layer.out_features, False, "meta")
        if not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(weight, requires_grad=False)
        linear.weight, linear.bias = weight, layer.bias
        return linear.train(layer.training)

    @property
    def fused_weight(self) -> Tensor | None:
        """The tensor by which ops/cpu/step multiplies as this layer does; None if it cannot.

        Bytes from ops.cpu.linear.pack, or a plain (N, K) weight in the activations' dtype.
        """
        return None


class RoundingLinear(KernelLinear):
    """A kernel's layer that rounds activations as its PackedWeight said."""

    activation: str | None = None  # quantize/activation.py
    activation_scale: nn.Parameter | None

    def round_as(self, weight: Any) -> None:
        """weight: the PackedWeight."""
        self.activation, static = weight.activation, weight.activation_scale
        scale = None if static is None else nn.Parameter(static, requires_grad=False)
        self.register_parameter("activation_scale", scale)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Scales keep their dtype when the model gets another, as those of a PackedWeight do."""

        def moved(tensor: Tensor) -> Tensor:
            converted: Tensor = fn(tensor)
            same = tensor is self.bias or converted.dtype == tensor.dtype
            return converted if same else tensor.to(converted.device)

        return super()._apply(moved, recurse)


def fused_weight(module: nn.Module) -> Tensor | None:
    """`module.fused_weight` where the module is a kernel's; None for every other module."""
    return module.fused_weight if isinstance(module, KernelLinear) else None


@dataclass(frozen=True)
class Kernel:
    """One way to multiply by a scheme's weights.

    `unavailable` and `refuses` are asked while a run is planned: they load and build nothing.
    """

    # (layer whose weight is quantized, spec) -> the module that multiplies; see KernelLinear.of.
    build: Callable[[nn.Linear, Any], nn.Module]
    # (spec, device, activations' dtype) -> why it can run no layer there, or None.
    unavailable: Callable[[Any, torch.device, torch.dtype], str | None] = lambda *_: None
    # (spec, device, in_features, out_features) -> why it cannot run this layer, or None.
    refuses: Callable[[Any, torch.device, int, int], str | None] = lambda *_: None
    # Loads what it needs, which may be compiled first; raises KernelError where that fails.
    prepare: Callable[[], object] = lambda: None
    # Whether `build` works on the meta device. If not, its weight's size is the PackedWeight's.
    takes_shapes: bool = False
    # Whether the kernel rounds activations where the spec does, whatever the PackedWeight says.
    rounds: bool = False
