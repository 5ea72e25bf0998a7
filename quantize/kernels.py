"""The kernels that run every PackedWeight, and what torchao's have in common."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantbench.quantize import cpu
from quantbench.quantize.kernel import Kernel, KernelLinear
from quantbench.quantize.packed import PackedWeight

LEAST_INT_MM_ROWS = 17  # of torch._int_mm on CUDA


def by_torchao(
    converted: Callable[[PackedWeight, Any], Tensor], kind: type[KernelLinear] = KernelLinear
) -> Callable[[nn.Linear, Any], nn.Module]:
    """A kernel's `build`, for torchao's product: F.linear calls it for torchao's tensor subclasses.

    converted: (weight (N, K), spec) -> torchao's tensor subclass with the same numbers.
    """
    return lambda layer, spec: kind.like(layer, converted(layer.weight.data, spec))


def our_kernels(*first: str, **others: Kernel) -> dict[str, Kernel]:
    """Kernels by name, fastest first, as far as can be said in general; `others` after cpu and
    `first`, which are names."""
    found = {
        "cpu": cpu.PACKED,
        **others,
        "triton": Kernel(_triton, no_triton),
        "reference": Kernel(KernelLinear.of),  # ops/reference.py: F.linear of every PackedWeight
    }
    return {name: found[name] for name in ("cpu", *first, *found)}


def by_inductor(unavailable: Callable[..., str | None] = lambda *_: None) -> Kernel:
    """What inductor makes of numbers of 8 bits, on CUDA alone. unavailable: as Kernel takes it."""

    def refusal(spec: Any, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return "inductor multiplies on CUDA; elsewhere the kernel is torchao"
        return no_triton(spec, device, dtype) or unavailable(spec, device, dtype)

    return Kernel(_inductor, refusal)


def _inductor(layer: nn.Linear, spec: Any) -> nn.Module:
    from quantbench.quantize.triton import InductorLinear

    return InductorLinear.of(layer, spec)


def _triton(layer: nn.Linear, spec: Any) -> nn.Module:
    from quantbench.quantize.triton import TritonLinear

    return TritonLinear.of(layer, spec)


def no_triton(spec: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return "Triton needs a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return None
