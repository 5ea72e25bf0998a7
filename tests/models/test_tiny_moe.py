"""The embedded mixture of experts is real: it predicts unseen text, and routes it unevenly."""

import json
import math

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from quantbench.models.loading import load_config, load_model
from quantbench.models.mixtral import Router
from quantbench.models.tiny import train as dense
from quantbench.models.tiny.train import MIXTURE, clusters, upcycled

HERE = dense.HERE.parent / "tiny_moe"
TEXT = (dense.HERE / "heldout.txt").read_text()
RECORD = json.loads((HERE / "training.json").read_text())


@pytest.fixture(scope="module")
def tokens():
    return sentencepiece.SentencePieceProcessor(str(HERE / "tokenizer.model")).encode(TEXT)


def test_it_is_small_and_what_the_recipe_says():
    config = load_config("tiny_moe")
    assert (HERE / "model.safetensors").stat().st_size <= 12e6
    assert (config.mixture.num_experts, config.mixture.experts_per_token) == (8, 2)
    assert config.mixture == MIXTURE
    same = (HERE / "tokenizer.model").read_bytes() == (dense.HERE / "tokenizer.model").read_bytes()
    assert same


def test_held_out_text_is_predicted_as_well_as_by_the_model_that_it_began_as(tokens):
    """Four windows, evenly spread. Their text may be a quarter harder than the whole, of which the
    recorded figure is; the two models read the same, so that a difference of 3 % is no chance."""
    windows = torch.tensor(tokens).unfold(0, 1025, len(tokens) // 4)
    text = sentencepiece.SentencePieceProcessor(str(HERE / "tokenizer.model"))
    size = sum(len(text.decode(row[1:].tolist()).encode()) for row in windows)
    bits = {}
    for name in ("tiny", "tiny_moe"):
        logits = load_model(name)(windows[:, :-1]).flatten(0, 1)
        nats = F.cross_entropy(logits.float(), windows[:, 1:].flatten(), reduction="sum")
        bits[name] = nats.item() / math.log(2) / size
    assert bits["tiny_moe"] == pytest.approx(RECORD["bits_per_byte"], rel=0.25)
    assert bits["tiny_moe"] <= 1.03 * bits["tiny"]


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


def test_each_row_is_in_the_cluster_with_the_nearest_center():
    x = torch.randn(200, 5) * torch.rand(200, 1)
    centers, cluster = clusters(x, 4, rounds=100)
    for number, center in enumerate(centers):
        rows = F.normalize(x[cluster == number], dim=1)
        assert len(rows) and torch.allclose(center, F.normalize(rows.sum(0), dim=0), atol=1e-5)
        distances = (rows[:, None] - centers).norm(dim=2)  # (rows, clusters)
        assert (distances.argmin(1) == number).all()


def test_it_begins_as_the_embedded_model(tokens):
    torch.manual_seed(0)
    row = torch.tensor([tokens[:200]])
    expected = load_model("tiny")(row)
    assert (upcycled(row)(row) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_hugging_face_reads_the_folder_and_gets_the_same_logits(tokens):
    read = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        HERE, dtype=torch.float32, quantization_config=read
    )
    row = torch.tensor([tokens[:100]])
    expected = theirs(row).logits
    assert (load_model("tiny_moe")(row) - expected).abs().max() <= 1e-4 * expected.abs().max()
