"""What a quantized cache costs: perplexity of the embedded model, teacher-forced through it."""

import math

import pytest
import torch
import torch.nn.functional as F

from kv_cache import CACHES
from models.checkpoint import load_model
from models.sources import EMBEDDED
from models.tokenizer import load_tokenizer

TOKENS, CONTEXT = 4096, 512


@pytest.fixture(scope="module")
def text():
    words = (EMBEDDED / "heldout.txt").read_text()
    return torch.tensor(load_tokenizer(EMBEDDED, 4096).encode(words)[:TOKENS])


def nats(cache, text):
    """Every token's, in windows that fill a cache: a query sees even its own key as it is kept, so
    one window at once gives what token by token gives."""
    model = load_model("tiny", precision=torch.bfloat16)
    model.setup_caches(1, CONTEXT, CACHES[cache])
    found = []
    with torch.no_grad():
        for window in text.split(CONTEXT):
            logits = model(window[None], torch.arange(len(window)))[0, :-1]
            found.append(F.cross_entropy(logits.float(), window[1:], reduction="none"))
    return torch.cat(found).double()


@pytest.mark.parametrize("cache, percent", [("int8", 0.3), ("fp8", 1.0), ("int4", 5.0)])
def test_perplexity_through_a_quantized_cache(text, cache, percent):
    difference = nats(cache, text) - nats("dense", text)
    assert abs(math.expm1(difference.mean().item())) * 100 < percent
