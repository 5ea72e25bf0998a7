"""A decoding step of a Llama in C++, fused: norms, biases, rotation, gates and sums are in the same
op as the matrix products. As 110 small ops, a step with 4-bit weights spends a fifth of its time
between them.

    decode(…)                                   # tokens to logits
    layers(…)                                   # all layers, if the embedding or output differs
    before_attention(…), after_attention(…)     # one layer, around attention over a cache that only
                                                # Python fills

The ops compute what models.llama.Block computes, and round to x's dtype where its modules round.
`decode` and `layers` also take layers with a mixture of experts (models/mixtral.py).
B rows, D model width, E head width, V vocabulary. Ranks that share memory exchange in the ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_FUSED_ROWS = 16  # above this, products take nearly all of the time and fusing gains nothing

torch.library.define(
    "quantbench::cpu_decode",
    "(Tensor tokens, Tensor table, Tensor[] parts, Tensor(a!)[] caches, str format, "
    "Tensor frequencies, Tensor position, bool wraps, float epsilon, int heads, int kv_heads, "
    "int width, Tensor norm, Tensor output, int ranks, int[] vocabularies) -> Tensor",
)
torch.library.define(
    "quantbench::cpu_layers",
    "(Tensor x, Tensor[] parts, Tensor(a!)[] caches, str format, Tensor cos, Tensor sin, "
    "Tensor position, bool wraps, float epsilon, int heads, int kv_heads, int width, int ranks) "
    "-> Tensor",
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
    "Tensor? w13_bias, Tensor w2, Tensor? w2_bias, int width, int ranks) -> Tensor",
)


@torch.library.register_fake("quantbench::cpu_decode")
def _(
    tokens,
    table,
    parts,
    caches,
    format,
    frequencies,
    position,
    wraps,
    epsilon,
    heads,
    kv_heads,
    width,
    norm,
    output,
    ranks,
    vocabularies,
):
    return table.new_empty((tokens.numel(), sum(vocabularies) if ranks else table.shape[0]))


@torch.library.register_fake("quantbench::cpu_layers")
def _(x, parts, caches, format, cos, sin, position, wraps, epsilon, heads, kv_heads, width, ranks):
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
def _(y, x, wo, wo_bias, norm, epsilon, w13, w13_bias, w2, w2_bias, width, ranks):
    return x.new_empty(x.shape)


@dataclass(frozen=True)
class Linear:
    """A linear layer."""

    weight: Tensor  # unquantized (N, K), or packed by ops.cpu.linear.pack
    bias: Tensor | None  # (N,)


@dataclass(frozen=True)
class Networks:
    """Feed-forward networks of one width."""

    w13: Sequence[Tensor]  # of each network, all plain (2 · width, D) or all packed alike
    w2: Sequence[Tensor]  # of each network, all plain (D, width) or all packed alike
    width: int  # 0 where there are none

    def head(self) -> list[int]:
        """The width, then the bytes of each network's packed w13 and w2; 0 for plain ones."""
        stored = [w[0] if w else None for w in (self.w13, self.w2)]
        packed = [w is not None and w.dtype == torch.uint8 for w in stored]
        sizes = [
            w.numel() if p and w is not None else 0 for w, p in zip(stored, packed, strict=True)
        ]
        return [self.width, *sizes]

    def places(self) -> list[int]:
        """The addresses of each network's w13 and w2."""
        return [w.data_ptr() for pair in zip(self.w13, self.w2, strict=True) for w in pair]


@dataclass(frozen=True)
class Moving:
    """A layer's experts that come and go between two tiers of memory (experts/fused.py)."""

    turn: Tensor  # `Turn` of step/experts.h and its lists, int64; of all layers together
    used: Tensor  # (X,) int64: when each expert was last used, by the turn's clock
    layer: int  # by which `Turn::ask` knows this layer

    def head(self) -> list[int]:
        """The addresses, and the layer."""
        return [self.turn.data_ptr(), self.used.data_ptr(), self.layer]


@dataclass(frozen=True)
class Experts:
    """A layer's mixture of experts, each with two matrices like a feed-forward network's."""

    router: Tensor  # (X, D), in the activations' dtype
    networks: Networks  # X of them; of experts that come and go, one that is like all of them
    chosen: int  # experts of a token
    normalized: bool  # whether their weights add up to 1
    shared: Networks  # the one that all tokens go through, or none
    shared_gate: Tensor | None  # (D,): its sigmoid says how much a token takes from that one
    moving: Moving | None = None  # None: all experts stay where they are

    def table(self) -> Tensor:
        """Where the experts' matrices lie, as step/experts.h reads it: int64. It is valid as long
        as these matrices are. Where experts come and go, none of them is there yet."""
        head = [self.chosen, int(self.normalized), *self.networks.head(), *self.shared.head()]
        places = self.networks.places()
        if self.moving:
            places = [0] * (2 * len(self.router))
        moving = self.moving.head() if self.moving else [0, 0, 0]
        return torch.tensor([*head, *moving, *places, *self.shared.places()])


# Numbers before an expert's addresses in `Experts.table`.
TABLE_HEAD = 11


@dataclass(frozen=True)
class Layer:
    """One layer's weights; norms are the weights of RMS norms."""

    attention_norm: Tensor
    wqkv: Linear
    query_norm: Tensor | None  # (E,) of each head, or (heads · E,) of all heads together
    key_norm: Tensor | None  # (E,) or (kv_heads · E,)
    wo: Linear
    ffn_norm: Tensor
    # The rows of the gate, then those of the up projection. With experts: the router, and in the
    # place of a bias the shared expert's gate.
    w13: Linear
    w2: Linear  # with experts their table

    def parts(self) -> list[Tensor]:
        """The tensors in the order of `Part` in step/op.cpp; an empty one for each that is None."""
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
    """The sizes that all layers share; this rank's, where several share the model."""

    heads: int  # query heads
    kv_heads: int  # key/value heads
    width: int  # of the feed-forward network
    epsilon: float  # of all norms
    wraps: bool = False  # whether a full cache overwrites its oldest slot, for a sliding window
    ranks: int = 0  # handle of ops/cpu/ranks.py, of the ranks to sum over; 0: this process is alone


@dataclass(frozen=True)
class Caches:
    """The KV caches of all layers; a step stores the new keys and values there."""

    # For each layer those of the keys, then those of the values: codes, and the scale if the format
    # has one, each (B or more, kv_heads, T, …).
    tensors: Sequence[Tensor]
    format: str  # one of ops.kv.WRITTEN_BY_STEPS


def before_attention(x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, shape: Shape) -> Tensor:
    """Rotated queries, rotated keys, and values of x (B, D): (B, heads + 2 · kv_heads, E).

    cos and sin: E / 2 float32 numbers each, for the position of all rows.
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
    """A layer's output (B, D), from attention's output y (B, heads · E) and the layer's input x
    (B, D)."""
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
        shape.ranks,
    )


def layers(
    x: Tensor,
    parts: Sequence[Tensor],
    caches: Caches,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    shape: Shape,
) -> Tensor:
    """The last layer's output (B, D), from the first layer's input x (B, D) at `position` (1,)
    int64.

    parts: the `Layer.parts` of all layers. cos and sin: as for before_attention. Raises
    RuntimeError for a position that is not in the caches, and when another rank has ended or
    failed.
    """
    return torch.ops.quantbench.cpu_layers(
        x,
        parts,
        caches.tensors,
        caches.format,
        cos,
        sin,
        position,
        shape.wraps,
        shape.epsilon,
        shape.heads,
        shape.kv_heads,
        shape.width,
        shape.ranks,
    )


def decode(
    tokens: Tensor,
    table: Tensor,
    parts: Sequence[Tensor],
    caches: Caches,
    frequencies: Tensor,
    position: Tensor,
    shape: Shape,
    norm: Tensor,
    output: Tensor,
    vocabularies: Sequence[int] = (),
) -> Tensor:
    """Logits (B, V) of the next tokens, after `tokens` (B, 1) int64 at `position` (1,) int64.

    table: the embedding, (V, D). frequencies: radians per position of each of a head's E / 2 pairs,
    float32. norm: the weight of the final norm. output: the weight of the output layer, unquantized
    or packed. vocabularies: how many tokens each rank has in its table and output, if `shape` has
    ranks; V is their sum then. The other arguments are as for `layers`. Raises RuntimeError as
    `layers` does, and for tokens that are not in the table.
    """
    return torch.ops.quantbench.cpu_decode(
        tokens,
        table,
        parts,
        caches.tensors,
        caches.format,
        frequencies,
        position,
        shape.wraps,
        shape.epsilon,
        shape.heads,
        shape.kv_heads,
        shape.width,
        norm,
        output,
        shape.ranks,
        list(vocabularies),
    )
