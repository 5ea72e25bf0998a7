"""Small random models of every family, made by Hugging Face transformers: the oracle of our own.
Their folders can be edited."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

from quantbench.generate import Generator

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


def config(model_type: str, **fields):
    return AutoConfig.for_model(model_type, **SIZES | fields)


def llama_3(kv_heads: int, **fields):
    return config("llama", num_key_value_heads=kv_heads, rope_theta=500000.0, **fields)


LLAMAS = {
    "llama-2": config("llama", num_key_value_heads=4, rms_norm_eps=1e-5),
    "llama-3": llama_3(2),
    "llama-3.1": llama_3(2, rope_scaling=dict(LLAMA_3_1)),  # transformers adds to what it is given
    "llama-3.2": llama_3(1, rope_scaling=LLAMA_3_1 | {"factor": 32.0}, tie_word_embeddings=True),
    "llama-biased": config("llama", attention_bias=True, mlp_bias=True),
    "code-llama": config("llama", rope_theta=1000000.0),
    "mistral-0.1": config("mistral", num_key_value_heads=2, sliding_window=8),
    "mistral-0.3": config(
        "mistral", num_key_value_heads=2, sliding_window=None, rope_theta=1000000.0
    ),
    "tiny-llama": config("llama", num_key_value_heads=1),
    "qwen-2": config("qwen2", num_key_value_heads=2),
    "qwen-3": config("qwen3", num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
}
MIXTURE = {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2}
NARROW = MIXTURE | {"moe_intermediate_size": 32}
MIXTURES = {
    "mixtral": config("mixtral", num_key_value_heads=2, num_local_experts=6),
    "qwen-3-moe": config("qwen3_moe", **NARROW, head_dim=32, norm_topk_prob=True),
    "qwen-3-moe-dense": config(
        "qwen3_moe", **NARROW, head_dim=16, mlp_only_layers=[2], attention_bias=True
    ),
    "qwen-2-moe": config(
        "qwen2_moe", **NARROW, decoder_sparse_step=2, shared_expert_intermediate_size=48
    ),
    "olmoe": config("olmoe", **MIXTURE),
}
GEMMA = {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8}
# The scale of scores is not that of the head's width; scores and logits reach their caps.
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
LAYERS_DIFFER = {
    "gemma-2": config("gemma2", **GEMMA, **CAPS, query_pre_attn_scalar=24),
    "gemma-3": config("gemma3_text", **GEMMA, num_hidden_layers=7, query_pre_attn_scalar=32),
    "qwen-2-windows": config(
        "qwen2",
        num_key_value_heads=2,
        use_sliding_window=True,
        max_window_layers=1,
        sliding_window=8,
    ),
}
FAMILIES = LLAMAS | MIXTURES | LAYERS_DIFFER
TOKENS = torch.arange(5, 35)[None]


def model(family: str, seed: int = 0, **changes):
    """A model whose every parameter is random: large enough that attention is far from uniform,
    biases and norms included, which Hugging Face would start at 0 and 1."""
    torch.manual_seed(seed)
    described = FAMILIES[family]
    return drawn(type(described)(**described.to_dict() | changes) if changes else described)


def drawn(described):
    """The model of this config, with weights drawn as those of `model`."""
    described._attn_implementation = "eager"
    made = AutoModelForCausalLM.from_config(described, dtype=torch.float32).eval()
    for name, parameter in made.requires_grad_(False).named_parameters():
        parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.25)
    return made


def saved(family: str, folder: Path, **options) -> tuple[Path, torch.nn.Module]:
    """The same, written by save_pretrained into folder/family; and the model itself."""
    made = model(family)
    made.save_pretrained(folder / family, **options)
    return folder / family, made


def read_by_transformers(folder: Path, compressed: bool = False) -> torch.nn.Module:
    """The floats of a folder. compressed: one in a format of compressed-tensors."""
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if compressed else {}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **how
    )


def turned(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys with rotary pairs side by side, as Meta and llama.cpp have them;
    Hugging Face has halves of heads behind one another."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape).contiguous()


def logits(model, tokens=TOKENS):
    """Our model's, through its caches and kernels."""
    return Generator(model, len(tokens), 64).forward(tokens, 0)


def assert_near(found, expected, share=1e-4):
    """Logits. Sums of float32 in another order are off by less than this share of the largest."""
    assert (found - expected).abs().max() <= share * expected.abs().max()


# Share for models with states. Random gates amplify what rounding leaves: of fourteen such models
# transformers' own logits in float32 are off from those in float64 by 3e-6 to 8e-5 of the largest.
OF_STATES = 3e-4


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@contextmanager
def rewritten(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of model.safetensors, which is written anew with what becomes of them."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
