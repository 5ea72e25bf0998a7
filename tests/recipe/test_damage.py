"""Estimated damage against the divergence itself, by forward passes in float64."""

import copy

import pytest
import torch

from quantbench import models
from quantbench.models.formats import EMBEDDED, open_checkpoint
from quantbench.models.loading import load_model
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse_scheme
from quantbench.recipe.damage import damages
from quantbench.run.calibration import token_ids

CPU = torch.device("cpu")
SCHEMES = ("none", "int8wo", "int4wo-32", "uintx-3-64", "uintx-3-64-gptq")


def true_kl(model, changed, ids):
    with torch.no_grad():
        p, q = (m(ids).double().log_softmax(-1) for m in (model, changed))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def with_scheme(model, name, scheme):
    changed = copy.deepcopy(model)
    quantizer = Quantizer.of_shapes(parse_scheme(scheme), CPU, torch.float32)
    layer = quantizer.quantized(name, changed.get_submodule(name))
    changed.get_submodule(name).weight.data = layer.weight.data.dequantize()
    return changed


def tokenizer(model):
    return open_checkpoint("tiny").tokenizer(model.config.vocab_size)


def text(model, texts=8, length=192):
    ids = tokenizer(model).encode((EMBEDDED / "heldout.txt").read_text()[:20_000])
    return torch.tensor(ids[: texts * length]).view(texts, length)


@pytest.fixture(scope="module")
def tiny():
    model = load_model("tiny")
    ids = text(model)
    others = token_ids(None, tokenizer(model), CPU)[:, : ids.shape[1]]
    found = damages(model, ids, others, [parse_scheme(s) for s in SCHEMES], lambda *_: None)
    return model, ids, found


@pytest.mark.parametrize(
    "name",
    [
        *("layers.0.attention.wqkv", "layers.1.feed_forward.w2", "layers.2.attention.wo"),
        *("layers.4.feed_forward.w13", "output"),
    ],
)
def test_damage_of_one_layer(tiny, name):
    """Half as much to twice as much: 1536 draws, whose squares have heavy tails, and second order.
    Schemes differ by a factor of two a bit and more."""
    model, ids, found = tiny
    true = true_kl(model, with_scheme(model, name, "int4wo-32"), ids)
    assert 0.5 < found[name, "int4wo-32"] / true < 2
    assert found[name, "none"] == 0


def test_damage_adds_up(tiny):
    """All layers together, in 8 bits, where second order is exact enough."""
    model, ids, found = tiny
    changed = model
    for name in (name for name, scheme in found if scheme == "int8wo"):
        changed = with_scheme(changed, name, "int8wo")
    total = sum(damage for (_, scheme), damage in found.items() if scheme == "int8wo")
    assert 0.7 < total / true_kl(model, changed, ids) < 1.4


def test_gptqs_share_of_the_damage_is_that_of_loaded_models(tiny):
    model, ids, found = tiny
    kinds = ("uintx-3-64", "uintx-3-64-gptq")
    true = [true_kl(model, models.load("tiny", quantization=kind), ids) for kind in kinds]
    estimated = [sum(d for (_, scheme), d in found.items() if scheme == kind) for kind in kinds]
    assert 0.7 < (estimated[1] / estimated[0]) / (true[1] / true[0]) < 1.4


def test_damage_of_the_embedding(tiny):
    model, ids, found = tiny
    changed = with_scheme(model, "tok_embeddings", "embed-int8")
    assert 0.5 < found["tok_embeddings", "embed-int8"] / true_kl(model, changed, ids) < 2


def test_every_expert_has_its_damage():
    model = load_model("tiny_moe")
    specs = [parse_scheme(name) for name in ("int8wo", "int4wo-32")]
    ids = text(model, 4, 64)
    found = damages(model, ids, ids[:0], specs, lambda *_: None)
    layers = {name for name, _ in found} - {"tok_embeddings"}
    assert layers == set(model.config.linear_shapes())
    for name in layers:
        assert 0 <= found[name, "int8wo"] <= found[name, "int4wo-32"]
