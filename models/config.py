"""What an architecture is, as data: `ModelConfig`, presets by exact name, and Hugging Face's config.json."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from errors import CheckpointError, UsageError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's "llama3" rotary scaling."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides what the model computes. Widths are in elements."""

    name: str
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_position: int  # the context it was trained for; caches may be larger
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
