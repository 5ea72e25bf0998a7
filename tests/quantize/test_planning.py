"""Planning builds nothing; a kernel that fails when a layer is built gives way, or is an error."""

import os

import pytest
import torch
from torch import nn

from quantbench.errors import KernelError
from quantbench.ops.cpu import build
from quantbench.quantize.registry import Quantizer, available
from quantbench.quantize.spec import parse_scheme
from tests.ops.instructions import NEEDS_COMPILER
from tests.programs import python

CPU = torch.device("cpu")
pytestmark = NEEDS_COMPILER


@pytest.mark.parametrize(
    "command",
    [
        ["generate.py", "--quantization", "int4wo-64", "--dry_run"],
        ["-m", "quantbench", "schemes", "int8wo"],
    ],
)
def test_planning_leaves_no_library_behind(command, tmp_path):
    done = python(*command, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout and "Building" not in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".so", ".o")]


@pytest.fixture
def broken(monkeypatch):
    monkeypatch.setattr(build, "refusal", lambda: "the compiler stopped")


def layers(count=2):
    return [nn.Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False) for _ in range(count)]


@pytest.mark.parametrize("scheme, following", [("int8wo", "torchao"), ("none", "torch")])
def test_a_kernel_that_cannot_be_built_gives_way_to_the_next_and_says_so_once(
    broken, scheme, following
):
    said = []
    spec = parse_scheme(scheme)
    quantizer = Quantizer(spec, CPU, torch.bfloat16, say=said.append)
    assert available(spec, CPU, torch.bfloat16)["cpu"] is None  # planned
    for number, layer in enumerate(layers()):
        x = torch.randn(3, 64, dtype=torch.bfloat16)
        assert quantizer(f"layers.{number}", layer)(x).shape == (3, 32)
    assert said == [
        f"Kernel cpu cannot be used, {following} is next: the compiler stopped"
    ] and quantizer.ran == {following: 2}


def test_a_kernel_that_was_named_and_cannot_be_built_is_an_error(broken):
    quantizer = Quantizer(parse_scheme("fp6"), CPU, torch.bfloat16, "cpu")
    with pytest.raises(KernelError, match="--kernel cpu: fp6: the compiler stopped"):
        quantizer("layer", layers(1)[0])
