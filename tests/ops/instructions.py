"""For tests that run under every instruction set: `best` is to be imported, to be in force."""

import pytest

from errors import KernelError
from ops.cpu import build
from tests import coverage_of_machine


@pytest.fixture(scope="module", autouse=True)
def best():
    """The instruction set the process had, again."""
    before = build.isa()
    yield
    build.use_isa(before)


def use(isa: str) -> None:
    try:
        build.use_isa(isa)
    except KernelError as error:
        pytest.skip(f"instruction set {isa}: {error}")
    coverage_of_machine.ran[isa] += 1
