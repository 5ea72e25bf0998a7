"""torch.compile on the CPU: what it need not find out, and a start on it while weights are read.

    ready = compiling.begin(device)     # in a thread: imports, and hashes of the compiler's sources
    …                                   # load the model
    ready()
    torch.compile(step, options=compiling.options(device))

Of a cold compilation's seconds only a part is spent on the step itself (docs/LOG.md).
"""

import platform
import threading
from collections.abc import Callable
from typing import Any

import torch

from ops.cpu import build
from run import environment

# CUDA graphs take the launch cost off each step. On the CPU inductor's freezing and max-autotune
# were 17 % faster for twice the memory and eight times the compilation (docs/LOG.md), so they are
# left out.
Options = dict[str, str | int | bool | Callable[..., Any]]  # of torch.compile
_CUDA = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}


def options(device: torch.device) -> Options:
    """What torch.compile is given for a decoding step on `device`."""
    if device.type == "cuda":
        return dict(_CUDA)
    if device.type != "cpu":
        return {}
    # A precompiled header takes 9 s and saves each kernel less than one: a step has a handful.
    chosen: Options = {"cpp_cache_precompile_headers": False}
    # For each instruction set that the CPU has, inductor compiles a file to see whether the
    # compiler knows it: 8 s on two cores. The compiler that built our kernels knows them all.
    if platform.machine() == "x86_64" and build.refusal() is None:
        chosen["cpp.vec_isa_ok"] = True
    return chosen


def opaque(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Register a function as the op quantbench::`name` on the CPU, which inductor calls as it is.

    For what takes microseconds to run, and would take seconds to compile. A name that is registered
    is left as it is.
    """
    if hasattr(torch.ops.quantbench, name):
        return
    torch.library.define(f"quantbench::{name}", schema)
    torch.library.impl(f"quantbench::{name}", "CPU", implementation)
    torch.library.register_fake(f"quantbench::{name}", fake)


def for_any_length(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function of tokens (B, S), positions (S,) and the first position as an int, told
    that S differs from call to call."""

    def call(tokens: torch.Tensor, positions: torch.Tensor, start: int) -> Any:
        torch._dynamo.maybe_mark_dynamic(tokens, 1)
        torch._dynamo.maybe_mark_dynamic(positions, 0)
        return compiled(tokens, positions, start)

    return call


def begin(device: torch.device) -> Callable[[], None]:
    """Get the compiler ready beside other work: its modules, and the hashes of its sources. The
    function returned waits for the end.

    A function that needs no kernel is compiled for that, since every step of it is public. What
    goes wrong there goes wrong again in the compilation that counts, and is told then.
    """
    if device.type != "cpu":
        return lambda: None
    environment.prepare_compiler(device.type)
    thread = threading.Thread(target=_compile_something, args=(device,), daemon=True)
    thread.start()
    return thread.join


def _compile_something(device: torch.device) -> None:
    try:
        compiled = torch.compile(lambda x: x[None], fullgraph=True, options=options(device))
        with torch.no_grad():
            compiled(torch.zeros(64, device=device))
    except Exception:
        return
