"""Where the C++ kernels run: instruction sets, and several threads in one kernel."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from quantbench.errors import KernelError
from quantbench.ops.cpu import build
from tests import coverage_of_machine

NEEDS_COMPILER = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the GPU here")
# Where a kernel is tested, by its label: Triton's in its interpreter, or on a GPU.
MARKS = {"triton": NO_GPU, "triton-gpu": pytest.mark.gpu}
before: list[str] = []  # the instruction set that the process had, once a test has used another


def use(isa: str) -> None:
    if reason := build.unavailable():
        pytest.skip(reason)
    if not before:
        before.append(build.isa())
    try:
        build.use_isa(isa)
    except KernelError as error:
        pytest.skip(f"instruction set {isa}: {error}")
    coverage_of_machine.ran[isa] += 1


def same_at_once(
    function: Callable[..., torch.Tensor], problems: Sequence[Any], times: int
) -> None:
    """function(*problem) is the same to the bit whether or not another thread is in it."""

    def same(problem: Any, alone: torch.Tensor) -> bool:
        return all(torch.equal(function(*problem), alone) for _ in range(times))

    alone = [function(*problem) for problem in problems]
    with ThreadPoolExecutor(len(problems)) as threads:
        assert all(threads.map(same, problems, alone))
