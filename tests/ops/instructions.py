"""For tests that run under every instruction set: `best` is to be imported, to be in force."""

import ctypes

import pytest

from quantbench.errors import KernelError
from quantbench.ops.cpu import build
from tests import coverage_of_machine


@pytest.fixture(scope="module", autouse=True)
def best():
    """The instruction set the process had, again."""
    before = build.isa()
    yield
    build.use_isa(before)


@pytest.fixture
def small_pieces():
    """Work is shared among threads however small it is, and in pieces of a few hundred bytes."""
    set_limits = build.load().quantbench_set_limits
    set_limits(*(ctypes.c_int64(number) for number in (0, 0, 256)))
    yield
    set_limits(*(ctypes.c_int64(number) for number in (-1, 0, 0)))


def use(isa: str) -> None:
    try:
        build.use_isa(isa)
    except KernelError as error:
        pytest.skip(f"instruction set {isa}: {error}")
    coverage_of_machine.ran[isa] += 1
