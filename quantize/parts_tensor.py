"""A tensor that is made of others: what torch asks of a subclass whose bytes lie in named parts.

    class Halves(PartsTensor):
        tensors = ("low", "high")           # plain tensors, or None
        attributes = ("columns",)           # what else `Halves(low=…, high=…, columns=…)` takes

    @Halves.implements(aten.linear.default, F.linear)
    def _(func, input, weight, bias=None): ...

It survives torch.compile, state_dict, deepcopy and torch.save, and .to() where it implements
aten._to_copy. torchao's TorchAOBaseTensor does as well, but torchao imports torch._dynamo, which
takes as long as torch's own import.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

Implementation = Callable[..., Any]  # (func, *arguments of func)

aten = torch.ops.aten


class PartsTensor(torch.Tensor):
    tensors: ClassVar[tuple[str, ...]] = ()
    attributes: ClassVar[tuple[str, ...]] = ()
    operators: ClassVar[dict[Any, Implementation]] = {}  # by operator or function of torch

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__()

    def __init_subclass__(cls) -> None:
        cls.operators = dict(cls.operators)

    @classmethod
    def implements(cls, *functions: Any) -> Callable[[Implementation], Implementation]:
        """Registers what these operators of aten, or functions of torch, do with such a tensor."""

        def register(implementation: Implementation) -> Implementation:
            cls.operators.update(dict.fromkeys(functions, implementation))
            return implementation

        return register

    def replaced(self, **changes: Any) -> Self:
        """The same tensor with some fields changed; tensors are shared."""
        names, attributes = self.__tensor_flatten__()
        fields = {name: getattr(self, name) for name in names} | attributes | changes
        return type(self)(**fields)

    def of_parts(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The tensor whose parts are these after `change`."""
        return self.replaced(
            **{name: change(getattr(self, name)) for name in self.__tensor_flatten__()[0]}
        )

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = [name for name in self.tensors if getattr(self, name) is not None]
        return names, {name: getattr(self, name) for name in self.attributes}

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: Mapping[str, Tensor], attributes: Mapping[str, Any], size: Any, stride: Any
    ) -> Self:
        return cls(**tensors, **attributes)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes tensor_contents
        names, attributes = self.__tensor_flatten__()
        shapes = {name: tuple(getattr(self, name).shape) for name in names}
        fields = ", ".join(f"{name}={value!r}" for name, value in (shapes | attributes).items())
        return f"{type(self).__name__}({fields})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in cls.operators:
            return cls.operators[func](func, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func in cls.operators:
            return cls.operators[func](func, *args, **(kwargs or {}))
        raise NotImplementedError(f"{func} of a {cls.__name__}")


@PartsTensor.implements(torch._has_compatible_shallow_copy_type)
def _(func: Any, input: Tensor, other: Tensor) -> bool:
    return type(input) is type(other) and input.shape == other.shape


@PartsTensor.implements(torch.Tensor.detach, torch.Tensor.data.__get__)
def _(func: Any, input: PartsTensor) -> PartsTensor:
    """Where the operator below is dispatched instead, torch imports torch.distributed.tensor."""
    return input.of_parts(func)


@PartsTensor.implements(aten.detach.default, aten.alias.default, aten.clone.default)
def _(func: Any, input: PartsTensor, **options: Any) -> PartsTensor:
    result = input.of_parts(lambda part: func(part, **options))
    return return_and_correct_aliasing(func, (input,), options, result)


@PartsTensor.implements(aten.copy_.default)
def _(
    func: Any, input: PartsTensor, source: PartsTensor, non_blocking: bool = False
) -> PartsTensor:
    names, attributes = input.__tensor_flatten__()
    if type(source) is not type(input) or source.__tensor_flatten__() != (names, attributes):
        raise ValueError(f"{source!r} cannot be copied into {input!r}")
    for name in names:
        getattr(input, name).copy_(getattr(source, name), non_blocking)
    return input
