"""Activation-aware scaling (AWQ: Lin et al. 2023, arXiv:2306.00978), at no cost at run time.

Columns of a weight that large inputs meet are multiplied by s before they are rounded, and the
inputs divided by s: so these columns err less. The division is folded into what makes the inputs:

    norm → qkv, norm → gate and up      the norm's weight
    v → o                               rows of v, if every query head has its own value head
    up → down                           rows of up, in experts too

where that gives the same function. Other layers (o behind shared value heads, the experts' first
matrices, the output) are quantized as they are. s = (root mean square of the input) ** exponent;
the exponent is the one of EXPONENTS that leaves the least ‖(W - Ŵ)X‖.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from quantbench.models.gemma import OffsetNorm
from quantbench.models.llama import Attention, Block, FeedForward

EXPONENTS = tuple(i / 10 for i in range(11))
WIDEST = 1e4  # the largest scale over the least
Divide = Callable[[Tensor], Tensor]  # s (K,) -> the s that it divides by, once it is rounded


def scale_inputs(
    block: nn.Module,
    hessians: Mapping[str, Tensor],
    rounded: Callable[[str, Tensor], Tensor],
    dtype: torch.dtype,
) -> None:
    """Scale the layers of a block in float32, in place.

    hessians: XXᵀ (K, K) by the name of each layer that is to be scaled. rounded: (a layer's name,
    weight (N, K)) -> what the scheme makes of the weight. dtype: of the norms when the model runs.
    """
    for name, divide in _pairs(block, dtype):
        if name not in hessians:
            continue
        layer, hessian = block.get_submodule(name), hessians[name]
        assert isinstance(layer, nn.Linear)
        size = hessian.diagonal().sqrt()
        size = size.clamp(min=size.max() / WIDEST)
        if size.isfinite().all() and size.max() > 0:  # else no token or no number reaches it
            scales = [size**exponent for exponent in EXPONENTS]
            scales = [s / (s.max() * s.min()).sqrt() for s in scales]
            losses = [_loss(layer.weight.data, s, hessian, partial(rounded, name)) for s in scales]
            layer.weight.data *= divide(scales[losses.index(min(losses))])


def _loss(weight: Tensor, s: Tensor, hessian: Tensor, rounded: Callable[[Tensor], Tensor]) -> float:
    """‖(W - Ŵ)X‖² where W · s is rounded."""
    error = rounded(weight * s) / s - weight
    return float(((error @ hessian) * error).sum())


def _pairs(block: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Divide]]:
    """Layers by their names in the block, each with what can divide its inputs."""
    networks = [name for name, module in block.named_modules() if type(module) is FeedForward]
    if isinstance(block, Block):
        attention = block.attention
        # Others have a gate as well as wqkv, or norm their values.
        usual = all(
            getattr(type(attention), name) is getattr(Attention, name)
            for name in ("forward", "projected")
        )
        if usual and isinstance(block.attention_norm, nn.RMSNorm):
            yield ("attention.wqkv", _of_norm(block.attention_norm, dtype))
        if isinstance(block.ffn_norm, nn.RMSNorm) and "feed_forward" in networks:
            yield ("feed_forward.w13", _of_norm(block.ffn_norm, dtype))
        if usual and attention.num_heads == attention.num_kv_heads:
            rows = slice(-attention.num_heads * attention.head_dim, None)
            yield ("attention.wo", _of_rows(attention.wqkv, rows))
    for name in networks:
        network = block.get_submodule(name)
        if isinstance(network, FeedForward) and network.gated:
            yield (f"{name}.w2", _of_rows(network.w13, slice(network.w2.in_features, None)))


def _of_rows(layer: nn.Linear, rows: slice) -> Divide:
    def divide(s: Tensor) -> Tensor:
        layer.weight.data[rows] /= s[:, None]
        if layer.bias is not None:
            layer.bias.data[rows] /= s
        return s

    return divide


def _of_norm(norm: nn.RMSNorm, dtype: torch.dtype) -> Divide:
    offset = 1.0 if isinstance(norm, OffsetNorm) else 0.0

    def divide(s: Tensor) -> Tensor:
        gain = norm.weight.data + offset
        norm.weight.data = (gain / s - offset).to(dtype).float()
        remaining = norm.weight.data + offset
        return torch.where(remaining * gain > 0, gain / remaining, s)

    return divide
