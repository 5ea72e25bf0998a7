"""Getting the compiler ready beside other work: it ends, changes nothing, and hides no failure."""

import threading

import pytest
import torch

from run import compiling

CPU = torch.device("cpu")


def test_what_it_gives_torch_compile_is_taken():
    x = torch.randn(100)
    compiled = torch.compile(lambda x: x.exp() + 1, options=compiling.options(CPU))
    torch.testing.assert_close(compiled(x), x.exp() + 1)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_accelerators_are_left_alone(kind, monkeypatch):
    monkeypatch.setattr(torch, "compile", None)  # would fail
    before = threading.active_count()
    compiling.begin(torch.device(kind))()
    assert threading.active_count() == before
    assert "cpp.vec_isa_ok" not in compiling.options(torch.device(kind))


def test_it_leaves_random_numbers_and_the_thread_count_alone():
    torch.manual_seed(3)
    expected, threads = torch.rand(5), torch.get_num_threads()
    torch.manual_seed(3)
    compiling.begin(CPU)()
    assert torch.equal(torch.rand(5), expected) and torch.get_num_threads() == threads


def test_a_compiler_that_fails_is_left_to_the_compilation_that_counts(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    reported = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    compiling.begin(CPU)()
    assert not reported
