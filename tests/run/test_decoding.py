"""Which decoder takes which model: every reason to refuse, on models that differ in one thing."""

import dataclasses

import pytest
import torch
from torch import nn

from quantbench.errors import KernelError
from quantbench.generate import Generator
from quantbench.models import gemma4_config
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.ops.cpu import build
from quantbench.run.cpu_step import UNDERSTOOD, why_not_fused
from tests.models.small import on_kernel, small_model

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))


def fused():
    """A model that cpu-step takes."""
    return on_kernel(small_model())


def test_every_field_of_a_config_is_understood_or_refused():
    """A new field that changes the result refuses the op until somebody has taught it."""
    # extras: keys that one architecture alone reads. The others: Gemma 4's, and states'.
    refused = {"extras", "attention_sinks", *gemma4_config.FIELDS}
    refused |= {"gated_attention", "recurrent", "recurrent_layers"}
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


def test_a_scheme_that_rounds_activations_outside_of_its_kernel_is_refused():
    model = on_kernel(small_model(), "float8dq-row", torch.bfloat16, "auto")
    assert Generator(model, 1, 8).decoder.name == "modules"


class Gelu(nn.Module):
    """A feed-forward layer with all of its linear layers in C++, that computes something else."""

    def __init__(self, like):
        super().__init__()
        self.w13, self.w2 = like.w13, like.w2


def gated_by_relu(like):
    like.activation = torch.relu
    return like


CHANGES = [  # a module's name, what replaces it, and the reason that follows
    ("layers.1.feed_forward", Gelu, "layers.1.feed_forward is a Gelu, no FeedForward"),
    ("layers.0.feed_forward", gated_by_relu, "layers.0.feed_forward goes through relu, which"
     " the op does not know"),
    ("layers.1.ffn_norm", lambda _: nn.LayerNorm(64),
     "layers.1.ffn_norm is a LayerNorm, no RMSNorm"),
    ("layers.0.attention_norm", lambda _: nn.RMSNorm(64, eps=1e-3),
     "layers.0.attention_norm adds 0.001, and the others 1e-05"),
    ("layers.1.attention.wo", lambda _: nn.Linear(128, 64, bias=False),
     "layers.1.attention.wo is a Linear, which has no C++ kernel"),
    ("layers.0.feed_forward.w2", lambda _: nn.Identity(),
     "layers.0.feed_forward.w2 is a Identity, which has no C++ kernel"),
    ("output", lambda _: nn.Linear(64, 100, bias=False),
     "output is a Linear, which has no C++ kernel"),
    ("", None, "the model is a Other, and the op computes a Transformer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "reason"), CHANGES)
def test_a_model_that_differs_in_one_part_is_refused(name, change, reason):
    model = fused()
    assert Generator(model, 1, 8).decoder.reason is None
    if name:
        model.set_submodule(name, change(model.get_submodule(name)))
    else:
        model.__class__ = type("Other", (Transformer,), {})
    made = Generator(model, 1, 8)
    assert (made.decoder.name, made.decoder.reason) == ("modules", reason)
    with pytest.raises(KernelError, match="^--decoder cpu-step: "):
        Generator(model, 1, 8, decoder="cpu-step")
