"""Llamas so small that compiling, saving and loading them takes no time."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantbench.generate import Generator
from quantbench.models import build
from quantbench.models.llama import Transformer
from quantbench.models.presets import PRESETS
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse

# Every width fits every scheme and format; queries are grouped.
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}


def small_model(window: int | None = None, layers: int = 2) -> Transformer:
    """Layers of four heads over two key heads of 32; random weights, 256 positions."""
    config = dataclasses.replace(
        PRESETS["Llama-3.2-1B"],
        name="small",
        dim=64,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_dim=64,
        vocab_size=100,
        max_position=256,
        sliding_window=window,
    )
    return build(config).eval().requires_grad_(False)


def on_kernel(
    model: Any, scheme: str = "none", dtype: torch.dtype = torch.float32, kernel: str = "cpu"
) -> Any:
    """The module, its linear layers quantized for a kernel."""
    quantizer = Quantizer(parse(scheme), torch.device("cpu"), dtype, kernel)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, quantizer(name, module))
    return model


def small_checkpoint(folder: Path, name: str = "config.json", **changes: Any) -> str:
    """Write SMALL, with changes, as config.json; give what --checkpoint_path calls it."""
    path = folder / name
    path.write_text(json.dumps(SMALL | changes))
    return f"dummy:{path}"


def by_steps(generator: Generator, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Logits (B, S, V) of tokens (B, S) that are decoded one by one, from position `start` on."""
    steps = [generator.forward(tokens[:, [i]], start + i) for i in range(tokens.shape[1])]
    return torch.cat(steps, 1)
