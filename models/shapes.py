"""What a config alone tells of a model: shapes of linear layers, the number of parameters."""

import torch

from quantbench.models.config import ModelConfig
from quantbench.models.registry import build

_BEYOND_LLAMA = (
    *("pre_norms", "post_norms", "rotary_dim", "no_rope_layers", "squared_relu"),
    *("embedding_multiplier", "residual_multiplier", "logits_divisor", "attention_sinks"),
    *("full_head_dim", "full_kv_heads", "value_is_key", "shared_layers", "layer_input_dim"),
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
    D, P, shapes = config.dim, config.layer_input_dim, dict[str, tuple[int, int]]()
    for i, spec in enumerate(config.layers):
        E, heads = spec.head_dim, config.heads_of(i)
        layer = {"attention.wqkv": (sum(heads) * E, D), "attention.wo": (D, heads[0] * E)}
        for name, width in _feed_forwards(config, i).items():
            layer |= {
                f"{name}.w13": (width * (2 - config.squared_relu), D),
                f"{name}.w2": (D, width),
            }
        if P:
            layer |= {"input_gate": (P, D), "input_projection": (D, P)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["output"] = (config.vocab_size, D)
    return shapes | ({"layer_projection": (config.layer_input_layers * P, D)} if P else {})


def _feed_forwards(config: ModelConfig, layer: int) -> dict[str, int]:
    """The widths of a layer's feed-forward networks, by their names in the layer."""
    experts = config.mixture
    if experts is None or config.is_dense(layer):
        return {"feed_forward": config.layers[layer].ffn_dim}
    widths = {f"feed_forward.experts.{i}": experts.expert_dim for i in range(experts.num_experts)}
    return widths | ({"feed_forward.shared": experts.shared_dim} if experts.shared_dim else {})


def parameters(config: ModelConfig) -> int:
    """The number of parameters. A tied output is the embedding, and counts once."""
    with torch.device("meta"):
        model = build(config.one_of_each_kind())
    tied = model.output.weight.numel() if config.tie_embeddings else 0
    repeated = sum(
        (len(numbers) - 1) * sum(parameter.numel() for parameter in layer.parameters())
        for layer, numbers in zip(model.layers, config.kinds_of_layers(), strict=True)
    )
    return sum(parameter.numel() for parameter in model.parameters()) - tied + repeated
