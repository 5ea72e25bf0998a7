"""Getting the compiler ready beside other work: it ends, changes nothing, and hides no failure."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from quantbench.log.config import RunConfig
from quantbench.ops.cpu import build
from quantbench.run import compiling, loading
from quantbench.run.plan import make_plan

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def prepare(device):
    preparation = compiling.Preparation(device)
    preparation.begin()
    preparation.wait()


def test_what_it_gives_torch_compile_is_taken():
    x = torch.randn(100)
    compiled = torch.compile(lambda x: x.exp() + 1, options=compiling.options(CPU))
    torch.testing.assert_close(compiled(x), x.exp() + 1)


@pytest.mark.parametrize("words", ["env c++ -g", "nope"])
def test_inductor_takes_a_compiler_of_several_words(words, tmp_path):
    """In a process of its own: inductor reads CXX once, and keeps what it compiled."""
    if reason := build.unavailable():
        pytest.skip(reason)
    program = (
        "import torch\nfrom quantbench.cli import explained\n"
        "from quantbench.run import compiling\n"
        "options = compiling.options(torch.device('cpu'))\n"
        "x = torch.ones(100)\n"
        "try:\n"
        "    print(torch.compile(lambda x: x.exp() + 1, options=options)(x).sum())\n"
        "except Exception as error:\n"
        "    print(explained(error)[0])\n"
    )
    folders = {"XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
    # What the C++ kernels were built with does not matter here: they are not built again.
    environment = {**os.environ, **folders, "CXX": words, "CXXFLAGS": "-ffast-math"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    expected = "torch.compile needs a C++ compiler" if words == "nope" else "tensor(371.8282)"
    assert done.stdout.startswith(expected), done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_accelerators_are_left_alone(kind, monkeypatch):
    monkeypatch.setattr(torch, "compile", None)  # would fail
    before = threading.active_count()
    prepare(torch.device(kind))
    assert threading.active_count() == before
    assert "cpp.vec_isa_ok" not in compiling.options(torch.device(kind))


def test_it_leaves_random_numbers_and_the_thread_count_alone():
    torch.manual_seed(3)
    expected, threads = torch.rand(5), torch.get_num_threads()
    torch.manual_seed(3)
    prepare(CPU)
    assert torch.equal(torch.rand(5), expected) and torch.get_num_threads() == threads


def test_a_compiler_that_fails_is_left_to_the_compilation_that_counts(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    reported = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    prepare(CPU)
    assert not reported


def test_waiting_for_what_has_not_begun_takes_nothing(monkeypatch):
    monkeypatch.setattr(torch, "compile", None)  # would fail
    compiling.Preparation(CPU).wait()


@pytest.mark.parametrize(
    ("options", "compiles"),
    [
        ({}, False),
        ({"compile": True}, False),  # cpu-step is one op
        ({"compile": True, "quantization": "int8wo"}, False),
        ({"compile": True, "quantization": "float8dq-row"}, True),  # rounds in Python
        ({"compile": True, "quantization": "embed-int8"}, False),
        ({"compile": True, "quantization": "int8wo", "kernel": "torchao"}, True),
        ({"compile": True, "kv_cache": "int4"}, False),
        ({"compile": True, "kv_cache_quantization": True}, False),
        ({"compile": True, "decoder": "modules"}, True),
        ({"compile": True, "batch_size": 32}, True),
        ({"compile_prefill": True}, True),
        ({"quantization": "float8dq-row"}, False),
        ({"compile": True, "quantization": "autoquant"}, False),  # it would disturb the timings
    ],
)
def test_the_compiler_is_prepared_where_something_will_be_compiled(monkeypatch, options, compiles):
    if build.refusal():
        pytest.skip("without the C++ kernels every step is compiled")
    begun = []
    monkeypatch.setattr(compiling.Preparation, "begin", lambda self: begun.append(self))
    config = RunConfig(checkpoint_path="tiny", num_layers=1, device="cpu", **options)
    if config.quantization == "autoquant":
        monkeypatch.setattr(loading.Loading, "load", lambda self, *arguments: None)
        monkeypatch.setattr(loading.Loading, "kernels", "cpu")
    plan = make_plan(config)
    loading.load(plan, lambda done, total: None, lambda line: None)
    assert bool(begun) == compiles
