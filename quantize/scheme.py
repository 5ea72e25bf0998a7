"""What a scheme is: how it quantizes a weight, and the kernels that multiply by the result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantbench.quantize.kernel import Kernel
from quantbench.quantize.packed import PackedWeight

# Weights quantized at once. Temporaries take about 16 bytes each: on the CPU they fit its
# second-level cache, twice as fast as 4 M at once; a GPU wants fewer and larger steps.
CPU_BLOCK_ELEMENTS = 1 << 18
GPU_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Scheme:
    """How a spec is carried out; each file of quantize/schemes/ has a table of them, SCHEMES."""

    # (weight (N, K), spec) -> the PackedWeight. It is given some rows at a time, if not all.
    quantize_rows: Callable[[Tensor, Any], PackedWeight]
    # The kernels by name, fastest first, as far as can be said in general.
    kernels: dict[str, Kernel]
    # (spec, in_features) -> why the scheme cannot take such a layer, on any kernel, or None.
    refuses: Callable[[Any, int], str | None] = lambda *_: None
    # spec -> whether the numbers of a row depend on the weight's other rows. If not, some rows can
    # be quantized without the others.
    needs_all_rows: Callable[[Any], bool] = lambda spec: False

    def quantize(self, w: Tensor, spec: Any) -> PackedWeight:
        """What a weight (N, K) becomes."""
        if self.needs_all_rows(spec):
            return self.quantize_rows(w, spec)
        return in_row_blocks(lambda rows: self.quantize_rows(rows, spec), w)


def rows_at_once(w: Tensor) -> int:
    """How many rows of a weight (N, K) to quantize at a time."""
    elements = CPU_BLOCK_ELEMENTS if w.device.type == "cpu" else GPU_BLOCK_ELEMENTS
    return max(1, elements // w.shape[1])


def in_row_blocks(quantize: Callable[[Tensor], PackedWeight], w: Tensor) -> PackedWeight:
    """quantize(w), some rows at a time: a layer's float32 copies never exist all at once."""
    rows = rows_at_once(w)
    if w.shape[0] <= rows:
        return quantize(w)
    first, result = quantize(w[:rows]), {}
    for name, part in first.parts.by_row.items():
        result[name] = part.new_empty((w.shape[0], *part.shape[1:]))
        result[name][:rows] = part
    for start in range(rows, w.shape[0], rows):
        for name, part in quantize(w[start : start + rows]).parts.by_row.items():
            result[name][start : start + rows] = part
    return first.replaced(**result)


def in_range(w: Tensor) -> Tensor:
    """`w`; in float32 where its dtype cannot hold the range of a group, or one over its scale."""
    return w.float() if w.dtype == torch.float16 else w


def groups_refuse(spec: Any, in_features: int) -> str | None:
    """For schemes with a group_size: why a layer of that width cannot be cut into groups."""
    if in_features % spec.group_size == 0:
        return None
    fitting = [size for size in spec.choices["group_size"] if in_features % size == 0]
    advice = f"; {' and '.join(map(str, fitting))} would fit" if fitting else ""
    return f"has in_features {in_features}, no multiple of {spec.group_size}{advice}"


def multiple_refuses(multiple: int) -> Callable[[Any, int], str | None]:
    """For schemes that take in_features in multiples: why they cannot take a width."""

    def refuses(spec: Any, in_features: int) -> str | None:
        if in_features % multiple == 0:
            return None
        return f"has in_features {in_features}; {spec} takes multiples of {multiple}"

    return refuses
