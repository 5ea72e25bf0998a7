"""What a weight is, without its numbers: by which plain tensors are taken out of it and put back.

form = Form.of(weight)              # plain, or a subclass that holds plain tensors (packed.py)
parts = form.parts(weight)          # dense, to be copied or stacked
form.made_of(iter(parts))           # the same weight; it shares their memory
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorLayout:
    """Forms are equal where parts of one make a weight of the other."""

    kind: type[Tensor]
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    inner: "tuple[tuple[str, TensorLayout], ...] | None" = None  # of a subclass
    attributes: Any = field(default=None, compare=False)  # as __tensor_flatten__ gives them
    described: str = ""  # the attributes as text, by which they are compared

    @staticmethod
    def of(tensor: Tensor) -> "TensorLayout":
        description = type(tensor), tensor.dtype, tuple(tensor.shape)
        if not hasattr(tensor, "__tensor_flatten__"):
            # Dense, with dimensions in the same order.
            return TensorLayout(*description, torch.empty_like(tensor, device="meta").stride())
        names, attributes = tensor.__tensor_flatten__()
        inner = tuple((name, TensorLayout.of(getattr(tensor, name))) for name in names)
        return TensorLayout(*description, tensor.stride(), inner, attributes, repr(attributes))

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """The plain tensors in it, contiguous where these are dense."""
        if self.inner is None:
            return [tensor.permute(self._order)]
        inner = [form.parts(getattr(tensor, name)) for name, form in self.inner]
        return [part for parts in inner for part in parts]

    def made_of(self, parts: Iterator[Tensor]) -> Tensor:
        """A tensor of this form, of the next of these parts."""
        if self.inner is None:
            back = sorted(range(len(self.shape)), key=self._order.__getitem__)
            dense = next(parts).permute(back)
            if dense.stride() == self.strides:
                return dense  # of one element a dimension's stride is arbitrary:
            return dense.as_strided(self.shape, self.strides, dense.storage_offset())
        inner = {name: form.made_of(parts) for name, form in self.inner}
        return self.kind.__tensor_unflatten__(
            inner, self.attributes, torch.Size(self.shape), self.strides
        )

    @property
    def _order(self) -> list[int]:
        """Dimensions, that of the largest stride first."""
        return sorted(range(len(self.shape)), key=lambda i: -self.strides[i])


# By an expert's linear layer: its class and settings, and the form of each of its parameters.
Forms = dict[str, tuple[tuple[type[nn.Module], str], dict[str, TensorLayout]]]


def forms_of(linears: Mapping[str, nn.Module]) -> Forms:
    """The forms of an expert's linear layers."""
    forms: Forms = {}
    for name, linear in linears.items():
        weights = {kind: TensorLayout.of(p.data) for kind, p in linear.named_parameters()}
        forms[name] = (type(linear), linear.extra_repr()), weights
    return forms


def with_parameters(linear: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A shallow copy of a layer with these tensors as its parameters; None for absent ones."""
    copied = copy.copy(linear)
    copied._parameters = dict.fromkeys(linear._parameters) | dict(weights)
    return copied


def with_children(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A shallow copy of a module whose submodules of these names are replaced."""
    copied = copy.copy(module)
    copied._modules = module._modules | dict(children)
    return copied
