"""Making torch.compile start faster: its options, and its preparation while weights are read.

    preparation = compiling.Preparation(device)
    preparation.begin()     # in a thread: imports, and hashes of the compiler's sources
    …                       # load the model
    preparation.wait()
    torch.compile(step, options=compiling.options(device))

Most of a cold compilation's time is preparation; compiling the step itself is the smaller part
(docs/LOG.md).
"""

import contextlib
import platform
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantbench import devices
from quantbench.ops.cpu import build
from quantbench.run import environment

Options = dict[str, str | int | bool | Callable[..., Any]]  # the `options` of torch.compile


def options(device: torch.device) -> Options:
    """The `options` of torch.compile for a decoding step on `device`."""
    chosen: Options = dict(devices.KINDS[device.type].compile_options)
    if device.type != "cpu":
        return chosen
    chosen |= build.options_of_inductor()
    # For each instruction set of the CPU, inductor compiles a file to see whether the compiler
    # supports it: 8 s on two cores. The compiler that built the C++ kernels supports them all.
    if platform.machine() == "x86_64" and build.refusal() is None:
        chosen["cpp.vec_isa_ok"] = True
    return chosen


def opaque(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Register a function as the op quantbench::`name` on the CPU, which inductor does not compile.

    This is for functions that run in microseconds and would take seconds to compile. Registering a
    name again has no effect. fake: the same for tensors without data, as torch.library takes it.
    """
    if hasattr(torch.ops.quantbench, name):
        return
    torch.library.define(f"quantbench::{name}", schema)
    torch.library.impl(f"quantbench::{name}", "CPU", implementation)
    torch.library.register_fake(f"quantbench::{name}", fake)


def opaque_draw(sample: Callable[[Tensor, float, int], Tensor]) -> None:
    """Register the op quantbench::draw, which gives the next token of every row and its position.

    sample: of logits (B, V), the temperature and top_k; returns tokens (B, 1).
    """
    opaque(
        "draw",
        "(Tensor logits, Tensor position, float temperature, int top_k) -> (Tensor, Tensor)",
        lambda logits, position, *how: (sample(logits, *how), position + 1),
        lambda logits, position, *how: (
            position.new_empty((logits.shape[0], 1)),
            position.new_empty(position.shape),
        ),
    )


def fusing_attention(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On CUDA, make inductor fuse a single query's attention; flash kernels need many."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


def for_any_length(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function of tokens (B, S), positions (S,) and the first position (an int), so that
    it is not compiled again for another S."""

    def call(tokens: Tensor, positions: Tensor, start: int) -> Any:
        torch._dynamo.maybe_mark_dynamic(tokens, 1)
        torch._dynamo.maybe_mark_dynamic(positions, 0)
        return compiled(tokens, positions, start)

    return call


def for_any_rows(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function whose first argument is tokens (B, S), so that what is compiled for one
    B above 1 serves every other; B = 1 has code of its own."""

    def call(tokens: Tensor, *rest: Any) -> Any:
        if tokens.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tokens, 0)
        return compiled(tokens, *rest)

    return call


class Preparation:
    """Preparing the compiler in a thread: importing its modules and hashing its sources.

    The thread compiles a function that needs no kernel, because that uses only torch's public API.
    An error is ignored: the real compilation raises it again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin now, unless it has begun or the device needs none."""
        if self.device.type != "cpu" or self.thread is not None:
            return
        environment.prepare_compiler(self.device.type)
        self.thread = threading.Thread(target=_compile_something, args=(self.device,), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Wait until it is done; return at once if it has not begun."""
        if self.thread is not None:
            self.thread.join()


def _compile_something(device: torch.device) -> None:
    try:
        compiled = torch.compile(lambda x: x[None], fullgraph=True, options=options(device))
        with torch.no_grad():
            compiled(torch.zeros(64, device=device))
    except Exception:
        return
