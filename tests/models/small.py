"""A Llama so small that compiling it takes no time."""

import dataclasses

from models import build
from models.llama import Transformer
from models.presets import PRESETS


def small_model(window: int | None = None) -> Transformer:
    """Two layers, four heads over two key heads of 32; random weights, 256 positions."""
    config = dataclasses.replace(
        PRESETS["Llama-3.2-1B"],
        name="small",
        dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_dim=64,
        vocab_size=100,
        max_position=256,
        sliding_window=window,
    )
    return build(config).eval().requires_grad_(False)
