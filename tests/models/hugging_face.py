"""Small random models of every family, made by Hugging Face transformers: the oracle of our own."""

from pathlib import Path

import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # short, so that the scaling shows in a short text
}
LLAMAS = {
    "llama-2": LlamaConfig(**SIZES, num_key_value_heads=4, rms_norm_eps=1e-5),
    "llama-3": LlamaConfig(**SIZES, num_key_value_heads=2, rope_theta=500000.0),
    "llama-3.1": LlamaConfig(
        **SIZES, num_key_value_heads=2, rope_theta=500000.0, rope_scaling=LLAMA_3_1
    ),
    "llama-3.2": LlamaConfig(
        **SIZES,
        num_key_value_heads=1,
        rope_theta=500000.0,
        rope_scaling=LLAMA_3_1 | {"factor": 32.0},
        tie_word_embeddings=True,
    ),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "code-llama": LlamaConfig(**SIZES, rope_theta=1000000.0),
    "mistral-0.1": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8),
    "mistral-0.3": MistralConfig(
        **SIZES, num_key_value_heads=2, sliding_window=None, rope_theta=1000000.0
    ),
    "tiny-llama": LlamaConfig(**SIZES, num_key_value_heads=1),
    "qwen-2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen-3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
NARROW = EXPERTS | {"moe_intermediate_size": 32}
MIXTURES = {
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=6),
    "qwen-3-moe": Qwen3MoeConfig(
        **SIZES, **NARROW, num_key_value_heads=2, head_dim=32, norm_topk_prob=True
    ),
    "qwen-3-moe-dense": Qwen3MoeConfig(
        **SIZES,
        **NARROW,
        num_key_value_heads=2,
        head_dim=16,
        mlp_only_layers=[2],
        attention_bias=True,
    ),
    "qwen-2-moe": Qwen2MoeConfig(
        **SIZES,
        **NARROW,
        num_key_value_heads=2,
        decoder_sparse_step=2,
        shared_expert_intermediate_size=48,
    ),
    "olmoe": OlmoeConfig(**SIZES, **EXPERTS, num_key_value_heads=2),
}
GEMMA = SIZES | {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8}
# The scale of scores is not that of the head's width; scores and logits reach their caps.
LAYERS_DIFFER = {
    "gemma-2": Gemma2Config(
        **GEMMA, query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma-3": Gemma3TextConfig(
        **GEMMA | {"num_hidden_layers": 7}, query_pre_attn_scalar=32
    ),
    "qwen-2-windows": Qwen2Config(
        **SIZES, num_key_value_heads=2, use_sliding_window=True, max_window_layers=1,
        sliding_window=8,
    ),
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 16}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8],
    "long_factor": [1.5, 2.0, 3.0, 4.5, 6.0, 8.0, 11.0, 15.0],
}  # fmt: skip
RELATIVES = {
    "phi-3": Phi3Config(**SIZES, num_key_value_heads=2),
    "phi-3-longrope": Phi3Config(
        **SIZES, num_key_value_heads=2, rope_parameters=LONGROPE,
        original_max_position_embeddings=16,
    ),
    "phi-4-mini": Phi3Config(
        **SIZES, num_key_value_heads=2, rope_parameters={"rope_theta": 1e4, "rope_type": "default",
                                                         "partial_rotary_factor": 0.75}
    ),
    "smol-lm-3": SmolLM3Config(**SIZES, num_key_value_heads=2, no_rope_layers=[1, 0, 1]),
    "granite": GraniteConfig(
        **SIZES, num_key_value_heads=2, embedding_multiplier=3.0, logits_scaling=2.0,
        residual_multiplier=0.3, attention_multiplier=0.2
    ),
    "olmo-2": Olmo2Config(**SIZES, num_key_value_heads=2),
    "olmo-3": Olmo3Config(
        **SIZES | {"num_hidden_layers": 4}, num_key_value_heads=2, sliding_window=8
    ),
    "arcee": ArceeConfig(**SIZES, num_key_value_heads=2, head_dim=16, rope_parameters=YARN),
    "glm-4": Glm4Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "ministral-3": Ministral3Config(
        **SIZES, num_key_value_heads=2, head_dim=16, sliding_window=None,
        rope_parameters=YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "linear": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "dynamic": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
}  # fmt: skip
FAMILIES = LLAMAS | MIXTURES | LAYERS_DIFFER | RELATIVES


def model(family: str, seed: int = 0, **changes):
    """A model whose every parameter is random: large enough that attention is far from uniform,
    biases and norms included, which Hugging Face would start at 0 and 1."""
    torch.manual_seed(seed)
    config = FAMILIES[family]
    config = type(config)(**config.to_dict() | changes) if changes else config
    config._attn_implementation = "eager"
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.25)
    return made.requires_grad_(False)


def saved(family: str, folder: Path, **options) -> tuple[Path, torch.nn.Module]:
    """The same, written by save_pretrained into folder/family; and the model itself."""
    made = model(family)
    made.save_pretrained(folder / family, **options)
    return folder / family, made
