"""The embedded model is real: it predicts text it never saw, and bad quantization hurts it."""

import json
import lzma
import math

import pytest
import sentencepiece
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quantbench.models.loading import load_config, load_model
from quantbench.models.tiny.train import HELD_OUT, HERE, corpus, export, held_out_nats
from quantbench.models.tokenizer import load_tokenizer

TEXT = (HERE / "heldout.txt").read_text()
RECORD = json.loads((HERE / "training.json").read_text())


@pytest.fixture(scope="module")
def tokens():
    return sentencepiece.SentencePieceProcessor(str(HERE / "tokenizer.model")).encode(TEXT)


def bits_per_byte(model, tokens, share=1.0):
    count = int(len(tokens) * share)
    nats = held_out_nats(model, tokens[:count])
    bytes_seen = len(TEXT.encode()) * share
    return nats / math.log(2) / bytes_seen


@pytest.mark.slow
def test_held_out_text_is_predicted_better_than_by_xz(tokens):
    xz = 8 * len(lzma.compress(TEXT.encode(), preset=9)) / len(TEXT.encode())
    ours = bits_per_byte(load_model("tiny"), tokens)
    assert ours <= 1.8 and ours < xz
    # the recorded figure is that of the weights before they were rounded to bfloat16
    assert ours == pytest.approx(RECORD["curve"][-1]["bits_per_byte"], rel=0.01)
    assert xz == pytest.approx(RECORD["xz_bits_per_byte"], rel=1e-3)


def rounded_to(bits):
    """A transform that rounds every linear layer's rows to 2^bits levels."""

    def transform(name, module):
        if isinstance(module, nn.Linear):
            step = module.weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 0.5)
            module.weight = nn.Parameter((module.weight / step).round() * step, False)
        return module

    return transform


@pytest.mark.slow
def test_quantizing_badly_hurts_and_quantizing_well_does_not(tokens):
    def measured(transform=None):
        return bits_per_byte(load_model("tiny", transform=transform), tokens, share=0.1)

    full = measured()
    assert measured(rounded_to(8)) < 1.01 * full
    assert measured(rounded_to(3)) > 1.2 * full


def test_hugging_face_reads_the_folder_and_gets_the_same_logits(tokens):
    theirs = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32)
    row = torch.tensor([tokens[:100]])
    expected = theirs(row).logits
    assert (load_model("tiny")(row) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["tiny", "tiny_moe"])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_an_export_is_read_back(tmp_path, name, eight_bit):
    model, folder = load_model(name, num_layers=1), tmp_path / name
    export(model, folder, eight_bit)
    again = load_model(str(folder))
    assert again.config == model.config
    for (key, weight), stored in zip(model.named_parameters(), again.parameters(), strict=True):
        step = weight.abs().amax(-1, keepdim=True) / 127  # 2^-8: to the nearest bfloat16
        error = 0.501 * step if eight_bit and weight.ndim == 2 else 2**-8 * weight.abs()
        assert ((stored - weight).abs() <= error).all(), key


def test_every_group_size_divides_every_layer():
    for name, (rows, columns) in load_config("tiny").linear_shapes().items():
        assert rows % 256 == 0 and columns % 256 == 0, name
    assert 5.5e6 < load_config("tiny").parameters() < 6.5e6


def test_the_tokenizer_keeps_every_character():
    tokenizer = load_tokenizer(HERE, 4096)
    assert tokenizer.decode(tokenizer.encode(TEXT, bos=False)) == TEXT
    assert len(TEXT.encode()) > 100_000


def test_held_out_modules_are_in_no_batch():
    """The recipe pops the held-out modules by these names, so they must be whole modules of it."""
    modules = corpus()
    assert set(HELD_OUT) <= set(modules)
    assert not any("test" in name.split("/") for name in modules)
