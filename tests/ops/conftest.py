"""Fixtures of the kernels' tests: instruction sets, kernels, threads, and pieces of their work."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from quantbench.ops.cpu import build
from tests.ops import instructions


@pytest.fixture(scope="module", autouse=True)
def best() -> Iterator[None]:
    """The instruction set the process had, again."""
    yield
    if instructions.before:
        build.use_isa(instructions.before[0])


@pytest.fixture(params=build.ISAS)
def isa(request) -> str:
    instructions.use(request.param)
    return request.param


@pytest.fixture
def kernel(request):
    """A kernel of a contract, where it can run here."""
    request.param.begin()
    return request.param


@pytest.fixture(params=["whole", "small"])
def pieces(request):
    """Small: threads share however little work there is, in pieces of a few hundred bytes."""
    if request.param == "whole":
        yield
        return
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
