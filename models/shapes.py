"""What a config alone tells of a model: shapes of linear layers, the number of parameters."""

import torch
from torch import nn

from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.models.registry import build

_BEYOND_LLAMA = (
    *("pre_norms", "post_norms", "rotary_dim", "no_rope_layers", "squared_relu"),
    *("embedding_multiplier", "residual_multiplier", "logits_divisor", "attention_sinks"),
    *("full_head_dim", "full_kv_heads", "value_is_key", "shared_layers", "layer_input_dim"),
    *("gated_attention", "recurrent_layers"),
)


def beyond_llama(config: ModelConfig) -> str | None:
    """The first part that neither Llama, Mistral, Qwen nor their mixtures have; None: none."""
    for name in _BEYOND_LLAMA:
        if getattr(config, name) != getattr(ModelConfig, name):
            return name
    table = config.rope_scaling is None or config.rope_scaling.kind == "llama3"
    return None if table else "rope_scaling"


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Every linear layer's (out_features, in_features), by its name in the model."""
    shapes: dict[str, tuple[int, int]] = {}
    layers: list[list[tuple[str, nn.Linear]]] = [[] for _ in config.layers]
    model, kinds = _one_of_each_kind(config)
    for layer, numbers in zip(model.layers, kinds, strict=True):
        for number in numbers:
            layers[number] = _linears(layer)
    for number, linears in enumerate(layers):
        shapes |= {f"layers.{number}.{name}": _shape(linear) for name, linear in linears}
    rest = (pair for pair in _linears(model) if not pair[0].startswith("layers."))
    return shapes | {name: _shape(linear) for name, linear in rest}


def _linears(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def _shape(linear: nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _one_of_each_kind(config: ModelConfig) -> tuple[Transformer, list[list[int]]]:
    """The model with a layer of each kind, on the meta device; and the layers of each kind."""
    with torch.device("meta"):
        return build(config.one_of_each_kind()), config.kinds_of_layers()


def parameters(config: ModelConfig) -> int:
    """The number of parameters. A tied output is the embedding, and counts once."""
    model, kinds = _one_of_each_kind(config)
    tied = model.output.weight.numel() if config.tie_embeddings else 0
    repeated = sum(
        (len(numbers) - 1) * sum(parameter.numel() for parameter in layer.parameters())
        for layer, numbers in zip(model.layers, kinds, strict=True)
    )
    return sum(parameter.numel() for parameter in model.parameters()) - tied + repeated
