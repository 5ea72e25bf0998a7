"""A decoding step of a Llama in C++: norms, biases, rotation, gates and sums in the same call as
the products between which they lie. A step of 110 small ops spends a fifth of its time between them
when its weights have 4 bits.

    decode(…)                                   # tokens to logits, over caches in x's dtype
    layers(…)                                   # all layers, for a model whose ends are different
    before_attention(…), after_attention(…)     # one layer, around attention over any cache

It means what models.llama.Block means; numbers are rounded to x's dtype where its modules round.
B rows, D model width, E head width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_FUSED_ROWS = 16  # more rows are a batch whose products take nearly all of the time

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
class Linear:
    """A linear layer: a plain (N, K) weight, or one that ops.cpu.linear has packed."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Layer:
    """One layer's weights; norms are the weights of RMS norms."""

    attention_norm: Tensor
    wqkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    wo: Linear
    ffn_norm: Tensor
    w13: Linear  # the gates' rows first, then as many of the other half
    w2: Linear

    def parts(self) -> list[Tensor]:
        """In the order of `Part` in step/op.cpp; an empty tensor stands for what is not there."""
        missing = self.attention_norm.new_empty(0)
        parts = (
            self.attention_norm,
            *(self.wqkv.weight, self.wqkv.bias),
            *(self.query_norm, self.key_norm),
            *(self.wo.weight, self.wo.bias),
            self.ffn_norm,
            *(self.w13.weight, self.w13.bias),
            *(self.w2.weight, self.w2.bias),
        )
        return [missing if part is None else part for part in parts]


@dataclass(frozen=True)
class Shape:
    """What all layers have in common."""

    heads: int
    kv_heads: int
    width: int  # of the feed-forward layer
    epsilon: float  # of all norms
    wraps: bool = False  # whether a full cache begins anew, as a sliding window's does


def before_attention(x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, shape: Shape) -> Tensor:
    """Queries, keys and values (B, heads + 2 · kv_heads, E) of x (B, D), the first two rotated.

    cos and sin: E / 2 float32 numbers each, of the one position.
    """
    y = torch.ops.quantbench.cpu_before_attention(
        x,
        layer.attention_norm,
        shape.epsilon,
        layer.wqkv.weight,
        layer.wqkv.bias,
        layer.query_norm,
        layer.key_norm,
        cos,
        sin,
        shape.heads,
        shape.kv_heads,
    )
    return y.view(len(x), shape.heads + 2 * shape.kv_heads, -1)


def after_attention(y: Tensor, x: Tensor, layer: Layer, shape: Shape) -> Tensor:
    """A layer's output (B, D), of attention's y (B, heads · E) and the layer's input x (B, D)."""
    return torch.ops.quantbench.cpu_after_attention(
        y,
        x,
        layer.wo.weight,
        layer.wo.bias,
        layer.ffn_norm,
        shape.epsilon,
        layer.w13.weight,
        layer.w13.bias,
        layer.w2.weight,
        layer.w2.bias,
        shape.width,
    )


def layers(
    x: Tensor,
    parts: Sequence[Tensor],
    caches: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    shape: Shape,
) -> Tensor:
    """The last layer's output (B, D) of x (B, D) at `position` (1,), int64.

    parts: every layer's `Layer.parts`. caches: every layer's keys and values, (B or more, kv_heads,
    T, E) in x's dtype, into which the new ones are stored. Raises RuntimeError for a position that
    is not in the caches.
    """
    return torch.ops.quantbench.cpu_layers(
        x,
        parts,
        caches,
        cos,
        sin,
        position,
        shape.wraps,
        shape.epsilon,
        shape.heads,
        shape.kv_heads,
        shape.width,
    )


def decode(
    tokens: Tensor,
    table: Tensor,
    parts: Sequence[Tensor],
    caches: Sequence[Tensor],
    frequencies: Tensor,
    position: Tensor,
    shape: Shape,
    norm: Tensor,
    output: Tensor,
) -> Tensor:
    """Logits (B, V) of the tokens that follow `tokens` (B, 1), which are at `position` (1,).

    table: the embedding, (V, D). frequencies: radians a position of each of a head's E / 2 pairs,
    float32. norm: of what the layers give. output: the weight, plain or packed, that makes logits
    of it. The rest as for `layers`. Raises RuntimeError for tokens that are not in the table, too.
    """
    return torch.ops.quantbench.cpu_decode(
        tokens,
        table,
        parts,
        caches,
        frequencies,
        position,
        shape.wraps,
        shape.epsilon,
        shape.heads,
        shape.kv_heads,
        shape.width,
        norm,
        output,
    )
