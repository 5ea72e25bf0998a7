"""Which decoder takes which model: every reason to refuse, on models that differ in one thing."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from quantbench.errors import KernelError
from quantbench.generate import Generator
from quantbench.log import config as names
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.ops.cpu import build
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse
from quantbench.run import decoding
from quantbench.run.cpu_step import UNDERSTOOD, why_not_fused
from tests.models.small import small_model

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))


def fused():
    """A model that cpu-step takes."""
    model = small_model()
    quantizer = Quantizer(parse("none"), torch.device("cpu"), torch.float32, "cpu")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, quantizer(name, module))
    return model


def test_every_field_of_a_config_is_understood_or_refused():
    """A new field that changes the result refuses the op until somebody has taught it."""
    refused = {
        "extras",  # keys of config.json that one architecture alone reads
        *("full_layers", "window_rope_theta", "post_norms"),
        *("attention_scale", "attention_softcap", "logit_softcap"),
    }
    assert {field.name for field in dataclasses.fields(ModelConfig)} == UNDERSTOOD | refused


def test_a_field_that_nobody_has_taught_the_op_refuses_it():
    @dataclasses.dataclass(frozen=True)
    class Newer(ModelConfig):
        softcap: float | None = None

    model = fused()
    caches = Generator(model, 1, 8).caches
    fields = dataclasses.fields(ModelConfig)
    model.config = Newer(**{field.name: getattr(model.config, field.name) for field in fields})
    assert why_not_fused(model, caches, 1) is None
    model.config = dataclasses.replace(model.config, softcap=30.0)
    assert "does not know what softcap means" in why_not_fused(model, caches, 1)


def test_a_library_that_cannot_be_had_is_the_reason(monkeypatch):
    """Not what follows from it: layers that have no C++ kernel."""
    model = fused()
    caches = Generator(model, 1, 8).caches
    for layer in model.layers:
        layer.feed_forward.w2 = nn.Linear(4, 4)
    monkeypatch.setattr(build, "refusal", lambda: "the C++ kernels do not load: no reason")
    assert why_not_fused(model, caches, 1) == "the C++ kernels do not load: no reason"


class Gelu(nn.Module):
    """A feed-forward layer with all of its linear layers in C++, that computes something else."""

    def __init__(self, like):
        super().__init__()
        self.w13, self.w2 = like.w13, like.w2


def other_feed_forward(model):
    model.layers[1].feed_forward = Gelu(model.layers[1].feed_forward)


def other_norm(model):
    model.layers[1].ffn_norm = nn.LayerNorm(64)


def other_epsilon(model):
    model.layers[0].attention_norm.eps = 1e-3


def plain_linear(model):
    model.layers[1].attention.wo = nn.Linear(128, 64, bias=False)


def no_linear(model):
    model.layers[0].feed_forward.w2 = nn.Identity()


def other_output(model):
    model.output = nn.Linear(64, 100, bias=False)


def subclass(model):
    class Other(Transformer):
        pass

    model.__class__ = Other


@pytest.mark.parametrize(
    ("change", "reason", "decoder"),
    [
        (other_feed_forward, "layers.1.feed_forward is a Gelu, no FeedForward", "modules"),
        (other_norm, "layers.1.ffn_norm is a LayerNorm, no RMSNorm", "modules"),
        (other_epsilon, "layers.0.attention_norm adds 0.001, and the others 1e-05", "modules"),
        (plain_linear, "layers.1.attention.wo is a Linear, which has no C++ kernel", "modules"),
        (no_linear, "layers.0.feed_forward.w2 is a Identity, which has no C++ kernel", "modules"),
        (subclass, "the model is a Other, and the op computes a Transformer", "modules"),
        (other_output, "output is a Linear, which has no C++ kernel", "modules"),
    ],
)
def test_a_model_that_differs_in_one_part_is_refused(change, reason, decoder):
    model = fused()
    assert Generator(model, 1, 8).decoder.reason is None
    change(model)
    made = Generator(model, 1, 8)
    assert (made.decoder.name, made.decoder.reason) == (decoder, reason)
    with pytest.raises(KernelError, match="^--decoder cpu-step: "):
        Generator(model, 1, 8, decoder="cpu-step")


@pytest.mark.parametrize("variable, value", [("CXXFLAGS", "-ffast-math"), ("CXX", "/nope/c++")])
def test_without_the_library_the_reason_is_the_compiler_s(variable, value, monkeypatch):
    model = small_model()  # what its layers are does not matter then
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(build, "_library", lambda: Path("/nowhere"))
    for cached in (build.load, build.refusal):  # earlier tests have loaded the library
        monkeypatch.setattr(build, cached.__name__, cached.__wrapped__)
    reason = build.unavailable()
    assert reason and variable in reason
    with pytest.raises(KernelError) as refused:
        decoding.name_of("cpu-step", model, [], 1)
    assert str(refused.value) == f"--decoder cpu-step: {reason}; auto takes what can run"


def test_the_option_takes_the_decoders_that_there_are():
    assert names.DECODERS == ("auto", *decoding.DECODERS)
