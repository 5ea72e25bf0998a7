"""Options of torch.compile on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from quantbench.generate import Generator
from quantbench.kv_cache import CACHES
from quantbench.ops.cpu import build
from quantbench.quantize.kernels import TritonLinear
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse
from quantbench.run import compiling
from tests.models.small import small_model

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


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
def test_accelerators_are_left_alone(kind):
    assert "cpp.vec_isa_ok" not in compiling.options(torch.device(kind))


class Graphs(CustomGraphPass):
    """Keeps every graph that inductor compiles, as it is after all of its passes."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append(graph)

    def uuid(self):
        return None


def compiled_step(model, cache):
    """The graphs of a decoding step by the model's modules, which goes from one region a layer."""
    made = Generator(model, 1, 64, cache, "modules", compile_decode=True)
    assert made.decoder.nested
    graphs = Graphs()
    with torch._inductor.config.patch(post_grad_custom_post_pass=graphs, force_disable_caches=True):
        made.forward(torch.tensor([[1]]), 7)
    return graphs.seen


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_a_compiled_step_copies_no_cache(cache):
    """Positions are written in place: where inductor cannot show that it may, it copies the whole
    cache at each step, and says nothing."""
    model = small_model()
    shapes = {tuple(b.shape) for b in CACHES[cache](1, 2, 64, 32, torch.float32, "cpu").buffers()}
    nodes = [node for graph in compiled_step(model, cache) for node in graph.nodes]
    written = [node for node in nodes if "index_put" in str(node.target)]
    values = {node: node.meta.get("val") for node in nodes}
    copies = [
        node
        for node, value in values.items()
        if "clone" in str(node.target) and tuple(getattr(value, "shape", ())) in shapes
    ]
    assert written and not copies


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp6", "uintx-3-64", "int8dq", "nvfp4"])
def test_our_triton_layers_are_compiled_once_for_all(name, monkeypatch):
    """Their weights are plain tensors, which a nested region takes."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model, spec = small_model(), parse(name)
    quantizer = Quantizer(spec, CPU, torch.float32, "triton")
    for layer, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and layer != "output":
            model.set_submodule(layer, quantizer(layer, module))
    assert sum(isinstance(module, TritonLinear) for module in model.modules()) == 8
    graphs = compiled_step(model, "dense")
    products = [n for g in graphs for n in g.nodes if "triton_linear" in str(n.target)]
    assert 0 < len(products) <= 4  # of a layer, not of both
