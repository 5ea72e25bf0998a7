"""Options of torch.compile on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantbench.ops.cpu import build
from quantbench.run import compiling

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def test_what_it_gives_torch_compile_is_taken():
    x = torch.randn(100)
    compiled = torch.compile(lambda x: x.exp() + 1, options=compiling.options(CPU))
    torch.testing.assert_close(compiled(x), x.exp() + 1)


@pytest.mark.parametrize("words", ["env c++ -g", "nope"])
def test_inductor_takes_a_compiler_of_several_words(words, tmp_path):
    """In a separate process: inductor reads CXX once, and keeps what it compiled."""
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
def test_accelerators_are_left_alone(kind):
    assert "cpp.vec_isa_ok" not in compiling.options(torch.device(kind))
