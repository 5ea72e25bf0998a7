"""An expert's weights as one run of bytes, in the form in which its kernels multiply.

    layout = Layout.of({"w13": linear, "w2": linear})
    layout.write(linears, buffer)               # the weights, copied into buffer (layout.nbytes,)
    expert = layout.expert(skeleton, buffer)    # a FeedForward that computes with them there

So an expert is brought from one memory to another by copying bytes, and nothing is packed anew.
Bytes are in the order of the kernel that was chosen when the model was loaded; a run of bytes is
read back by the layout that wrote it, in the same process.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantbench.devices import stored_bytes
from quantbench.errors import KernelError

PAGE = 4096  # bytes; reads past the page cache begin and end at multiples of the disk's block
ALIGNMENT = 128  # bytes at which each tensor begins


@dataclass(frozen=True)
class Plain:
    """Where a plain tensor lies in the bytes, and what it is."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor that lies in a buffer (bytes,) uint8; it shares the buffer's memory."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())


@dataclass(frozen=True)
class Wrapped:
    """A tensor subclass: the tensors inside it, and what it is made of them with."""

    kind: Any  # the subclass
    inner: tuple[tuple[str, "Plain | Wrapped"], ...]
    shape: torch.Size
    strides: tuple[int, ...]
    attributes: Any = field(compare=False)  # as __tensor_flatten__ gives them
    described: str = ""  # the attributes as text, by which they are compared

    def view(self, buffer: Tensor) -> Tensor:
        inner = {name: part.view(buffer) for name, part in self.inner}
        made: Tensor = self.kind.__tensor_unflatten__(
            inner, self.attributes, self.shape, self.strides
        )
        return made


@dataclass(frozen=True)
class Layout:
    """Where each parameter of an expert lies in its bytes."""

    parameters: tuple[tuple[str, Plain | Wrapped], ...]  # by name: "w13.weight", …
    kinds: tuple[tuple[str, type], ...]  # of the linear layers' classes, by name
    weight_bytes: int  # that the parameters store
    nbytes: int  # of the run of bytes: with what aligns tensors, a multiple of PAGE
    modules: Mapping[str, nn.Module] = field(compare=False, repr=False)  # without weights

    @staticmethod
    def of(linears: Mapping[str, nn.Module]) -> "Layout":
        """The layout of these linear layers of an expert, by their names in it.

        Raises KernelError for a kernel that keeps numbers outside of its parameters.
        """
        end, parameters = 0, []
        for name, linear in linears.items():
            if any(True for _ in linear.buffers()) or any(True for _ in linear.children()):
                raise _refusal(name, linear)
            for kind, parameter in linear.named_parameters():
                wrapped = hasattr(parameter, "__tensor_flatten__")
                if not wrapped and type(parameter) is not nn.Parameter:
                    raise _refusal(name, linear)
                placed, end = _placed(parameter.data, end)
                parameters.append((f"{name}.{kind}", placed))
        stored = sum(stored_bytes(p) for linear in linears.values() for p in linear.parameters())
        return Layout(
            tuple(parameters),
            tuple((name, type(linear)) for name, linear in linears.items()),
            stored,
            whole_pages(end),
            {name: _with_parameters(linear, {}) for name, linear in linears.items()},
        )

    def write(self, linears: Mapping[str, nn.Module], buffer: Tensor) -> None:
        """Copy the weights of an expert of this layout into a buffer (nbytes,) uint8."""
        for name, placed in self.parameters:
            linear, _, kind = name.partition(".")
            _copy(linears[linear].get_parameter(kind).data, placed, buffer)

    def expert(self, skeleton: nn.Module, buffer: Tensor) -> nn.Module:
        """A module like `skeleton` that computes with the weights in a buffer, where they lie.

        skeleton: a FeedForward; its linear layers are replaced in the copy.
        """
        weights: dict[str, dict[str, Tensor]] = {}
        for name, placed in self.parameters:
            linear, _, kind = name.partition(".")
            weights.setdefault(linear, {})[kind] = placed.view(buffer)
        made = copy.copy(skeleton)
        made._modules = dict(skeleton._modules)
        for name, module in self.modules.items():
            made._modules[name] = _with_parameters(module, weights.get(name, {}))
        return made


def whole_pages(nbytes: int) -> int:
    """So many bytes, and what fills their last page."""
    return max(1, -(-nbytes // PAGE)) * PAGE


def without_weights(linear: nn.Module) -> nn.Module:
    """A layer like this one that holds as many bytes of weights on the meta device: so a model's
    weights are counted in full, wherever they lie."""
    sizes = {name: stored_bytes(p) for name, p in linear.named_parameters()}
    return _with_parameters(
        linear, {n: torch.empty(s, dtype=torch.uint8, device="meta") for n, s in sizes.items()}
    )


def _refusal(name: str, linear: nn.Module) -> KernelError:
    return KernelError(
        f"--expert_memory: {name} is a {type(linear).__name__}, which keeps more than its weights; "
        "--kernel cpu or reference keeps nothing else"
    )


def _with_parameters(linear: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A shallow copy of a layer with these tensors as its parameters; None for absent ones."""
    made = copy.copy(linear)
    made._parameters = dict.fromkeys(linear._parameters)
    for name, weight in weights.items():
        made._parameters[name] = nn.Parameter(weight, requires_grad=False)
    return made


def _placed(tensor: Tensor, end: int) -> tuple[Plain | Wrapped, int]:
    """Where a tensor lies behind `end` bytes, and where it ends."""
    if not hasattr(tensor, "__tensor_flatten__"):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        strides = torch.empty_like(tensor, device="meta").stride()  # dense, in the same order
        made = Plain(start, tensor.dtype, tuple(tensor.shape), strides)
        return made, start + made.nbytes
    names, attributes = tensor.__tensor_flatten__()
    inner = []
    for name in names:
        placed, end = _placed(getattr(tensor, name), end)
        inner.append((name, placed))
    made_of = tuple(inner)
    shape, strides = tensor.shape, tensor.stride()
    return Wrapped(type(tensor), made_of, shape, strides, attributes, repr(attributes)), end


def _copy(tensor: Tensor, placed: Plain | Wrapped, buffer: Tensor) -> None:
    if isinstance(placed, Plain):
        placed.view(buffer).copy_(tensor)
        return
    for name, inner in placed.inner:
        _copy(getattr(tensor, name), inner, buffer)
