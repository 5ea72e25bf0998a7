"""The KV caches of a model's layers, and the kernel that attends over them."""

import torch

from quantbench.kv_cache.base import KVCache
from quantbench.models.config import ModelConfig
from quantbench.ops import attention


def attention_of(
    kind: type[KVCache], config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> attention.Choice:
    """The kernel for a model's attention over such caches, and why it is no faster one."""
    group = config.num_heads // config.num_kv_heads
    how = config.layers[0].scale, config.layers[0].softcap
    return attention.choose(device, config.head_dim, group, dtype, kind.format, *how)


def of_layers(
    kind: type[KVCache],
    config: ModelConfig,
    rows: int,
    positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kernel: str,
    layers: int | None = None,
) -> list[KVCache]:
    """An empty cache for each layer. kernel: a name of `attention_of`. layers: all if not given."""
    shape = rows, config.num_kv_heads, positions, config.head_dim
    return [
        kind(*shape, dtype, device, spec.window, kernel)
        for spec in config.layers[: layers or config.num_layers]
    ]
