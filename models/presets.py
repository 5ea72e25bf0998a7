"""Architectures of published models, by their exact names.

preset("Llama-3.2-1B")      # what dummy:Llama-3.2-1B is built from
"""

import difflib
import math
import re
from dataclasses import replace
from typing import Any

from quantbench.errors import UsageError
from quantbench.models.config import Mixture, ModelConfig, RopeScaling
from quantbench.models.recurrent import Recurrent


def _llama(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    context: int,
    **settings: Any,
) -> ModelConfig:
    head_dim = settings.pop("head_dim", dim // heads)
    if "mixture" in settings:
        settings["architecture"] = "mixtral"
    return ModelConfig("", dim, layers, heads, kv_heads, head_dim, ffn, vocab, context, **settings)


def _yarn(factor: float, original: int, **settings: Any) -> RopeScaling:
    """Yarn with the attention factor that its paper gives (Peng et al., arXiv 2309.00071, §3.4)."""
    settings.setdefault("attention_factor", 0.1 * math.log(factor) + 1)
    return RopeScaling(factor, original_max_position=original, kind="yarn", **settings)


def _qwen_3_5(dim: int, layers: int, heads: int, ffn: int, values: int, **more: Any) -> ModelConfig:
    """values: value heads of each layer without attention."""
    return _llama(
        dim, layers, heads, 4, ffn, 248320, 262144, head_dim=256, rotary_dim=64, norm_eps=1e-6,
        rope_theta=10000000.0, qk_norm=True, gated_attention=True, architecture="qwen3_5",
        recurrent=Recurrent(4, 16, values, 128, 128),
        recurrent_layers=tuple(i for i in range(layers) if (i + 1) % 4), **more,
    )  # fmt: skip


_LLAMA_3 = {"rope_theta": 500000.0}
_LLAMA_3_1 = _LLAMA_3 | {"rope_scaling": RopeScaling(8.0)}
_LLAMA_3_2 = _LLAMA_3 | {"rope_scaling": RopeScaling(32.0), "tie_embeddings": True}
_QWEN = {"rope_theta": 1000000.0, "norm_eps": 1e-6}
_QWEN_2 = _QWEN | {"qkv_bias": True}
_QWEN_3 = _QWEN | {"qk_norm": True, "head_dim": 128}
_MIXTRAL = {"rope_theta": 1000000.0}
_OLMO_2 = {
    "rope_theta": 500000.0, "norm_eps": 1e-6, "qk_norm": True, "joint_qk_norm": True,
    "pre_norms": False, "post_norms": True,
}  # fmt: skip
_GRANITE = {
    "rope_theta": 10000000.0, "tie_embeddings": True, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "attention_scale": 0.0078125, "logits_divisor": 16.0,
}  # fmt: skip
_GEMMA_2 = {  # as google/gemma_pytorch's gemma/config.py has it
    "norm_eps": 1e-6, "tie_embeddings": True, "sliding_window": 4096, "post_norms": True,
    "attention_softcap": 50.0, "logit_softcap": 30.0, "architecture": "gemma",
}  # fmt: skip
_GEMMA_3 = {
    "norm_eps": 1e-6, "tie_embeddings": True, "post_norms": True, "qk_norm": True, "head_dim": 256,
    "attention_scale": 256**-0.5, "rope_theta": 1000000.0, "window_rope_theta": 10000.0,
    "architecture": "gemma",
}  # fmt: skip

# https://github.com/huggingface/transformers: models/gemma4/convert_gemma4_weights.py
_GEMMA_4 = {
    "norm_eps": 1e-6, "tie_embeddings": True, "post_norms": True, "qk_norm": True, "head_dim": 256,
    "full_head_dim": 512, "attention_scale": 1.0, "rope_theta": 1000000.0,
    "window_rope_theta": 10000.0, "logit_softcap": 30.0, "architecture": "gemma4",
    "rope_scaling": RopeScaling(1.0, kind="proportional", share=0.25),
}  # fmt: skip


def _small_gemma_4(layers: int, shared: int, period: int) -> dict[str, Any]:
    """Each layer has an embedding, and the last layers share keys and values."""
    return _GEMMA_4 | {
        "sliding_window": 512, "full_layers": tuple(range(period - 1, layers, period)),
        "shared_layers": tuple(range(layers - shared, layers)), "layer_input_dim": 256,
        "layer_input_layers": layers, "layer_input_vocab": 262144,
    }  # fmt: skip


# From the config.json with which each model was published on the Hugging Face hub. All names in a
# row have the same architecture.
# fmt: off
_ROWS = {
    ("Llama-2-7b-hf", "Llama-2-7b-chat-hf", "Llama-2-7b", "Llama-2-7b-chat"):
        _llama(4096, 32, 32, 32, 11008, 32000, 4096),
    ("Llama-2-13b-hf", "Llama-2-13b-chat-hf", "Llama-2-13b", "Llama-2-13b-chat"):
        _llama(5120, 40, 40, 40, 13824, 32000, 4096),
    ("Llama-2-70b-hf", "Llama-2-70b-chat-hf", "Llama-2-70b", "Llama-2-70b-chat"):
        _llama(8192, 80, 64, 8, 28672, 32000, 4096),
    ("Meta-Llama-3-8B", "Meta-Llama-3-8B-Instruct"):
        _llama(4096, 32, 32, 8, 14336, 128256, 8192, **_LLAMA_3),
    ("Meta-Llama-3-70B", "Meta-Llama-3-70B-Instruct"):
        _llama(8192, 80, 64, 8, 28672, 128256, 8192, **_LLAMA_3),
    ("Meta-Llama-3.1-8B", "Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B", "Llama-3.1-8B-Instruct"):
        _llama(4096, 32, 32, 8, 14336, 128256, 131072, **_LLAMA_3_1),
    ("Meta-Llama-3.1-70B", "Meta-Llama-3.1-70B-Instruct", "Llama-3.1-70B",
     "Llama-3.1-70B-Instruct", "Llama-3.3-70B-Instruct"):
        _llama(8192, 80, 64, 8, 28672, 128256, 131072, **_LLAMA_3_1),
    ("Llama-3.2-1B", "Llama-3.2-1B-Instruct"):
        _llama(2048, 16, 32, 8, 8192, 128256, 131072, **_LLAMA_3_2),
    ("Llama-3.2-3B", "Llama-3.2-3B-Instruct"):
        _llama(3072, 28, 24, 8, 8192, 128256, 131072, **_LLAMA_3_2),
    ("CodeLlama-7b-Python-hf",):
        _llama(4096, 32, 32, 32, 11008, 32000, 16384, rope_theta=1000000.0),
    ("Meta-Llama-3.1-405B", "Meta-Llama-3.1-405B-Instruct", "Llama-3.1-405B",
     "Llama-3.1-405B-Instruct"):
        _llama(16384, 126, 128, 8, 53248, 128256, 131072, **_LLAMA_3_1),
    ("Mistral-Small-24B-Base-2501",):
        _llama(5120, 40, 32, 8, 32768, 131072, 32768, head_dim=128, rope_theta=1e8),
    ("Mistral-Small-3.2-24B-Instruct-2506",):  # without the part that sees
        _llama(5120, 40, 32, 8, 32768, 131072, 131072, head_dim=128, rope_theta=1e9),
    ("Mistral-7B-v0.1", "Mistral-7B-Instruct-v0.1"):
        _llama(4096, 32, 32, 8, 14336, 32000, 32768, sliding_window=4096),
    ("Mistral-7B-v0.3", "Mistral-7B-Instruct-v0.3"):
        _llama(4096, 32, 32, 8, 14336, 32768, 32768, rope_theta=1000000.0),
    ("TinyLlama-1.1B-Chat-v1.0",):
        _llama(2048, 22, 32, 4, 5632, 32000, 2048),
    ("Qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct"):
        _llama(896, 24, 14, 2, 4864, 151936, 32768, tie_embeddings=True, **_QWEN_2),
    ("Qwen2.5-7B",):
        _llama(3584, 28, 28, 4, 18944, 152064, 131072, **_QWEN_2),
    ("Qwen2.5-7B-Instruct",):
        _llama(3584, 28, 28, 4, 18944, 152064, 32768, **_QWEN_2),
    ("Qwen3-0.6B",):
        _llama(1024, 28, 16, 8, 3072, 151936, 40960, tie_embeddings=True, **_QWEN_3),
    ("Qwen3-8B",):
        _llama(4096, 36, 32, 8, 12288, 151936, 40960, **_QWEN_3),
    ("Phi-3-mini-4k-instruct",):
        _llama(3072, 32, 32, 32, 8192, 32064, 4096, sliding_window=2047),
    ("phi-4",):
        _llama(5120, 40, 40, 10, 17920, 100352, 16384, rope_theta=250000.0),
    ("SmolLM3-3B",):
        _llama(2048, 36, 16, 4, 11008, 128256, 65536, no_rope_layers=tuple(range(3, 36, 4)),
               rope_theta=5000000.0, norm_eps=1e-6, tie_embeddings=True),
    ("AFM-4.5B",):
        _llama(2560, 36, 20, 4, 18432, 128005, 65536, squared_relu=True,
               rope_scaling=_yarn(20.0, 4096)),
    ("GLM-4-9B-0414",):
        _llama(4096, 40, 32, 2, 13696, 151552, 32768, rotary_dim=64, qkv_bias=True,
               post_norms=True),
    ("Ministral-3-3B-Base-2512", "Ministral-3-3B-Instruct-2512"):  # without the part that sees
        _llama(3072, 26, 32, 8, 9216, 131072, 262144, head_dim=128, tie_embeddings=True,
               rope_theta=1000000.0, rope_scaling=_yarn(16.0, 16384, temperature=0.1,
                                  attention_factor=1.0)),
    ("OLMo-2-1124-7B", "OLMo-2-1124-7B-Instruct"):
        _llama(4096, 32, 32, 32, 11008, 100352, 4096, **_OLMO_2),
    ("Olmo-3-1025-7B", "Olmo-3-7B-Instruct"):
        _llama(4096, 32, 32, 32, 11008, 100278, 65536, sliding_window=4096,
               full_layers=tuple(range(3, 32, 4)), window_rope_theta=500000.0,
               rope_scaling=_yarn(8.0, 8192), **_OLMO_2),
    ("granite-3.3-8b-instruct",):
        _llama(4096, 40, 32, 8, 12800, 49159, 131072, **_GRANITE),
    ("gemma-2-2b", "gemma-2-2b-it"):
        _llama(2304, 26, 8, 4, 9216, 256000, 8192, head_dim=256, attention_scale=256**-0.5,
               full_layers=tuple(range(1, 26, 2)), **_GEMMA_2),
    ("gemma-2-9b", "gemma-2-9b-it"):
        _llama(3584, 42, 16, 8, 14336, 256000, 8192, head_dim=256, attention_scale=256**-0.5,
               full_layers=tuple(range(1, 42, 2)), **_GEMMA_2),
    ("gemma-2-27b", "gemma-2-27b-it"):
        _llama(4608, 46, 32, 16, 36864, 256000, 8192, head_dim=128, attention_scale=144**-0.5,
               full_layers=tuple(range(1, 46, 2)), **_GEMMA_2),
    ("gemma-3-270m", "gemma-3-270m-it"):
        _llama(640, 18, 4, 1, 2048, 262144, 32768, sliding_window=512,
               full_layers=tuple(range(5, 18, 6)), **_GEMMA_3),
    ("gemma-3-1b-pt", "gemma-3-1b-it"):
        _llama(1152, 26, 4, 1, 6912, 262144, 32768, sliding_window=512,
               full_layers=tuple(range(5, 26, 6)), **_GEMMA_3),
    # Gemma 4 and Muse-Glimmer without the parts that see and hear.
    ("gemma-4-E2B", "gemma-4-E2B-it"):
        _llama(1536, 35, 8, 1, 6144, 262144, 131072, shared_ffn_dim=12288,
               **_small_gemma_4(35, 20, 5)),
    ("gemma-4-E4B", "gemma-4-E4B-it"):
        _llama(2560, 42, 8, 2, 10240, 262144, 131072, **_small_gemma_4(42, 18, 6)),
    ("gemma-4-31B", "gemma-4-31B-it"):
        _llama(5376, 60, 32, 16, 21504, 262144, 262144, sliding_window=1024,
               full_layers=tuple(range(5, 60, 6)), full_kv_heads=4, value_is_key=True, **_GEMMA_4),
    ("gemma-4-26B-A4B", "gemma-4-26B-A4B-it"):
        replace(_llama(2816, 30, 16, 8, 2112, 262144, 262144, sliding_window=1024,
                       mixture=Mixture(128, 8, 704, shared_dim=2112), full_kv_heads=2,
                       full_layers=tuple(range(5, 30, 6)), value_is_key=True, **_GEMMA_4),
                architecture="gemma4"),
    ("Muse-Glimmer-30B",):
        _llama(6656, 52, 32, 2, 19968, 202048, 131072, head_dim=128, sliding_window=2048,
               full_layers=tuple(range(3, 52, 4)), no_rope_layers=tuple(range(3, 52, 4)),
               rope_theta=500000.0, logit_softcap=20.0, logits_divisor=26.0**0.5, post_norms=True,
               architecture="muse_glimmer"),
    ("Mixtral-8x7B-v0.1", "Mixtral-8x7B-Instruct-v0.1"):
        _llama(4096, 32, 32, 8, 14336, 32000, 32768, mixture=Mixture(8, 2, 14336), **_MIXTRAL),
    ("Mixtral-8x22B-v0.1",):
        _llama(6144, 56, 48, 8, 16384, 32000, 65536, mixture=Mixture(8, 2, 16384), **_MIXTRAL),
    ("Mixtral-8x22B-Instruct-v0.1",):
        _llama(6144, 56, 48, 8, 16384, 32768, 65536, mixture=Mixture(8, 2, 16384), **_MIXTRAL),
    ("Qwen3-30B-A3B",):
        _llama(2048, 48, 32, 4, 6144, 151936, 40960, mixture=Mixture(128, 8, 768), **_QWEN_3),
    ("Qwen1.5-MoE-A2.7B", "Qwen1.5-MoE-A2.7B-Chat"):
        _llama(2048, 24, 16, 16, 5632, 151936, 8192,
               mixture=Mixture(60, 4, 1408, normalized=False, shared_dim=5632), **_QWEN_2),
    ("Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B"):  # without the part that sees
        _qwen_3_5(5120, 64, 24, 17408, 48),
    ("LFM2-1.2B", "LFM2.5-1.2B-Base", "LFM2.5-1.2B-Instruct"):
        _llama(2048, 16, 32, 8, 8192, 65536, 128000, rope_theta=1000000.0, qk_norm=True,
               tie_embeddings=True, architecture="lfm2", recurrent=Recurrent(3),
               recurrent_layers=tuple(i for i in range(16) if i not in (2, 5, 8, 10, 12, 14))),
    ("OLMoE-1B-7B-0924", "OLMoE-1B-7B-0924-Instruct"):
        _llama(2048, 16, 16, 16, 1024, 50304, 4096,
               mixture=Mixture(64, 8, 1024, normalized=False), qk_norm=True, joint_qk_norm=True),
}
# fmt: on
PRESETS = {name: replace(row, name=name) for names, row in _ROWS.items() for name in names}


def preset(name: str) -> ModelConfig:
    """The preset of this name, with or without an organisation before it (meta-llama/Llama-3.2-1B)
    and Meta's name, which people leave out of Meta-Llama-3-8B.

    Raises UsageError, with the nearest names, if there is none.
    """
    own = name.rsplit("/", 1)[-1]
    config = PRESETS.get(own) or PRESETS.get(f"Meta-{own}")
    if config is None:
        plain = {preset: re.sub("[^a-z0-9]", "", preset.lower()) for preset in PRESETS}
        part = re.sub("[^a-z0-9]", "", own.lower())
        near = [preset for preset, letters in plain.items() if part and part in letters][:3]
        near = near or difflib.get_close_matches(own, PRESETS, n=3, cutoff=0.5)
        known = ", ".join(near or [names[0] for names in _ROWS])
        raise UsageError(
            f"{name!r} is no preset; {'nearest' if near else 'presets'}: {known} (or give the path "
            "of a config.json: dummy:PATH)"
        )
    return config
