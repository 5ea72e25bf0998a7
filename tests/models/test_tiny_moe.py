"""The embedded mixture of experts is real: it predicts unseen text, and routes it unevenly."""

import json
import math

import pytest
import sentencepiece
import torch
from transformers import AutoModelForCausalLM

from models.checkpoints.load import load_config, load_model
from models.mixtral import Router
from models.tiny import train as dense
from models.tiny_moe.train import CONFIG, EXPERTS, HERE, WIDTH, _clusters, learning_rate

TEXT = (dense.HERE / "heldout.txt").read_text()
RECORD = json.loads((HERE / "training.json").read_text())


@pytest.fixture(scope="module")
def tokens():
    return sentencepiece.SentencePieceProcessor(str(HERE / "tokenizer.model")).encode(TEXT)


def test_it_is_small_and_what_the_recipe_says():
    config = load_config("tiny_moe")
    assert (HERE / "model.safetensors").stat().st_size <= 12e6
    assert (config.mixture.num_experts, config.mixture.experts_per_token) == (8, 2)
    assert config.mixture == CONFIG.mixture
    same = (HERE / "tokenizer.model").read_bytes() == (dense.HERE / "tokenizer.model").read_bytes()
    assert same


@pytest.mark.slow
def test_held_out_text_is_predicted_as_recorded(tokens):
    bits = dense.held_out_nats(load_model("tiny_moe"), tokens) / math.log(2) / len(TEXT.encode())
    # the recorded figure is that of the weights before they were rounded to bfloat16
    assert bits == pytest.approx(RECORD["bits_per_byte"], rel=0.01)


def test_every_layer_uses_all_experts_and_not_equally(tokens):
    model, chosen = load_model("tiny_moe"), []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda *a: chosen.append(a[2][0]))
    model(torch.tensor([tokens[:1000]]))
    for of_layer in chosen:
        shares = of_layer.flatten().bincount(minlength=8) / of_layer.numel()
        # 2000 even assignments would scatter by 0.007 around 0.125
        assert shares.min() > 0 and shares.max() - shares.min() > 0.03


def test_neurons_are_shared_out_evenly_each_once():
    torch.manual_seed(0)
    groups, centers = _clusters(torch.randn(EXPERTS * WIDTH, 16), rounds=3)
    assert [len(group) for group in groups] == [WIDTH] * EXPERTS
    assert torch.cat(groups).sort().values.tolist() == list(range(EXPERTS * WIDTH))
    assert centers.shape == (EXPERTS, 16)


def test_the_rate_is_level_and_then_falls():
    assert learning_rate(0, 100, 1) == 1 / 20 and learning_rate(99, 100, 1) == 1
    assert [learning_rate(step, 100, 50) for step in (49, 50, 75, 99)] == [1, 1, 0.5, 0.02]


def test_hugging_face_reads_the_folder_and_gets_the_same_logits(tokens):
    theirs = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32)
    row = torch.tensor([tokens[:100]])
    expected = theirs(row).logits
    assert (load_model("tiny_moe")(row) - expected).abs().max() <= 1e-4 * expected.abs().max()
