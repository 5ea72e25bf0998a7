"""What a Llama's layers do to the newest token of each row, in C++: norms, biases, rotation, gates
and sums in the same call as the products that they lie between. A step of 110 small ops spends a
fifth of its time between them when its weights have 4 bits.

    decode(…)                                   # tokens to logits, over caches in their dtype
    layers(…)                                   # all layers, where the ends are something else
    before_attention(…), after_attention(…)     # one, for other caches

It means what models.llama.Block means; numbers are rounded to x's dtype where its modules round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of x up to which this is for: more of them are a batch whose products take all the time.
FEW = 16

torch.library.define(
    "quantbench::cpu_decode",
    "(Tensor tokens, Tensor table, Tensor[] parts, Tensor(a!)[] caches, Tensor frequencies, "
    "Tensor position, bool wraps, float epsilon, int heads, int kv_heads, int width, Tensor norm, "
    "Tensor output) -> Tensor",
)
torch.library.define(
    "quantbench::cpu_layers",
    "(Tensor x, Tensor[] parts, Tensor(a!)[] caches, Tensor cos, Tensor sin, Tensor position, "
    "bool wraps, float epsilon, int heads, int kv_heads, int width) -> Tensor",
)
torch.library.define(
    "quantbench::cpu_before_attention",
    "(Tensor x, Tensor norm, float epsilon, Tensor weight, Tensor? bias, Tensor? query_norm, "
    "Tensor? key_norm, Tensor cos, Tensor sin, int heads, int kv_heads) "
    "-> Tensor",
)
torch.library.define(
    "quantbench::cpu_after_attention",
    "(Tensor y, Tensor x, Tensor wo, Tensor? wo_bias, Tensor norm, float epsilon, Tensor w13, "
    "Tensor? w13_bias, Tensor w2, Tensor? w2_bias, int width) -> Tensor",
)


@torch.library.register_fake("quantbench::cpu_decode")
def _(
    tokens,
    table,
    parts,
    caches,
    frequencies,
    position,
    wraps,
    epsilon,
    heads,
    kv_heads,
    width,
    norm,
    output,
):
    return table.new_empty((tokens.numel(), table.shape[0]))


@torch.library.register_fake("quantbench::cpu_layers")
def _(x, parts, caches, cos, sin, position, wraps, epsilon, heads, kv_heads, width):
    return x.new_empty(x.shape)


@torch.library.register_fake("quantbench::cpu_before_attention")
def _(
    x,
    norm,
    epsilon,
    weight,
    bias,
    query_norm,
    key_norm,
    cos,
    sin,
    heads,
    kv_heads,
):
    return x.new_empty((x.shape[0], (heads + 2 * kv_heads) * 2 * cos.numel()))


@torch.library.register_fake("quantbench::cpu_after_attention")
def _(y, x, wo, wo_bias, norm, epsilon, w13, w13_bias, w2, w2_bias, width):
    return x.new_empty(x.shape)


@dataclass(frozen=True)
class Norm:
    """An RMS norm: its weight, and what is added to the mean of squares."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class Linear:
    """A linear layer: a plain (N, K) weight or one that ops.cpu.linear has packed."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Layer:
    """One layer's weights, and its cache's keys and values (B, kv_heads, T, E) in x's dtype."""

    attention_norm: Norm
    wqkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    wo: Linear
    ffn_norm: Norm
    w13: Linear
    w2: Linear
    keys: Tensor
    values: Tensor

    def parts(self, missing: Tensor) -> list[Tensor]:
        """In the order of `Part` in step/op.cpp."""
        found = [
            self.attention_norm.weight,
            *(self.wqkv.weight, self.wqkv.bias),
            None if self.query_norm is None else self.query_norm.weight,
            None if self.key_norm is None else self.key_norm.weight,
            *(self.wo.weight, self.wo.bias),
            self.ffn_norm.weight,
            *(self.w13.weight, self.w13.bias),
            *(self.w2.weight, self.w2.bias),
        ]
        return [missing if part is None else part for part in found]


def before_attention(
    x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> Tensor:
    """Queries, keys and values (B, heads + 2 · kv_heads, E) of x (B, D), the first two rotated.

    cos and sin: E / 2 float32 numbers each, of the one position. All norms have one epsilon.
    """
    y = torch.ops.quantbench.cpu_before_attention(
        x,
        layer.attention_norm.weight,
        layer.attention_norm.epsilon,
        layer.wqkv.weight,
        layer.wqkv.bias,
        None if layer.query_norm is None else layer.query_norm.weight,
        None if layer.key_norm is None else layer.key_norm.weight,
        cos,
        sin,
        heads,
        kv_heads,
    )
    return y.view(len(x), heads + 2 * kv_heads, -1)


def after_attention(y: Tensor, x: Tensor, layer: Layer, width: int) -> Tensor:
    """A layer's output (B, D), of attention's y (B, heads · E) and the layer's input x (B, D).

    width: half the rows of w13, the gates' half first.
    """
    return torch.ops.quantbench.cpu_after_attention(
        y,
        x,
        layer.wo.weight,
        layer.wo.bias,
        layer.ffn_norm.weight,
        layer.ffn_norm.epsilon,
        layer.w13.weight,
        layer.w13.bias,
        layer.w2.weight,
        layer.w2.bias,
        width,
    )


def layers(
    x: Tensor,
    all_layers: list[Layer],
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    wraps: bool,
    heads: int,
    kv_heads: int,
    width: int,
) -> Tensor:
    """What the layers make of x (B, D) at `position` (1,), whose keys and values they store.

    wraps: whether a cache that is full begins anew, as those of sliding windows do. All norms have
    one epsilon. RuntimeError for a position that is not in the cache.
    """
    return torch.ops.quantbench.cpu_layers(
        x,
        *_tensors(all_layers),
        cos,
        sin,
        position,
        wraps,
        all_layers[0].attention_norm.epsilon,
        heads,
        kv_heads,
        width,
    )


def decode(
    tokens: Tensor,
    table: Tensor,
    all_layers: list[Layer],
    frequencies: Tensor,
    position: Tensor,
    wraps: bool,
    heads: int,
    kv_heads: int,
    width: int,
    norm: Norm,
    output: Linear,
) -> Tensor:
    """Logits (B, V) of the tokens after `tokens` (B, 1), which are at `position` (1,).

    table: the embedding, (V, D). frequencies: radians a position of each of a head's E / 2 pairs,
    float32. norm and output: what follows the layers; the output layer has no bias. The rest as
    for `layers`. RuntimeError for tokens that are not in the table, too.
    """
    return torch.ops.quantbench.cpu_decode(
        tokens,
        table,
        *_tensors(all_layers),
        frequencies,
        position,
        wraps,
        norm.epsilon,
        heads,
        kv_heads,
        width,
        norm.weight,
        output.weight,
    )


def _tensors(all_layers: list[Layer]) -> tuple[list[Tensor], list[Tensor]]:
    """Every layer's weights, and every layer's caches."""
    missing = all_layers[0].attention_norm.weight.new_empty(0)
    parts = [part for layer in all_layers for part in layer.parts(missing)]
    return parts, [cache for layer in all_layers for cache in (layer.keys, layer.values)]
