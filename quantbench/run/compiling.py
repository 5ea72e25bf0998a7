"""What torch.compile is told: its options, and which dimensions change from call to call.

torch.compile(step, options=compiling.options(device))
"""

import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantbench import devices

Options = dict[str, str | int | bool | Callable[..., Any]]  # the `options` of torch.compile


def options(device: torch.device) -> Options:
    """The `options` of torch.compile for a decoding step on `device`."""
    chosen: Options = dict(devices.KINDS[device.type].compile_options)
    if device.type != "cpu":
        return chosen
    from quantbench.ops.cpu import build

    # No worker processes for Triton kernels: they would take the cores from the C++ compiler.
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    chosen |= build.options_of_inductor()
    # For each instruction set of the CPU, inductor compiles a file to see whether the compiler
    # supports it: 8 s on two cores. The compiler that built the C++ kernels supports them all.
    if platform.machine() == "x86_64" and build.refusal() is None:
        chosen["cpp.vec_isa_ok"] = True
    return chosen


def for_any_length(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A compiled function of a model, tokens (B, S) and positions (S,), so that it is not compiled
    again for another S."""

    def call(model: object, tokens: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(tokens, 1)
        torch._dynamo.maybe_mark_dynamic(positions, 0)
        return compiled(model, tokens, positions, *rest)

    return call


def for_any_rows(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function of a model and tokens (B, S), so that what is compiled for one B above 1
    serves every other; B = 1 has code of its own."""

    def call(model: object, tokens: Tensor, *rest: Any) -> Any:
        if tokens.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tokens, 0)
        return compiled(model, tokens, *rest)

    return call
