"""The weights of a layer's experts, stacked so that a compiled step gathers those that it needs.

    stacked = Stacked.of(mixture.experts)       # None: their kernel keeps them in another way
    stacked(x, number)                          # expert `number`'s result, without a sync

Which experts a token takes is known on the device alone. So the graph takes each weight from its
stack by the expert's number, and then multiplies by the expert's own kernel. The experts' modules
keep computing: their weights become views of the stacks, so that nothing is stored twice.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from quantbench.models.tensor_layout import Forms, forms_of, with_children, with_parameters


class Stacked:
    """The weights of X experts of one form: for each plain tensor in them one of shape (X, …)."""

    def __init__(self, experts: nn.ModuleList, forms: Forms) -> None:
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
        forms, *rest = (forms_of(dict(expert.named_children())) for expert in experts)
        if any(other_forms != forms for other_forms in rest):
            return None
        stacked = Stacked(experts, forms)
        for known in others:
            if known.forms == forms:
                stacked.compute = known.compute
        return stacked

    def __call__(self, x: Tensor, number: Tensor | int) -> Tensor:
        """x (n, D), number an int or (1,) int64 → (n, D)."""
        if isinstance(number, int):
            return self.compute(x, *(stack[number] for stack in self.stacks))
        return self.compute(x, *(_gathered(stack, number) for stack in self.stacks))


def _gathered(stack: Tensor, number: Tensor) -> Tensor:
    if stack.dtype.itemsize > 1:
        return stack.index_select(0, number)[0]
    # Not every op takes 8-bit floats.
    return stack.view(torch.uint8).index_select(0, number)[0].view(stack.dtype)


def _compute(template: nn.Module, forms: Forms) -> Callable[..., Tensor]:
    """A function of x (n, D) and an expert's part of each stack: what that expert returns.

    template: an expert; only its weights are not used.
    """

    def compute(x: Tensor, *parts: Tensor) -> Tensor:
        remaining, linears = iter(parts), {}
        for name, (_, kinds) in forms.items():
            weights = {kind: form.made_of(remaining) for kind, form in kinds.items()}
            linears[name] = with_parameters(template.get_submodule(name), weights)
        return with_children(template, linears)(x)

    # Dynamo cannot make tensor subclasses, which quantized weights are; AOTAutograd can.
    return torch.compiler.allow_in_graph(compute)
