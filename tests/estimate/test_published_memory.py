"""Peak memory from first principles, beside what was measured and published of one card."""

import pytest
import torch

from quantbench.estimate.counting_configs import count_config
from quantbench.estimate.predict import CUBLAS_WORKSPACE

BATCH, LENGTH = 16, 1024


def clm(dim, ffn, layers, heads):
    """A model of AICrossSim: three query heads for each key head."""
    return {
        "model_type": "llama",
        "vocab_size": 49152,
        "tie_word_embeddings": False,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3,
    }


def opt(dim, layers):
    return {
        "model_type": "opt",
        "vocab_size": 50272,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "hidden_size": dim,
        "word_embed_proj_dim": dim,
        "ffn_dim": 4 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
    }


# GiB on an NVIDIA RTX A5000: one forward pass in float16 by transformers, without a cache, with the
# logits of every position.
MEASURED = {
    "facebook/opt-1.3b": (5.53, opt(2048, 24)),
    "facebook/opt-6.7b": (15.48, opt(4096, 32)),
    "AICrossSim/clm-60m": (6.16, clm(384, 1408, 22, 6)),
    "AICrossSim/clm-200m": (6.50, clm(768, 2688, 24, 12)),
    "AICrossSim/clm-400m": (6.87, clm(960, 3328, 30, 15)),
    "AICrossSim/clm-1.1b": (8.17, clm(1536, 5376, 32, 24)),
}


@pytest.mark.parametrize("model", MEASURED)
def test_memory_of_every_row_is_within_a_hundredth_of_a_gibibyte(model):
    """The logits of Llama were float32, made from float16 at the end of the pass: transformers did
    so until 4.45. One more tensor of their size was made after it, when hidden states were gone."""
    pytest.importorskip("transformers")
    measured, fields = MEASURED[model]
    count = count_config(
        fields, BATCH, LENGTH, logits="all", precision=torch.float16, cached=False, name=model
    )
    logits = BATCH * LENGTH * fields["vocab_size"] * (4 if fields["model_type"] == "llama" else 2)
    ids = 8 * BATCH * LENGTH
    alive = max(count.peak_activation_bytes, 2 * logits)
    peak = count.block_bytes + ids + CUBLAS_WORKSPACE + alive
    assert abs(peak / (1 << 30) - measured) < 0.01
