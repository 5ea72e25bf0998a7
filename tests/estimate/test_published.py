"""Six forward passes that were measured and published of an RTX A5000: their memory from first
principles, and the seconds of each by the shares of the card that the other five reached."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from scipy.optimize import least_squares

from quantbench.estimate.cards import A5000, card
from quantbench.estimate.counting import count_module
from quantbench.estimate.predict import CUBLAS_WORKSPACE, Request

BATCH, LENGTH = 16, 1024


def clm(dim, ffn, layers, heads):
    """A model of AICrossSim: three query heads for each key head."""
    return {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": False,
            "hidden_size": dim, "intermediate_size": ffn, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads // 3}  # fmt: skip


def opt(dim, layers):
    return {"model_type": "opt", "vocab_size": 50272, "tie_word_embeddings": True,
            "max_position_embeddings": 2048, "hidden_size": dim, "word_embed_proj_dim": dim,
            "ffn_dim": 4 * dim, "num_hidden_layers": layers, "num_attention_heads": 32}  # fmt: skip


# GiB and milliseconds on an NVIDIA RTX A5000: one forward pass in float16 by transformers, without
# a cache, with the logits of every position.
MEASURED = {
    "facebook/opt-1.3b": (5.53, 693.77, opt(2048, 24)),
    "facebook/opt-6.7b": (15.48, 3275.30, opt(4096, 32)),
    "AICrossSim/clm-60m": (6.16, 121.46, clm(384, 1408, 22, 6)),
    "AICrossSim/clm-200m": (6.50, 241.97, clm(768, 2688, 24, 12)),
    "AICrossSim/clm-400m": (6.87, 380.49, clm(960, 3328, 30, 15)),
    "AICrossSim/clm-1.1b": (8.17, 747.17, clm(1536, 5376, 32, 24)),
}


@pytest.fixture(scope="module")
def counts():
    transformers, found = pytest.importorskip("transformers"), {}
    for model, (_, _, fields) in MEASURED.items():
        config = transformers.AutoConfig.for_model(**fields)
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
            ids = torch.empty(BATCH, LENGTH, dtype=torch.long)
            found[model] = count_module(made.eval(), ids, use_cache=False)
    return found


def logits(fields):
    """Bytes. Those of Llama were float32, made from float16 at the end of the pass: transformers
    did so until 4.45."""
    return BATCH * LENGTH * fields["vocab_size"] * (4 if fields["model_type"] == "llama" else 2)


@pytest.mark.parametrize("model", MEASURED)
def test_memory_of_every_row_is_within_a_hundredth_of_a_gibibyte(model, counts):
    """One more tensor of the logits' size was made after the pass, when hidden states were gone."""
    (measured, _, fields), count = MEASURED[model], counts[model]
    ids = 8 * BATCH * LENGTH
    alive = max(count.peak_activation_bytes, 2 * logits(fields))
    peak = count.block_bytes + ids + CUBLAS_WORKSPACE + alive
    assert abs(peak / (1 << 30) - measured) < 0.01


def test_seconds_of_each_row_follow_from_those_of_the_other_five(counts):
    """The logits were read or written six times after the pass: a number that was chosen with these
    rows in view. The shares in cards.py are those that fit all six."""
    a5000 = card("A5000")
    request = Request("", batch=BATCH, prompt=LENGTH, new_tokens=0, precision="float16")

    def log_error(model, shares):
        _, milliseconds, fields = MEASURED[model]
        own = replace(A5000, arithmetic=math.exp(shares[0]), memory=math.exp(shares[1]))
        seconds = a5000.phase(request, counts[model], own).seconds
        seconds += 6 * logits(fields) / (own.memory * a5000.sheet.bandwidth)
        return math.log(seconds / milliseconds * 1e3)

    def fitted(models):
        return least_squares(lambda s: [log_error(m, s) for m in models], [-0.4, -0.4]).x

    shares = [math.log(A5000.arithmetic), math.log(A5000.memory)]
    assert fitted(MEASURED) == pytest.approx(shares, abs=1e-3)
    errors = [abs(log_error(m, fitted([n for n in MEASURED if n != m]))) for m in MEASURED]
    assert statistics.fmean(errors) < 0.035 and max(errors) < 0.06
