"""The text models of Gemma 4 (Google 2026, https://ai.google.dev/gemma/docs/core).

They differ from models.gemma.Gemma in these points, each of which a config may leave out: norms
multiply by their weight alone; layers without a window have heads of another width and number,
whose values may be the keys' projection; the last layers read the keys and values of earlier ones;
values are normed; each layer adds an embedding of the token of its own, and multiplies what it
returns by a number; and beside the feed-forward network there may be a mixture of experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.kv_cache.base import KVCache
from quantbench.models.config import ModelConfig
from quantbench.models.gemma import Scale, gelu
from quantbench.models.llama import Attention, Block, embedding, rotate
from quantbench.models.mixtral import Mixtral

Stored = dict[int | None, tuple[Any, Any]]  # keys and values to attend to, by the layer's window


class Gemma4(Mixtral):
    """The whole model; see models.llama.Transformer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if P := config.layer_input_dim:
            width = config.layer_input_layers * P
            self.layer_embeddings = embedding(config.layer_input_vocab, width)
            self.layer_projection = nn.Linear(config.dim, width, bias=False)
            self.layer_norm = nn.RMSNorm(P, config.norm_eps)

    def block(self, number: int) -> Block:
        return Gemma4Block(self.config, number)

    def embed(self, tokens: Tensor) -> Tensor:
        return scaled(self.tok_embeddings(tokens), self.config.dim**0.5)

    def beside(self, tokens: Tensor, x: Tensor, positions: Tensor) -> Sequence[tuple[Any, ...]]:
        rotations = self.rotations(positions, tokens.device)
        stored: Stored = {}
        inputs = self.layer_inputs(tokens, x) if self.config.layer_input_dim else None
        return [
            (*rotation, None if inputs is None else inputs[:, :, i], stored)
            for i, rotation in enumerate(rotations)
        ]

    def layer_inputs(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Each layer's embeddings (B, S, layers, P) of tokens (B, S), embedded as x (B, S, D)."""
        P = self.config.layer_input_dim
        own = scaled(self.layer_embeddings(tokens), P**0.5).unflatten(-1, (-1, P))
        projected = self.layer_projection(x) * self.config.dim**-0.5
        return (self.layer_norm(projected.unflatten(-1, (-1, P))) + own) * 2**-0.5


class Gemma4Block(Block):
    """One layer; with its embedding e, x + norm(w(gelu(gate(x)) · e)) behind the rest."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        experts = None
        if config.mixture:
            from quantbench.models.gemma4_experts import BesideExperts

            experts = BesideExperts(config)
        super().__init__(config, number, experts)
        self.attention = Gemma4Attention(config, number)
        self.feed_forward.activation = gelu
        if experts:
            self.ffn_norm = nn.Identity()  # each network has its norm
        if P := config.layer_input_dim:
            self.input_gate = nn.Linear(config.dim, P, bias=False)
            self.input_projection = nn.Linear(P, config.dim, bias=False)
            self.input_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.scale = Scale(1)

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, inputs: Tensor | None, stored: Stored,
        positions: Tensor, cache: KVCache | None = None,
    ) -> Tensor:  # fmt: skip
        """As Block's. inputs: the layer's embeddings (B, S, P). stored: of the layers before."""
        y = self.attention(self.attention_norm(x), cos, sin, stored, positions, cache)
        x = x + self.attention_post_norm(y)
        x = x + self.ffn_post_norm(self.feed_forward(self.ffn_norm(x)))
        if inputs is not None:
            y = self.input_projection(gelu(self.input_gate(x)) * inputs)
            x = x + self.input_norm(y)
        return x * self.scale.weight


class Gemma4Attention(Attention):
    """Attention with normed values, and with an earlier layer's keys and values if it has none."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, stored: Stored, positions: Tensor,
        cache: KVCache | None = None,
    ) -> Tensor:  # fmt: skip
        H, K, E = self.num_heads, self.num_kv_heads, self.head_dim
        B, S, _ = x.shape
        is_chunk = S > 1 or cache is None  # a step reads caches alone, and is compiled by layers
        heads = self.wqkv(x).unflatten(-1, (-1, E))  # (B, S, H, or H + K, or H + 2K, E)
        query = rotate(self.q_norm(heads[:, :, :H]), cos, sin).transpose(1, 2)
        if heads.shape[2] > H:
            key = rotate(self.k_norm(heads[:, :, H : H + K]), cos, sin).transpose(1, 2)
            value = F.rms_norm(heads[:, :, -K:], (E,), eps=self.k_norm.eps).transpose(1, 2)
            sides = (key, value) if cache is None else cache.update(positions, key, value)
            if is_chunk:
                stored[self.window] = sides
        elif is_chunk:
            sides = stored[self.window]
        else:
            sides = cache.stored("key", B), cache.stored("value", B)
        y = self.attend(query, *sides, positions, self.window, self.scoring)
        return self.wo(y.transpose(1, 2).flatten(2))


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * torch.tensor(factor, dtype=x.dtype)  # rounded, as in training
