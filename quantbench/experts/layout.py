"""An expert's weights as one run of bytes, in the form in which its kernels multiply.

    layout = Layout.of({"w13": linear, "w2": linear})
    layout.write(linears, buffer)               # the weights, copied into buffer (layout.nbytes,)
    expert = layout.expert(skeleton, buffer)    # a FeedForward that computes with these bytes

So an expert is brought from one memory to another by copying bytes, and nothing is packed again.
Only the kernels that were chosen when the model was loaded can read them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantbench.devices import stored_bytes
from quantbench.errors import KernelError
from quantbench.models.tensor_layout import Forms, forms_of, with_children, with_parameters

PAGE = 4096  # bytes; reads past the page cache start and end at multiples of the disk's block
ALIGNMENT = 128  # bytes; each tensor starts at a multiple


@dataclass(frozen=True)
class ExpertLayout:
    """Where each plain tensor of an expert's weights is in its bytes."""

    forms: Forms
    places: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]  # offset, dtype, shape of each
    nbytes: int  # of the run of bytes: with what aligns tensors, a multiple of PAGE
    modules: Mapping[str, nn.Module] = field(compare=False, repr=False)  # without weights

    @staticmethod
    def of(linears: Mapping[str, nn.Module]) -> "ExpertLayout":
        """The layout of these linear layers of an expert, by their names in it.

        Raises KernelError for a kernel that keeps numbers outside of its parameters.
        """
        for name, linear in linears.items():
            kinds = {type(p) for p in linear.parameters()} - {nn.Parameter}
            known = all(hasattr(kind, "__tensor_flatten__") for kind in kinds)
            if not known or [*linear.buffers(), *linear.children()]:
                raise KernelError(
                    f"--expert_memory: {name} is a {type(linear).__name__}, which keeps more than "
                    "its weights; --kernel cpu or reference keeps nothing else"
                )
        forms, places, end = forms_of(linears), [], 0
        for part in _parts(forms, linears):
            start = -(-end // ALIGNMENT) * ALIGNMENT
            places.append((start, part.dtype, tuple(part.shape)))
            end = start + part.numel() * part.dtype.itemsize
        bare = {name: with_parameters(linear, {}) for name, linear in linears.items()}
        return ExpertLayout(forms, tuple(places), whole_pages(end), bare)

    def write(self, linears: Mapping[str, nn.Module], buffer: Tensor) -> None:
        """Copy the weights of an expert of this layout into a buffer (nbytes,) uint8."""
        for view, part in zip(self._views(buffer), _parts(self.forms, linears), strict=True):
            view.copy_(part)

    def expert(self, skeleton: nn.Module, buffer: Tensor) -> nn.Module:
        """A copy of `skeleton`, a FeedForward, whose linear layers compute with the weights in a
        buffer."""
        views, linears = self._views(buffer), {}
        for name, (_, kinds) in self.forms.items():
            weights = {k: nn.Parameter(form.made_of(views), False) for k, form in kinds.items()}
            linears[name] = with_parameters(self.modules[name], weights)
        return with_children(skeleton, linears)

    def _views(self, buffer: Tensor) -> Iterator[Tensor]:
        """The plain tensors in a buffer (bytes,) uint8; they share its memory."""
        for start, dtype, shape in self.places:
            nbytes = math.prod(shape) * dtype.itemsize
            yield buffer[start : start + nbytes].view(dtype).view(shape)


def _parts(forms: Forms, linears: Mapping[str, nn.Module]) -> Iterator[Tensor]:
    """The plain tensors of an expert, in the order in which its forms name them."""
    for name, (_, kinds) in forms.items():
        for kind, form in kinds.items():
            yield from form.parts(linears[name].get_parameter(kind).data)


def whole_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages, at least one."""
    return max(1, -(-nbytes // PAGE)) * PAGE


def without_weights(linear: nn.Module) -> nn.Module:
    """A layer like this one that has as many bytes of weights on the meta device, so that a model's
    weights are counted in full, in whatever memory they are."""
    sizes = {name: stored_bytes(p) for name, p in linear.named_parameters()}
    empty = {n: torch.empty(s, dtype=torch.uint8, device="meta") for n, s in sizes.items()}
    return with_parameters(linear, {n: nn.Parameter(e, False) for n, e in empty.items()})
