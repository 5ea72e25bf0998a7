"""Making torch.compile start faster: its options, and its preparation while weights are read.

    preparation = compiling.Preparation(device)
    preparation.begin()     # in a thread: imports, and hashes of the compiler's sources
    …                       # load the model
    preparation.wait()
    torch.compile(step, options=compiling.options(device))

Most of a cold compilation's time is preparation; compiling the step itself is the smaller part
(docs/LOG.md).
"""

import platform
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantbench import devices
from quantbench.run import environment

Options = dict[str, str | int | bool | Callable[..., Any]]  # the `options` of torch.compile


def options(device: torch.device) -> Options:
    """The `options` of torch.compile for a decoding step on `device`."""
    chosen: Options = dict(devices.KINDS[device.type].compile_options)
    if device.type != "cpu":
        return chosen
    from quantbench.ops.cpu import build

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


class Preparation:
    """Preparing the compiler in a thread: importing its modules and hashing its sources.

    The thread compiles a function that needs no kernel, because that uses only torch's public API.
    An error is ignored: the real compilation raises it again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, unless it runs or the device needs none."""
        if self.device.type != "cpu" or self.thread is not None:
            return
        environment.prepare_compiler(self.device.type)
        self.thread = threading.Thread(target=_compile_something, args=(self.device,), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Wait until the thread ends; return at once if none was started."""
        if self.thread is not None:
            self.thread.join()


def _compile_something(device: torch.device) -> None:
    try:
        compiled = torch.compile(lambda x: x[None], fullgraph=True, options=options(device))
        with torch.no_grad():
            compiled(torch.zeros(64, device=device))
    except Exception:
        return
