"""Instruction sets and threads of the C++ kernels. conftest.py makes fixtures of some of this."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
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


@pytest.fixture(scope="module", autouse=True)
def best() -> Iterator[None]:
    """The instruction set the process had, again."""
    yield
    if before:
        build.use_isa(before[0])


@pytest.fixture(params=build.ISAS)
def isa(request) -> str:
    use(request.param)
    return request.param


@pytest.fixture
def small_pieces():
    """Work is shared among threads however small it is, and in pieces of a few hundred bytes."""
    set_limits = build.load().quantbench_set_limits
    set_limits(*(ctypes.c_int64(number) for number in (0, 0, 256)))
    yield
    set_limits(*(ctypes.c_int64(number) for number in (-1, 0, 0)))


@pytest.fixture
def threads():
    """Sets the number of torch's threads; the test's end restores it."""
    count = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(count)


@pytest.fixture
def same_for_any_threads(threads):
    """The result of a function, if 1 to 4 threads give it bit for bit."""

    def result(function: Callable[[], torch.Tensor]) -> torch.Tensor:
        results = []
        for count in (1, 2, 3, 4):
            threads(count)
            results.append(function())
        assert all(torch.equal(results[0], other) for other in results)
        return results[0]

    return result


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
