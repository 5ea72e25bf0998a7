"""A new architecture is one file and one row: Granite, whose file this test writes.

Granite (IBM; transformers' models/granite) is a Llama with a factor at four places: the embeddings,
the scores of attention, both residual sums and the logits. Its config.json has four keys for them.
"""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig

from quantbench import models
from quantbench.errors import CheckpointError, UsageError
from quantbench.generate import Generator
from quantbench.models import registry
from quantbench.models.config_checks import POSITIVE
from quantbench.models.loading import load_config
from quantbench.models.registry import ARCHITECTURES, ATTENTION_BIAS, Architecture
from quantbench.models.split import check_split
from tests.models.hugging_face import SIZES
from tests.programs import worked

FILE = '''
"""Granite: models.llama.Transformer, and a factor at four places."""

from quantbench.models.llama import Block, Transformer


class Granite(Transformer):
    def block(self, number):
        return GraniteBlock(self.config, number)

    def embed(self, tokens):
        return super().embed(tokens) * dict(self.config.extras)["embedding_multiplier"]

    def logits(self, x):
        return super().logits(x) / dict(self.config.extras)["logits_scaling"]


class GraniteBlock(Block):
    def __init__(self, config, number):
        super().__init__(config, number)
        self.residual = dict(config.extras)["residual_multiplier"]

    def forward(self, x, *how):
        x = x + self.residual * self.attention(self.attention_norm(x), *how)
        return x + self.residual * self.feed_forward(self.ffn_norm(x))
'''
FACTORS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
ROW = Architecture(
    "granite_of_a_test:Granite",
    {"max_position": 2048},
    fields={**ATTENTION_BIAS, "attention_multiplier": ("attention_scale",)},
    accepts={"attention_multiplier": POSITIVE},
    extras=dict.fromkeys(FACTORS, POSITIVE),
)


@pytest.fixture
def granite(tmp_path, monkeypatch):
    """A random Granite and its folder; its file and its row are there as long as the test."""
    (tmp_path / "granite_of_a_test.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ARCHITECTURES, "granite", ROW)
    config = GraniteConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True,
                           attention_multiplier=0.5, **FACTORS)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float().eval()
    folder = tmp_path / "Granite-of-a-test"
    model.save_pretrained(folder)
    return model, folder


@torch.no_grad()
def test_a_file_and_a_row_compute_what_hugging_face_computes(granite):
    """Prompt and steps, within the rounding of float32 that test_families.py allows."""
    model, folder = granite
    ours = models.load(str(folder))
    tokens = torch.randint(SIZES["vocab_size"], (2, 12))
    expected = model(tokens).logits
    generator = Generator(ours, 2, 16)
    logits = [generator.forward(tokens[:, :9]), *(generator.forward(tokens[:, i : i + 1], i)
              for i in range(9, 12))]  # fmt: skip
    assert torch.allclose(ours(tokens), expected, atol=1e-4)
    assert torch.allclose(torch.cat(logits, 1), expected, atol=1e-4)
    # What was not taught the new class refuses it, and does not compute a Llama instead.
    assert generator.decoder.name == "modules"
    assert "the model is a Granite" in generator.decoder.reason
    with pytest.raises(UsageError, match="how ranks share a model of architecture granite_of"):
        check_split(load_config(str(folder)), 2)


def test_it_is_quantized_saved_and_generates(granite, tmp_path):
    _, folder = granite
    options = "--quantization int8wo --precision float32 --device cpu --num_samples 1".split()
    options += "--max_new_tokens 4 --temperature 0 --write_result none --prefill_size 5".split()
    saved, lines = str(tmp_path / "saved"), str(tmp_path / "runs.jsonl")
    for checkpoint, more in ((f"dummy:{folder}/config.json", ["--save", saved]), (saved, [])):
        given = ("--checkpoint_path", checkpoint, *more, "--output_json_path", lines, *options)
        worked("generate", *given)
    for line in open(lines):
        run = json.loads(line)
        assert (run["scheme"], run["decoder"]) == ("int8wo", "modules")
        assert run["architecture"]["architecture"] == "granite_of_a_test"
        assert dict(run["architecture"]["extras"]) == FACTORS


def test_every_row_names_a_class_that_there_is(granite):
    _, folder = granite
    config = load_config(str(folder))
    for row in ARCHITECTURES.values():
        assert registry.of_config(dataclasses.replace(config, architecture=row.name)).model == (
            row.model
        )
    supported = "'bloom' is not supported; there are llama, gemma, "
    with pytest.raises(CheckpointError, match=supported):
        models.build(dataclasses.replace(config, architecture="bloom"))
