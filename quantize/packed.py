"""The tensor subclass that every quantized weight is kept in, and saved as.

    weight = PackedWeight.make(w, planes, scale, "fp6", 6)      # what w (N, K) becomes
    F.linear(x, weight, bias)           # ops/reference.py's product, slow
    weight.dequantize()                 # (N, K) in weight.dtype

It survives torch.compile, .to(), state_dict and deepcopy (parts_tensor.py), and slicing along rows.
What its codes mean is ops/formats.py's. It only stores: a fast kernel is a module
(quantize/kernel.py) that takes its parts, or makes another layout of them.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from quantbench.ops import formats, reference
from quantbench.ops.formats import Packed
from quantbench.quantize import activation
from quantbench.quantize.activation import rounded
from quantbench.quantize.parts_tensor import PartsTensor

aten = torch.ops.aten

# The files whose functions torch.compile traces for a PackedWeight.
TRACED = (__file__, activation.__file__, formats.__file__)
TRACED_DIGEST = hashlib.sha256(b"".join(Path(path).read_bytes() for path in TRACED)).hexdigest()

PLANE_NAMES = ("plane0", "plane1", "plane2")


class PackedWeight(PartsTensor):
    """A quantized (N, K) weight: planes of codes, a scale (and a zero point) for every group.

    The fields are those of `ops.formats.Packed`, and three more: `dtype` is what it dequantizes to;
    `activation` says how activations are rounded before the product (quantize/activation.py), None
    that they are not. A static rounding has the scale `activation_scale`, a float32 scalar.
    """

    tensors = (
        *("plane0", "plane1", "plane2", "scale", "zero", "tensor_scale", "outer"),
        "activation_scale",
    )
    attributes = ("format", "bits", "group_size", "columns", "dtype", "activation")
    plane0: Tensor
    plane1: Tensor | None
    plane2: Tensor | None
    scale: Tensor
    zero: Tensor | None
    tensor_scale: Tensor | None
    outer: Tensor | None  # type: ignore[assignment]  # torch's method, which no weight needs
    activation_scale: Tensor | None
    format: str
    bits: int
    group_size: int
    columns: int
    activation: str | None

    def __new__(
        cls,
        plane0: Tensor,
        scale: Tensor,
        format: str,
        bits: int,
        group_size: int,
        columns: int,
        dtype: torch.dtype,
        plane1: Tensor | None = None,
        plane2: Tensor | None = None,
        zero: Tensor | None = None,
        tensor_scale: Tensor | None = None,
        outer: Tensor | None = None,
        activation_scale: Tensor | None = None,
        activation: str | None = None,
    ) -> "PackedWeight":
        self = torch.Tensor._make_wrapper_subclass(
            cls, (plane0.shape[0], columns), dtype=dtype, device=plane0.device, requires_grad=False
        )
        self.plane0, self.plane1, self.plane2 = plane0, plane1, plane2
        self.scale, self.zero, self.tensor_scale = scale, zero, tensor_scale
        self.outer = outer
        self.format, self.bits, self.group_size = format, bits, group_size
        self.columns, self.activation = columns, activation
        self.activation_scale = activation_scale
        return self

    @classmethod
    def make(
        cls,
        w: Tensor,
        planes: list[Tensor],
        scale: Tensor,
        format: str,
        bits: int,
        group_size: int | None = None,
        zero: Tensor | None = None,
        tensor_scale: Tensor | None = None,
        outer: Tensor | None = None,
    ) -> "PackedWeight":
        """What a weight w (N, K) becomes; without a group_size it has one scale per row."""
        columns = w.shape[1]
        codes = format, bits, group_size or columns
        return cls.of(Packed(planes, scale, zero, tensor_scale, *codes, outer), columns, w.dtype)

    @classmethod
    def of(cls, parts: Packed, columns: int, dtype: torch.dtype) -> "PackedWeight":
        """The weight (N, columns) of these parts."""
        codes = {name: getattr(parts, name) for name in ("format", "bits", "group_size")}
        return cls(columns=columns, dtype=dtype, **codes, **parts.tensors)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, for torch's cache of it: not the numbers.

        Without the sources, which torch does not look at, code compiled before a change of them
        would go on computing what they said then.
        """
        names, attributes = self.__tensor_flatten__()
        inner = [(name, _layout(getattr(self, name))) for name in names]
        return repr((TRACED_DIGEST, inner, sorted(attributes.items(), key=str)))

    @property
    def parts(self) -> Packed:
        """The plain tensors and what they mean: what a kernel takes."""
        planes = [plane for name in PLANE_NAMES if (plane := getattr(self, name)) is not None]
        scales = self.scale, self.zero, self.tensor_scale
        return Packed(planes, *scales, self.format, self.bits, self.group_size, self.outer)

    def rows_of(self, ranges: Sequence[tuple[int, int]]) -> "PackedWeight":
        """The weight's rows in these ranges, one behind the other."""
        return self.of_rows(lambda part: torch.cat([part[start:end] for start, end in ranges]))

    def of_rows(self, taken: Callable[[Tensor], Tensor]) -> "PackedWeight":
        """The rows that `taken` takes of every inner tensor with a row for each of the weight's."""
        return self.replaced(**{n: taken(part) for n, part in self.parts.by_row.items()})

    def columns_between(self, start: int, end: int) -> "PackedWeight":
        """The weight's columns from `start` to `end`, with the scales that they have in the whole.

        A scale for the whole row stays. Raises ValueError where a border lies inside a group that
        shares a scale, or inside a byte.
        """
        by_row = self.scale.shape[1] == 1
        cut = {
            name: _between(part, start, end, self.columns)
            for name, part in self.parts.by_row.items()
            if name in PLANE_NAMES or not by_row
        }
        group_size = end - start if by_row else self.group_size
        return self.replaced(**cut, columns=end - start, group_size=group_size)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """The (N, K) numbers that it encodes, in `output_dtype` or its own dtype."""
        dtype = output_dtype or self.dtype
        # Some formats round the largest weights up, past the end of float16.
        most = torch.finfo(dtype).max
        return formats.dequantize(self.parts).clamp(-most, most).to(dtype)


def dequantized(weight: Tensor) -> Tensor:
    """A weight's numbers in float32, quantized or not."""
    return weight.dequantize(torch.float32) if isinstance(weight, PackedWeight) else weight.float()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device)


def _between(tensor: Tensor, start: int, end: int, columns: int) -> Tensor:
    """The part of a tensor (N, C) that belongs to some of the `columns` that its C are for."""
    borders = start * tensor.shape[1], end * tensor.shape[1]
    if borders[0] % columns or borders[1] % columns:
        raise ValueError(f"columns {start} to {end} of {columns} cannot be cut out")
    return tensor[:, borders[0] // columns : borders[1] // columns].contiguous()


def product(
    multiply: Callable[[Tensor, Packed], Tensor],
    x: Tensor,
    weight: Packed,
    activation: str | None,
    bias: Tensor | None,
    static: Tensor | None = None,
) -> Tensor:
    """x (…, K) → (…, N) in x's dtype, by a kernel that sums in float32; rounded once.

    multiply: (x, weight) -> (…, N) float32, as ops.reference.linear. activation: how x is rounded
    before it, and scaled back after it; None: not at all. static: the scale, if that is given.
    """
    numbers, scale = rounded(x, activation, static) if activation else (x, None)
    y = multiply(numbers, weight)
    if scale is not None:
        y = y * scale
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


@PackedWeight.implements(aten.linear.default, F.linear)
def _(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, PackedWeight):
        raise NotImplementedError("a PackedWeight is a weight, not an activation")
    rounding, static = weight.activation, weight.activation_scale
    return product(reference.linear, input, weight.parts, rounding, bias, static)


@PackedWeight.implements(F.embedding)
def _(func: Any, input: Tensor, weight: PackedWeight, *_: Any, **options: Any) -> Tensor:
    flat = input.flatten()
    rows = weight.of_rows(lambda part: part[flat])
    return rows.dequantize().unflatten(0, input.shape)


@PackedWeight.implements(aten.embedding.default)
def _(func: Any, weight: PackedWeight, indices: Tensor, *_: Any, **options: Any) -> Tensor:
    return F.embedding(indices, weight)


@PackedWeight.implements(aten._to_copy.default)
def _(
    func: Any, input: PackedWeight, *, dtype: Any = None, device: Any = None, **options: Any
) -> Tensor:
    """Another dtype is what it dequantizes to from now on; the stored numbers stay."""
    moved = input.of_parts(lambda part: part.to(device or input.device, copy=True))
    moved = moved.replaced(dtype=dtype or input.dtype)
    return return_and_correct_aliasing(func, (input,), options, moved)


@PackedWeight.implements(aten.slice.Tensor)
def _(
    func: Any, input: PackedWeight, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    if dim % 2 == 1:
        raise NotImplementedError("a PackedWeight can be sliced along its rows, not its columns")
    rows = input.of_rows(lambda part: func(part, 0, start, end, step))
    return return_and_correct_aliasing(func, (input, dim, start, end, step), {}, rows)


@PackedWeight.implements(aten.index_select.default)
def _(func: Any, input: PackedWeight, dim: int, index: Tensor) -> Tensor:
    if dim % 2 == 1:
        raise NotImplementedError("a PackedWeight's rows can be selected, not its columns")
    return input.of_rows(lambda part: part[index])


@PackedWeight.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _(func: Any, input: PackedWeight, size: Any, dim: int = 0) -> list[Tensor]:
    if dim % 2 == 1:
        raise NotImplementedError("a PackedWeight can be split along its rows, not its columns")
    if isinstance(size, int):
        return [input[start : start + size] for start in range(0, input.shape[0], size)]
    ends = itertools.accumulate(size)
    return [input[end - rows : end] for end, rows in zip(ends, size, strict=True)]


torch.serialization.add_safe_globals([PackedWeight])
