"""The weights of a layer's experts, stacked so that a compiled step gathers those that it needs.

    stacked = Stacked.of(mixture.experts)       # None: their kernel keeps them in another way
    stacked(x, number)                          # expert `number`'s result, without a sync

Which experts a token takes is known on the device alone. So the graph takes each weight from its
stack by the expert's number, and then multiplies by the expert's own kernel. The experts' modules
keep computing: their weights become views of the stacks, so that nothing is stored twice.
"""

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Form:
    """What a tensor is, without its numbers: plain, or a subclass that holds others."""

    kind: type[Tensor]
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    inner: "dict[str, _Form] | None" = None  # None: plain
    attributes: Any = None

    @staticmethod
    def of(tensor: Tensor) -> "_Form":
        what = type(tensor), tensor.dtype, tensor.shape, tensor.stride()
        if not hasattr(tensor, "__tensor_flatten__"):
            return _Form(*what)
        names, attributes = tensor.__tensor_flatten__()
        return _Form(*what, {n: _Form.of(getattr(tensor, n)) for n in names}, attributes)

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """The plain tensors in it: dense, and of dtypes that every op takes."""
        if self.inner is not None:
            return [
                p for name, form in self.inner.items() for p in form.parts(getattr(tensor, name))
            ]
        dense = tensor.permute(self._order)
        return [dense.view(torch.uint8) if self.dtype.itemsize == 1 else dense]

    def made_of(self, parts: Iterator[Tensor]) -> Tensor:
        """A tensor of this form, of the next of these parts."""
        if self.inner is not None:
            inner = {name: form.made_of(parts) for name, form in self.inner.items()}
            unflatten: Any = self.kind
            made: Tensor = unflatten.__tensor_unflatten__(
                inner, self.attributes, self.shape, self.strides
            )
            return made
        back = sorted(range(len(self.shape)), key=self._order.__getitem__)
        return next(parts).view(self.dtype).permute(back)

    @property
    def _order(self) -> list[int]:
        """Dimensions, that of the largest stride first."""
        return sorted(range(len(self.shape)), key=lambda i: -self.strides[i])


class Stacked:
    """The weights of X experts of one form: for each plain tensor in them one of shape (X, …)."""

    def __init__(self, experts: nn.ModuleList, forms: "_Forms") -> None:
        """experts: all have these forms. Their weights are replaced by views."""
        self.forms = forms
        self.stacks: list[Tensor] = []
        linears = [dict(expert.named_children()) for expert in experts]
        for name, (_, kinds) in forms.items():
            for kind, form in kinds.items():
                parts = [form.parts(each[name].get_parameter(kind).data) for each in linears]
                stacks = [torch.stack(same) for same in zip(*parts, strict=True)]
                for number, each in enumerate(linears):
                    view = form.made_of(stack[number] for stack in stacks)
                    each[name]._parameters[kind] = nn.Parameter(view, requires_grad=False)
                self.stacks += stacks
        self.compute = _compute(experts[0], forms)

    @staticmethod
    def of(experts: nn.ModuleList, others: "Collection[Stacked]" = ()) -> "Stacked | None":
        """None where experts differ in form, or a kernel keeps more than parameters.

        others: of other layers. Layers of one form call one function, so that their graphs are
        alike.
        """
        linears = [linear for expert in experts for linear in expert.children()]
        if any(list(linear.buffers()) or list(linear.children()) for linear in linears):
            return None
        forms, *rest = map(_forms, experts)
        if any(repr(one) != repr(forms) for one in rest):
            return None
        made = Stacked(experts, forms)
        for other in others:
            if repr(other.forms) == repr(forms):
                made.compute = other.compute
        return made

    def __call__(self, x: Tensor, number: Tensor | int) -> Tensor:
        """x (n, D), number an int or (1,) int64 → (n, D)."""
        if isinstance(number, int):
            return self.compute(x, *(stack[number] for stack in self.stacks))
        return self.compute(x, *(stack.index_select(0, number)[0] for stack in self.stacks))


# By an expert's linear layer: its class, and the form of each parameter by its name.
_Forms = dict[str, tuple[type[nn.Module], dict[str, _Form]]]


def _forms(expert: nn.Module) -> _Forms:
    return {
        name: (type(linear), {kind: _Form.of(p.data) for kind, p in linear.named_parameters()})
        for name, linear in expert.named_children()
    }


def _compute(template: nn.Module, forms: _Forms) -> Callable[..., Tensor]:
    """A function of x (n, D) and an expert's part of each stack: what that expert returns.

    template: an expert; only its weights are not used.
    """

    def compute(x: Tensor, *parts: Tensor) -> Tensor:
        left = iter(parts)
        expert = copy.copy(template)
        expert._modules = {}
        for name, (_, kinds) in forms.items():
            linear = template.get_submodule(name)
            expert._modules[name] = other = copy.copy(linear)
            gathered: Any = {kind: form.made_of(left) for kind, form in kinds.items()}
            other._parameters = dict.fromkeys(linear._parameters) | gathered
        y: Tensor = expert(x)
        return y

    # Dynamo cannot make tensor subclasses, which quantized weights are; AOTAutograd can.
    allowed: Callable[..., Tensor] = torch.compiler.allow_in_graph(compute)
    return allowed
