"""Options of torch.compile on this machine."""

import os
import re

import pytest
import torch
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import post_grad

from quantbench.generate import Generator
from quantbench.ops.cpu import build
from quantbench.run import decoding
from tests.models.small import on_kernel, small_model
from tests.programs import python


@pytest.mark.parametrize("words", ["env c++ -g", "nope"])
def test_inductor_takes_a_compiler_of_several_words(words, tmp_path):
    """In a separate process: inductor reads CXX once, and keeps what it compiled."""
    if reason := build.unavailable():
        pytest.skip(reason)
    program = (
        "import torch\nfrom quantbench.cli import explained\n"
        "from quantbench.run import decoding\n"
        "import torch._inductor.config as config\n"
        "config.cpp_cache_precompile_headers = False\n"  # which takes longer than the program
        "options = decoding.compile_options(torch.device('cpu'))\n"
        "x = torch.ones(100)\n"
        "try:\n"
        "    print(torch.compile(lambda x: x.exp() + 1, options=options)(x).sum())\n"
        "except Exception as error:\n"
        "    print(explained(error)[0])\n"
    )
    folders = {"XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
    # What the C++ kernels were built with does not matter here: they are not built again.
    environment = {**os.environ, **folders, "CXX": words, "CXXFLAGS": "-ffast-math"}
    done = python("-c", program, env=environment)
    expected = "torch.compile needs a C++ compiler" if words == "nope" else "tensor(371.8282)"
    assert done.stdout.startswith(expected), done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_accelerators_are_left_alone(kind):
    assert "cpp.vec_isa_ok" not in decoding.compile_options(torch.device(kind))


class Seen(Exception):
    """Ends a compilation where its graphs are known: what follows takes most of the time."""


def graphs_of(step, monkeypatch):
    """The nodes of all graphs of a step, as inductor compiles them: it has decided what is written
    in place and what is copied before. The step's graph comes last, behind that of the region which
    it calls for every layer."""
    nodes, decide = [], post_grad.decompose_auto_functionalized

    def seen(graph):
        decide(graph)
        nodes.extend(graph.nodes)
        if any("invoke_subgraph" in str(node.target) for node in graph.nodes):
            raise Seen

    monkeypatch.setattr(post_grad, "decompose_auto_functionalized", seen)
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        pytest.raises(InductorError, match="Seen"),
    ):
        step()
    return nodes


@pytest.mark.parametrize(
    "name, cache, rows, most",
    [
        *(("fp6", "int8", 1, 1), ("uintx-3-64", "fp8", 1, 1), ("int8dq", "int4", 1, 1)),
        *(("none", "dense", 2, 4), ("none", "int8", 4, 4)),
    ],
)
def test_a_compiled_step_copies_no_cache_and_has_one_graph_for_all_layers(
    name, cache, rows, most, monkeypatch
):
    """Positions are written in place: where inductor cannot show that it may, it copies the whole
    cache at each step, and says nothing. Our Triton layers hold plain tensors, which a nested
    region takes. rows of most: as in the cells of `latency`, which share what is compiled."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = small_model()
    on_kernel(model.layers, name, kernel="auto" if name == "none" else "triton")
    made = Generator(model, most, 64, cache, "modules", compile_decode=True, any_rows=most > 1)
    assert made.decoder.nested
    token, position = torch.ones(rows, 1, dtype=torch.int64), torch.tensor([7])

    def step():
        made.decode_one_token(made.decoder, token, position, made.sampling)

    nodes = graphs_of(step, monkeypatch)
    shapes = {tuple(buffer.shape) for buffer in made.caches[0].buffers()}
    names = [str(node.target) for node in nodes]
    products = [node for node in names if "triton_linear" in node]
    assert len(products) == (0 if name == "none" else 4)  # of a layer, not of both
    assert any("index_put" in node for node in names)
    for node in nodes:
        copied = re.search("clone|copy", str(node.target))
        # A copy of a tensor onto itself is not carried out.
        onto_itself = "copy_" in str(node.target) and node.args[0] is node.args[1]
        shape = tuple(getattr(node.meta.get("val"), "shape", ()))
        assert not copied or onto_itself or shape not in shapes, node
