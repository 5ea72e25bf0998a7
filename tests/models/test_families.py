"""Every family against Hugging Face's models: without a cache and through one, by modules and by a
step in C++; and rotary tables of every kind against transformers' own."""

import dataclasses
import random

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantbench import models
from quantbench.generate import Generator
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.llama import frequencies
from quantbench.models.loading import load_model
from tests.models.hugging_face import (
    CAPS,
    FAMILIES,
    LLAMAS,
    MIXTURES,
    OF_STATES,
    assert_near,
    drawn,
    model,
    saved,
)
from tests.ops.instructions import NEEDS_COMPILER

LENGTH, ORIGINAL = 40, 16  # past every window and every original context
WINDOW = {"sliding_window": 8}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
CONTEXT = {"max_position_embeddings": 64, "original_max_position_embeddings": ORIGINAL}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
HEATED = YARN | {
    "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
LONG = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **FACTORS}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3,
    "logits_scaling": 4.0,
}  # fmt: skip
# Bounds that gates reach; a layer of each kind, and one more.
GPT_OSS = WINDOW | {
    "num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 1.5,
    "swiglu_alpha": 1.3, "rope_parameters": YARN | {"truncate": False, "rope_theta": 1.5e5},
}  # fmt: skip
BY_KIND = {
    "full_attention": YARN | {"rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
GEMMA_3 = {
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA_4 = WINDOW | {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 32, "hidden_size_per_layer_input": 0,
}  # fmt: skip
# As E2B: embeddings of each layer, the last two with the keys and values of the third and fourth.
GEMMA_4_SHARED = GEMMA_4 | {
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}  # fmt: skip
# As 31B: values are keys.
GEMMA_4_EQUAL = GEMMA_4 | {
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0,
    "use_bidirectional_attention": "vision",
}  # fmt: skip
GEMMA_4_EXPERTS = GEMMA_4 | {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
PARTIAL = {
    "rope_parameters": LONG | {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5,
    "hidden_size": 64, "head_dim": 16,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3, "num_hidden_layers": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
DELTA_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 16, "num_hidden_layers": 4,
}  # fmt: skip
CONV, ATTENTION = "conv", "full_attention"
# transformers' name, fields, and what cpu-step says of a family that it does not compute; None: it
# computes it.
ROWS = {
    "phi3": ("phi3", WINDOW, None),
    "phi3 longrope": ("phi3", CONTEXT | {"rope_parameters": LONG}, "rotary scaling, longrope"),
    "phi4 partial": ("phi3", {"partial_rotary_factor": 0.75}, None),
    "phi4 longrope": ("phi3", CONTEXT | PARTIAL, "rotary scaling, longrope"),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}, None),
    "granite": ("granite", GRANITE, None),
    "granite4": ("granitemoehybrid",
                 GRANITE | {"layer_types": ["full_attention"] * 2, "num_local_experts": 0,
                            "shared_intermediate_size": 96, "position_embedding_type": "rope",
                            "mamba_n_heads": 8},
                 None),
    "granite4 unrotated": ("granitemoehybrid",
                           GRANITE | {"layer_types": ["full_attention"] * 2,
                                      "num_local_experts": 0, "shared_intermediate_size": 64,
                                      "mamba_n_heads": 8},
                           None),
    "gpt_oss": ("gpt_oss", GPT_OSS, "a GptOss"),
    "ministral3": ("ministral3", {"rope_parameters": HEATED}, "rotary scaling, yarn"),
    "olmo2": ("olmo2", {}, None),
    "olmo3": ("olmo3", WINDOW | {"num_hidden_layers": 5, "rope_parameters": BY_KIND}, None),
    "arcee": ("arcee", {"mlp_bias": True}, None),
    "glm4": ("glm4", {}, None),
    "qwen3.5": ("qwen3_5_text", DELTA, "a Qwen35"),
    "qwen3.5 experts": ("qwen3_5_moe_text", DELTA | DELTA_EXPERTS, "a Qwen35"),
    "qwen3-next": (
        "qwen3_next", DELTA | DELTA_EXPERTS | {"mlp_only_layers": [1]}, "a Qwen35"),
    "lfm2": ("lfm2", {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "conv_L_cache": 4,
                      "conv_bias": True, "block_multiple_of": 8}, "a Lfm2"),
    "lfm2 experts": (
        "lfm2_moe",
        {"num_hidden_layers": 5, "layer_types": [CONV, CONV, ATTENTION, CONV, ATTENTION],
         "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "num_dense_layers": 1, "routed_scaling_factor": 1.5},
        "a Lfm2"),
    "lfm2 no bias": (
        "lfm2_moe",
        {"num_hidden_layers": 3, "layer_types": [CONV, ATTENTION, CONV], "num_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 0,
         "use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True},
        "a Lfm2"),
    "gemma2": ("gemma2", WINDOW | {"query_pre_attn_scalar": 24} | CAPS, None),
    "gemma3": ("gemma3_text", WINDOW | {"num_hidden_layers": 7} | GEMMA_3, None),
    "gemma4 shared": ("gemma4_text", GEMMA_4_SHARED, "a Gemma4"),
    "gemma4 equal": ("gemma4_text", GEMMA_4_EQUAL, "a Gemma4"),
    "gemma4 experts": ("gemma4_text", GEMMA_4_EXPERTS, "a Gemma4"),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}, None),
    "llama dynamic": (
        "llama",
        {"max_position_embeddings": ORIGINAL,
         "rope_parameters": {"rope_type": "dynamic", "factor": 3.0}},
        "rotary scaling, dynamic",
    ),
    "llama yarn": ("llama", {"rope_parameters": YARN}, None),
}  # fmt: skip


GEMMA_4S = {name for name in ROWS if name.startswith("gemma4")}


def made(family: str, **changes):
    """A random model, of drawn sizes if it is of ROWS."""
    if family in FAMILIES:
        return model(family, **changes)
    kind, more, _ = ROWS[family]
    width = 8 if "longrope" in family else random.choice((8, 16))
    sizes = {
        "hidden_size": 4 * width, "head_dim": width, "num_attention_heads": 4,
        "num_key_value_heads": random.choice((1, 2, 4)),
        "intermediate_size": 32 * random.randint(1, 3),
        "num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 256,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    made = drawn(AutoConfig.for_model(kind, **sizes | more | changes))
    if family in GEMMA_4S:  # whose scores are not scaled: drawn ones would magnify every rounding
        for layer in made.model.layers:
            layer.self_attn.q_norm.weight.mul_(0.25)
    for scalar in scalars(made):
        scalar.uniform_(0.5, 1.5)
    return made


def scalars(theirs):
    """Numbers that checkpoints hold and transformers has no parameters for: Gemma 4's, LFM2's."""
    ends = "layer_scalar", "expert_bias"
    return [value for name, value in theirs.named_buffers() if name.endswith(ends)]


def by_pieces(theirs, tokens, chunk):
    """Hugging Face's logits with its cache: some rotations depend on the length so far."""
    cache, logits = None, []
    for piece in tokens.split(chunk, 1):
        out = theirs(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("dtype, digits", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_is_as_close_as_its_rounding(dtype, digits, tmp_path):
    path, theirs = saved("tiny-llama", tmp_path)
    tokens = torch.arange(3, 23)[None]
    expected = theirs.double()(tokens).logits
    half = load_model(str(path), precision=dtype)
    # some thirty roundings on the way, each of relative size `digits`, mostly cancelling
    error = (half(tokens).double() - expected).norm() / expected.norm()
    assert error <= 30 * digits


@pytest.mark.parametrize("family", [*FAMILIES, *ROWS])
def test_the_logits_are_hugging_faces(family, tmp_path):
    """With a cache and without one. What a wrong rotation costs is far more than the tolerance."""
    theirs = made(family)
    theirs.save_pretrained(tmp_path)
    ours, tokens = load_model(str(tmp_path)), torch.randint(96, (2, LENGTH))
    share = OF_STATES if ours.config.recurrent else 1e-4
    count = sum(p.numel() for p in [*theirs.parameters(), *scalars(theirs)])
    assert count == ours.config.parameters()
    for chunk in (LENGTH, 7, 1):
        expected = by_pieces(theirs, tokens, chunk)
        generator = Generator(ours, 2, LENGTH, decoder="modules")
        starts = range(0, LENGTH, chunk)
        pieces = zip(starts, tokens.split(chunk, 1), strict=True)
        logits = torch.cat([generator.forward(piece, start) for start, piece in pieces], 1)
        assert_near(logits, expected, share)
    expected = by_pieces(theirs, tokens, LENGTH)
    assert_near(ours(tokens), expected, share)
    if family in FAMILIES:
        ours.config = dataclasses.replace(ours.config, rope_theta=ours.config.rope_theta * 3)
        assert (ours(tokens) - expected).abs().max() > 1e-2 * expected.abs().max()


@NEEDS_COMPILER
@pytest.mark.parametrize("family", [*LLAMAS, *MIXTURES, *ROWS])
def test_in_cpp_or_on_modules_with_the_reason(family, tmp_path):
    theirs, refusal = made(family), ROWS[family][2] if family in ROWS else None
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(96, (2, LENGTH))
    generator = Generator(models.load(str(tmp_path)), 2, LENGTH)
    if refusal is None:
        assert generator.decoder.name == "cpu-step", generator.decoder.reason
    else:
        assert generator.decoder.name == "modules" and refusal in generator.decoder.reason
    expected = by_pieces(theirs, tokens, 1)
    logits = torch.cat([generator.forward(tokens[:, [i]], i) for i in range(LENGTH)], 1)
    assert_near(logits, expected, OF_STATES if generator.model.config.recurrent else 1e-4)


SCALINGS = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": LONG,
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, 400])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_tables_are_transformers(kind, length):
    """longrope through Phi-3, which rotates a drawn part of each head; the others through Llama."""
    share, family = random.choice((0.5, 1.0)), "phi3" if kind == "longrope" else "llama"
    print("share", share)  # shown on failure
    width = int(8 / share) if family == "phi3" else 32
    parts = {"rope_type": kind, "rope_theta": 1e4, **SCALINGS[kind]}
    sizes = {"hidden_size": 4 * width, "num_attention_heads": 4, "max_position_embeddings": 256}
    if family == "phi3":
        sizes |= {"original_max_position_embeddings": ORIGINAL}
        parts |= {"partial_rotary_factor": share}
    theirs = AutoConfig.for_model(family, **sizes, rope_parameters=parts)
    table, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
    ours = from_hugging_face(theirs.to_dict(), "tables")
    found = frequencies(ours, torch.device("cpu"), 0, length)
    assert torch.allclose(found[: len(table)], table, rtol=1e-5) and not found[len(table) :].any()
    assert ours.rope_scaling.attention_factor == pytest.approx(factor)
