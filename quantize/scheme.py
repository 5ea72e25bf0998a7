"""What the registry's rows are made of: a scheme, and the kernels that multiply by its weights."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantize.cpu import as_cpu, no_cpu
from quantize.packed import PackedWeight

# A step of quantization takes some 16 bytes for each of them. On the CPU they should stay in its
# second-level cache: twice as fast as 4 M at once. A GPU wants fewer and larger steps.
ELEMENTS_AT_ONCE = 1 << 18
ON_A_GPU = 64  # times as many


@dataclass(frozen=True)
class Kernel:
    """One way to multiply by a scheme's weights.

    build: from (layer whose weight is a PackedWeight, spec) the module that runs it.
    unavailable: why it cannot run at all on a device with activations of a dtype, or None.
    refuses: why it cannot run one layer, given (device, in_features, out_features), or None.
    takes_shapes: build works on the meta device; the others' weights take what a PackedWeight does.
    """

    build: Callable[[nn.Linear, Any], nn.Module]
    unavailable: Callable[[Any, torch.device, torch.dtype], str | None] = lambda *_: None
    refuses: Callable[[Any, torch.device, int, int], str | None] = lambda *_: None
    takes_shapes: bool = False


@dataclass(frozen=True)
class Scheme:
    """One row of the registry.

    quantize: from (weight (N, K), spec) the PackedWeight; it must work on the meta device too.
    kernels: fastest first, as far as can be said in general.
    refuses: why the scheme cannot take a layer of (spec, in_features), on any kernel, or None.
    """

    quantize: Callable[[Tensor, Any], PackedWeight]
    kernels: dict[str, Kernel] = field(default_factory=dict)
    refuses: Callable[[Any, int], str | None] = lambda *_: None


def rows_at_once(w: Tensor) -> int:
    """How many rows of a weight (N, K) to quantize at a time."""
    elements = ELEMENTS_AT_ONCE if w.device.type == "cpu" else ELEMENTS_AT_ONCE * ON_A_GPU
    return max(1, elements // w.shape[1])


def in_row_blocks(quantize: Callable[[Tensor], PackedWeight], w: Tensor) -> PackedWeight:
    """quantize(w), some rows at a time: a layer's float32 copies never exist all at once."""
    rows = rows_at_once(w)
    if w.is_meta or w.shape[0] <= rows:
        return quantize(w)
    first = quantize(w[:rows])
    names = [name for name in first.__tensor_flatten__()[0] if name != "tensor_scale"]
    whole = {}
    for name in names:
        part = getattr(first, name)
        whole[name] = part.new_empty((w.shape[0], *part.shape[1:]))
        whole[name][:rows] = part
    for start in range(rows, w.shape[0], rows):
        block = quantize(w[start : start + rows])
        for name in names:
            whole[name][start : start + rows] = getattr(block, name)
    return first.replaced(**whole)


def in_range(w: Tensor) -> Tensor:
    """`w`; in float32 where its dtype cannot hold the range of a group, or one over its scale."""
    return w.float() if w.dtype == torch.float16 else w


def our_kernels(**others: Kernel) -> dict[str, Kernel]:
    """The kernels that run every PackedWeight, and where `others` come among them.

    With triton and reference the layer stays, its weight is told which to use.
    """
    return {
        "cpu": Kernel(as_cpu, no_cpu, takes_shapes=True),
        **others,
        "triton": Kernel(_using("triton"), no_triton),
        "reference": Kernel(_using("reference")),
    }


def _using(name: str) -> Callable[[nn.Linear, Any], nn.Module]:
    def build(layer: nn.Linear, spec: Any) -> nn.Module:
        layer.weight = nn.Parameter(layer.weight.data.replaced(kernel=name), requires_grad=False)
        return layer

    return build


def no_triton(spec: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return "Triton needs a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return None


def groups_refuse(spec: Any, in_features: int) -> str | None:
    """For schemes with a group_size: why a layer of that width cannot be cut into groups."""
    if in_features % spec.group_size == 0:
        return None
    fitting = [size for size in spec.choices["group_size"] if in_features % size == 0]
    advice = f"; {' and '.join(map(str, fitting))} would fit" if fitting else ""
    return f"has in_features {in_features}, no multiple of {spec.group_size}{advice}"


def multiple_refuses(multiple: int) -> Callable[[Any, int], str | None]:
    def refuses(spec: Any, in_features: int) -> str | None:
        if in_features % multiple == 0:
            return None
        return f"has in_features {in_features}; {spec} takes multiples of {multiple}"

    return refuses
