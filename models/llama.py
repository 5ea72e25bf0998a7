"""A Llama-family decoder in one file, read top-down.

It computes Llama 2, 3, 3.1 and 3.2, CodeLlama, Mistral and TinyLlama. Qwen2 adds biases to the
query/key/value projection, Qwen3 a norm of each query and key head. Phi-3, SmolLM3, Granite,
Ministral 3, OLMo 2 and 3, Arcee and GLM-4 differ in numbers, norms and rotations. Fields of
`ModelConfig` say which of these apply; the model's name decides nothing.

In two points the layout of the weights differs from Hugging Face's modules, without any effect on
the numbers: the query, key and value projections are one matrix, and so are the gate and up
projections. So a layer has four matrices instead of seven. Rotary embeddings have Hugging Face's
layout: element i of a head rotates with element i + E/2. Checkpoints in Meta's interleaved layout
are permuted when they are read.

Shapes: B rows, S positions, D model width, H query heads, K key/value heads, E head width,
F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.devices import stored_bytes
from quantbench.kv_cache.base import KVCache, LayerMemory
from quantbench.models.config import ModelConfig
from quantbench.ops.attend import attend
from quantbench.ops.kv import Scoring
from quantbench.ops.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from quantbench.models.split import Split


class Transformer(nn.Module):
    """The whole model: token ids in, logits out.

    It is a function of its weights, the tokens, their positions and the caches. Apart from what the
    caches store, no call affects a later one.
    """

    split: Split | None = None  # this rank's share (models/split.py); None: one process has all

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        ropes = [(s.rope_theta, s.rope_scaling, s.rotates, s.head_dim) for s in config.layers]
        self.rotated_as = [ropes.index(rope) for rope in ropes]  # the first layer like each
        self.tok_embeddings = embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(self.block(i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def block(self, number: int) -> Block:
        """Layer `number`, from 0."""
        return Block(self.config, number)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        caches: Sequence[LayerMemory] | None = None,
    ) -> Tensor:
        """Logits (B, S, V) for tokens (B, S).

        positions: (S,) int64, consecutive; 0, 1, … if not given. Those of a prompt are best on the
        CPU, wherever the model is: attention reads the first.
        caches: one for each layer. The tokens attend to what the caches hold, and are stored there.
        Without caches the tokens attend only to one another.
        """
        return self.logits(self.hidden(tokens, positions, caches))

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        caches: Sequence[LayerMemory] | None = None,
    ) -> Tensor:
        """The last layer's output (B, S, D), before the final norm; arguments as for `forward`."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device="cpu")
        x = self.embed(tokens)  # (B, S, D)
        beside = self.beside(tokens, x, positions)
        caches = caches or [None] * len(self.layers)
        for layer, more, cache in zip(self.layers, beside, caches, strict=True):
            x = layer(x, *more, positions, cache)
        return x

    def beside(self, tokens: Tensor, x: Tensor, positions: Tensor) -> Sequence[tuple[Any, ...]]:
        """What each layer takes between its input and the positions: cosines and sines, and
        whatever a family needs. tokens (B, S) and their embeddings x (B, S, D)."""
        return self.rotations(positions, tokens.device)

    def rotations(self, positions: Tensor, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """For each layer the cosines and sines of `rotation`."""
        angles = {i: rotation(self.config, positions, device, i) for i in set(self.rotated_as)}
        return [angles[i] for i in self.rotated_as]

    def compiles(self) -> bool:
        """Whether torch.compile makes one graph of a decoding step."""
        return True

    def prepare_to_compile(self) -> None:
        """Called once, before a step is compiled."""

    def unread_bytes(self, rows: int) -> float:
        """Bytes of the layers' weights that a decoding step of `rows` rows does not read."""
        return 0.0

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings (B, S, D) of tokens (B, S)."""
        x, factor = self.tok_embeddings(tokens), self.config.embedding_multiplier
        return x if factor == 1 else x * factor

    def logits(self, x: Tensor) -> Tensor:
        """Logits (…, V) from the last layer's output (…, D)."""
        return self.bounded(self.output(self.norm(x)))

    def bounded(self, logits: Tensor) -> Tensor:
        """Logits from what the output layer returns."""
        cap = self.config.logit_softcap
        if self.config.logits_divisor != 1:
            logits = logits / self.config.logits_divisor
        return logits if cap is None else (logits / cap).tanh() * cap


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)); with post_norms, x +
    norm(attention(norm(x))), and so on; without pre_norms, x + norm(attention(x))."""

    feed_forward: FeedForward

    def __init__(
        self, config: ModelConfig, number: int, feed_forward: nn.Module | None = None
    ) -> None:
        """number: the layer's, from 0. feed_forward: a FeedForward if not given."""
        super().__init__()
        post_norm = nn.RMSNorm if config.layers[number].post_norms else nn.Identity
        pre_norm = nn.RMSNorm if config.pre_norms else nn.Identity
        self.residual_multiplier = config.residual_multiplier
        self.attention_norm = pre_norm(config.dim, config.norm_eps)
        self.attention = Attention(config, number)
        self.attention_post_norm = post_norm(config.dim, config.norm_eps)
        self.ffn_norm = pre_norm(config.dim, config.norm_eps)
        width = config.layers[number].ffn_dim
        self.add_module("feed_forward", feed_forward or FeedForward(config, width))
        self.ffn_post_norm = post_norm(config.dim, config.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
        cache: LayerMemory | None = None,
    ) -> Tensor:  # fmt: skip
        """x (B, S, D) → (B, S, D); cos and sin (S, 1, E/2) as `rotation` gives them."""
        y = self.attention(self.attention_norm(x), cos, sin, positions, cache)
        x = torch.add(x, self.attention_post_norm(y), alpha=self.residual_multiplier)
        y = self.ffn_post_norm(self.feed_forward(self.ffn_norm(x)))
        return torch.add(x, y, alpha=self.residual_multiplier)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key/value heads. A gate, which wqkv gives
    behind values, multiplies what heads return."""

    attend: Callable[..., Tensor] = staticmethod(attend)

    def __init__(self, config: ModelConfig, number: int) -> None:
        """number: the layer's, from 0."""
        super().__init__()
        spec, heads = config.layers[number], config.heads_of(number)
        self.num_heads, self.num_kv_heads = config.num_heads, spec.kv_heads
        self.head_dim, self.window = spec.head_dim, spec.window
        self.scoring = Scoring(spec.scale, spec.softcap)
        self.heads = (*heads, *((config.num_heads,) if config.gated_attention else ()))
        self.wqkv = nn.Linear(config.dim, sum(self.heads) * self.head_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(
            config.num_heads * self.head_dim, config.dim, bias=config.attention_out_bias
        )
        self.q_norm = head_norm(config, config.num_heads, self.head_dim)
        self.k_norm = head_norm(config, heads[1], self.head_dim)
        scaling = spec.rope_scaling
        self.heated = scaling if scaling is not None and scaling.temperature else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: KVCache | None = None
    ) -> Tensor:
        """x (B, S, D) → (B, S, D); cos and sin (S, 1, E/2); positions (S,)."""
        B, S, _ = x.shape
        H, E = self.num_heads, self.head_dim
        heads = self.wqkv(x).view(B, S, sum(self.heads), E)
        query, key, value, *gate = heads.split(self.heads, dim=2)
        query = rotate(self.q_norm(query), cos, sin).transpose(1, 2)  # (B, H, S, E)
        if self.heated is not None:
            turns = positions.to(query.device) // self.heated.original_max_position
            heat = 1 + self.heated.temperature * turns.float().log1p()
            query = query * heat[:, None].type_as(query)
        key = rotate(self.k_norm(key), cos, sin).transpose(1, 2)  # (B, K, S, E)
        value = value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(positions, key, value)  # and all that came before
        y = self.attend(query, key, value, positions, self.window, self.scoring)  # (B, H, S, E)
        y = y.transpose(1, 2)
        if gate:
            y = y * gate[0].sigmoid()
        return self.projected(x, y.reshape(B, S, H * E))

    def projected(self, x: Tensor, y: Tensor) -> Tensor:
        """From the heads' outputs y (B, S, H · E) and the input x (B, S, D): (B, S, D)."""
        return self.wo(y)


def head_norm(config: ModelConfig, heads: int, head_dim: int) -> nn.Module:
    """The norm of queries or keys (B, S, heads, E); Identity without qk_norm or heads."""
    if not (config.qk_norm and heads):
        return nn.Identity()
    if config.joint_qk_norm:
        return JointNorm(heads, head_dim, config.norm_eps)
    return nn.RMSNorm(head_dim, config.norm_eps)


class JointNorm(nn.Module):
    """RMS norm of all heads of a position together, those of other ranks included (OLMo)."""

    def __init__(self, heads: int, head_dim: int, epsilon: float) -> None:
        """heads: this rank's."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads * head_dim))
        self.ranks, self.epsilon = ALONE, epsilon
        self.width = heads * head_dim

    def share(self, ranks: Ranks) -> None:
        """Norm the heads of all ranks together. Where several ranks have the same key head, all
        heads are counted equally often."""
        self.ranks = ranks
        self.width = self.weight.numel() * ranks.size

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, heads, E) → the same shape and dtype; computed in float32."""
        wide = x.float()
        squares = self.ranks.sum(wide.square().sum((-2, -1), keepdim=True))
        y = wide * (squares / self.width + self.epsilon).rsqrt()
        return (y * self.weight.view(x.shape[-2:])).type_as(x)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(gate) · up), where gate and up are the halves of w13's output; with
    squared_relu, w2(relu(w13(x))²)."""

    activation: Callable[[Tensor], Tensor] = staticmethod(F.silu)

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        """width: F; config.ffn_dim if not given."""
        super().__init__()
        width = width or config.ffn_dim
        self.gated = not config.squared_relu
        self.w13 = nn.Linear(config.dim, width * (1 + self.gated), bias=config.mlp_bias)
        self.w2 = nn.Linear(width, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, D) → (…, D)."""
        if not self.gated:
            return self.w2(F.relu(self.w13(x)).square())
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(self.activation(gate) * up)


def rotation(
    config: ModelConfig, positions: Tensor, device: torch.device, number: int = 0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (S, 1, E/2) float32, of layer `number`'s angles at positions (S,).

    They are computed in each step: E/2 products are cheaper than reading a table, and a context of
    131072 positions takes no memory.
    """
    on_device = positions.to(device, non_blocking=True)
    scaling = config.layers[number].rope_scaling
    length = 0 if scaling is None else on_device[-1] + 1
    angles = on_device[:, None, None].float() * frequencies(config, device, number, length)
    if scaling is None or scaling.attention_factor == 1:
        return angles.cos(), angles.sin()
    factors = rotation_factors(config, device, number)
    return angles.cos() * factors, angles.sin() * factors


def frequencies(
    config: ModelConfig, device: torch.device, number: int = 0, length: Tensor | int = 0
) -> Tensor:
    """Radians by which each pair of a head rotates per position in layer `number`, (E/2,)
    float32; 0 for pairs that do not rotate.

    length: positions of the text so far. As in transformers, longrope and dynamic depend on it:
    keys that are in the cache already stay as they were rotated.
    """
    spec = config.layers[number]
    width = config.rotary_dim or spec.head_dim
    exponents = torch.arange(0, width, 2, device=device) / width
    theta: float | Tensor = spec.rope_theta
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        beyond = torch.as_tensor(length, device=device) / scaling.original_max_position
        stretch = scaling.factor * beyond.clamp(min=1) - (scaling.factor - 1)
        theta = theta * stretch ** (width / (width - 2))
    rotating = 1.0 / theta**exponents
    if scaling is not None:
        from quantbench.models.rotary_scaling import scaled

        rotating = scaled(rotating, scaling, spec.rope_theta, length)
    if not spec.rotates:
        rotating = torch.zeros_like(rotating)
    return F.pad(rotating, (0, (spec.head_dim - width) // 2))


def rotation_factors(config: ModelConfig, device: torch.device, number: int = 0) -> Tensor:
    """What the cosines and sines of each pair of a head are multiplied by in layer `number`, (E/2,)
    float32; 1 for pairs that do not rotate."""
    spec = config.layers[number]
    width = config.rotary_dim or spec.head_dim
    factor = spec.rope_scaling.attention_factor if spec.rotates and spec.rope_scaling else 1.0
    factors = torch.full((width // 2,), factor, device=device)
    return F.pad(factors, (0, (spec.head_dim - width) // 2), value=1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head of x (B, S, heads, E).

    Computed in float32; the result has x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


# ---------------------------------------------------------------------------------- its weights


def embedding(rows: int, columns: int) -> nn.Embedding:
    """nn.Embedding(rows, columns) of uniform numbers: for normal ones on the meta device torch
    would import torch._dynamo, which takes as long as importing torch."""
    weight = torch.empty(rows, columns).uniform_(-1, 1)
    return nn.Embedding.from_pretrained(weight, freeze=False)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights but the embedding table's. Everything that a quantized weight stores
    counts: packed values, scales, zero points."""
    modules = (m for m in model.modules() if not isinstance(m, nn.Embedding))
    return sum(stored_bytes(p) for module in modules for p in module.parameters(recurse=False))


def step_bytes(model: Transformer, rows: int = 1) -> int:
    """Bytes of weights that one decoding step of so many rows reads: of the experts of a mixture
    those that are chosen."""
    return weight_bytes(model) - round(model.unread_bytes(rows))
