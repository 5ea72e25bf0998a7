"""The embedded models are real: they predict text that they never saw, bad quantization hurts the
dense one, and the mixture of experts routes it unevenly."""

import json
import lzma
import math

import pytest
import sentencepiece
import torch
import torch.nn.functional as F

from quantbench.models.formats import EMBEDDED
from quantbench.models.loading import load_config, load_model
from quantbench.models.tokenizer import load_tokenizer
from tests.models.hugging_face import assert_near, read_by_transformers
from tests.models.test_mixtral import routed

HERE = EMBEDDED
TEXT = (HERE / "heldout.txt").read_text()
MOE = HERE.parent / "tiny_moe"
RECORD, MOE_RECORD = (json.loads((at / "training.json").read_text()) for at in (HERE, MOE))
PIECES = sentencepiece.SentencePieceProcessor(str(HERE / "tokenizer.model"))


@pytest.fixture(scope="module")
def tokens():
    return PIECES.encode(TEXT)


def bits_per_byte(name, rows):
    """What a model needs for rows (n, 1025) of tokens, each from those before it in its row."""
    logits = load_model(name)(rows[:, :-1]).flatten(0, 1)
    nats = F.cross_entropy(logits.float(), rows[:, 1:].flatten(), reduction="sum")
    size = sum(len(PIECES.decode(row[1:].tolist()).encode()) for row in rows)
    return nats.item() / math.log(2) / size


@pytest.mark.parametrize("folder", [HERE, MOE], ids=lambda folder: folder.name)
def test_hugging_face_reads_the_folder_and_gets_the_same_logits(tokens, folder):
    theirs, row = read_by_transformers(folder, folder == MOE), torch.tensor([tokens[:100]])
    assert_near(load_model(folder.name)(row), theirs(row).logits)


def test_the_tokenizer_keeps_every_character():
    tokenizer = load_tokenizer(HERE, 4096)
    assert tokenizer.decode(tokenizer.encode(TEXT, bos=False)) == TEXT
    assert len(TEXT.encode()) > 100_000


def test_the_mixture_is_small_and_what_the_recipe_says():
    config = load_config("tiny_moe")
    assert (MOE / "model.safetensors").stat().st_size <= 12e6
    assert (config.mixture.num_experts, config.mixture.experts_per_token) == (8, 2)
    assert len({(at / "tokenizer.model").read_bytes() for at in (HERE, MOE)}) == 1


def test_held_out_text_is_predicted_better_than_by_xz_and_by_the_mixture_no_worse(tokens):
    """Four windows, evenly spread. Their text may be a quarter harder than the whole, of which the
    recorded figures are; the two models read the same, so that a difference of 3 % is no chance."""
    windows = torch.tensor(tokens).unfold(0, 1025, len(tokens) // 4)
    bits = {name: bits_per_byte(name, windows) for name in ("tiny", "tiny_moe")}
    assert bits["tiny"] == pytest.approx(RECORD["curve"][-1]["bits_per_byte"], rel=0.25)
    assert bits["tiny_moe"] == pytest.approx(MOE_RECORD["bits_per_byte"], rel=0.25)
    assert bits["tiny_moe"] <= 1.03 * bits["tiny"]
    xz = 8 * len(lzma.compress(TEXT.encode(), preset=9)) / len(TEXT.encode())
    assert bits["tiny"] < xz == pytest.approx(RECORD["xz_bits_per_byte"], rel=1e-3)


def test_every_layer_uses_all_experts_and_not_equally(tokens):
    for of_layer in routed(load_model("tiny_moe"), torch.tensor([tokens[:1000]])):
        shares = of_layer.flatten().bincount(minlength=8) / of_layer.numel()
        # 2000 even assignments would scatter by 0.007 around 0.125
        assert shares.min() > 0 and shares.max() - shares.min() > 0.03
