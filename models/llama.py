"""A Llama-family decoder in one file, read top-down.

Llama 2, 3, 3.1 and 3.2, CodeLlama, Mistral and TinyLlama are this file as it stands; Qwen2 adds
biases to the query/key/value projection, Qwen3 a norm on each query and key head. Which of these
apply is data in `ModelConfig`, never the model's name.

Two decisions differ from Hugging Face's modules and cost nothing in accuracy: the query, key and
value projections are one matrix, as are the gate and up projections, so that decode makes four
passes over memory a layer instead of seven. Rotary embeddings follow Hugging Face's layout (the
first half of a head rotates against the second), and checkpoints in Meta's interleaved layout are
permuted when they are read.

Shapes: B rows, S positions, D model width, H query heads, K key/value heads, E head width,
F feed-forward width, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devices import stored_bytes
from kv_cache.base import CacheFactory, KVCache
from kv_cache.dense import DenseKVCache
from models.config import ModelConfig, RopeScaling
from ops import attention as decode
from ops.cpu import step as in_cpp
from ops.reference import attention


class Transformer(nn.Module):
    """The whole model: token ids in, logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.decode_kernel = decode.Choice("torch")  # over the caches; `setup_caches` chooses it
        self.decodes_in_cpp = False  # whether one op does all layers of a decode step …
        self.whole_in_cpp = False  # … and what is before and after them
        self.nested_regions = False  # whether to compile one block and call it for every layer

    def setup_caches(
        self, max_batch_size: int, max_seq_length: int, cache: CacheFactory = DenseKVCache
    ) -> None:
        """Give every layer an empty cache of `max_batch_size` rows and `max_seq_length` positions.

        It lies on the embedding's device, in the embedding's dtype unless the cache quantizes. A
        model with a sliding window keeps no more than that. On the CPU the first call of all builds
        the kernel that decodes over it, which takes a minute.
        """
        config, weight = self.config, self.tok_embeddings.weight
        self.decode_kernel = decode.choose(
            weight.device, config.head_dim, config.num_heads // config.num_kv_heads, weight.dtype
        )
        for layer in self.layers:
            made = cache(
                max_batch_size,
                config.num_kv_heads,
                max_seq_length,
                config.head_dim,
                weight.dtype,
                weight.device,
                config.sliding_window,
            )
            made.kernel = self.decode_kernel.name
            layer.attention.kv_cache = made
        few = max_batch_size <= in_cpp.FEW and self.decode_kernel.name == "cpu"
        for layer in self.layers:
            layer.decodes_in_cpp = few and layer.is_in_cpp()
        self.decodes_in_cpp = all(
            layer.decodes_in_cpp and layer.attention.kv_cache.format == "dense"
            for layer in self.layers
        )
        ends = type(weight.data) is Tensor and getattr(self.output, "in_cpp", False)
        self.whole_in_cpp = self.decodes_in_cpp and ends
        self.frequencies = frequencies(config, weight.device)

    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all but the embedding's table.

        A quantized weight counts everything it stores: packed values, scales, zero points. From
        shapes alone, so it is right on the meta device too.
        """
        modules = (m for m in self.modules() if not isinstance(m, nn.Embedding))
        weights = (p for module in modules for p in module.parameters(recurse=False))
        return sum(map(stored_bytes, weights))

    @property
    def caches(self) -> list[KVCache]:
        """The layers' caches, first layer first; empty before `setup_caches`."""
        found = [layer.attention.kv_cache for layer in self.layers]
        return [cache for cache in found if cache is not None]

    def forward(
        self,
        tokens: Tensor,
        input_pos: Tensor | None = None,
        last_only: bool = False,
        start: int | None = None,
    ) -> Tensor:
        """Logits (B, S, V) for tokens (B, S), the last position's alone, (B, 1, V), if asked.

        With `input_pos` (S,) the tokens stand at those positions, one after another, and see what
        the caches already hold; a caller who knows the first of them gives it as `start` too, or a
        device is asked. Without it they are whole sequences from position 0; no cache is touched.
        """
        if self.whole_in_cpp and input_pos is not None and tokens.shape[1] == 1:
            return self.decoded_whole(tokens, input_pos)[:, None]
        x = self.hidden(tokens, input_pos, start)
        if last_only:
            x = x[:, -1:]
        return self.output(self.norm(x))

    def hidden(
        self, tokens: Tensor, input_pos: Tensor | None = None, start: int | None = None
    ) -> Tensor:
        """What the layers make of the tokens, (B, S, D): enough to fill the caches."""
        x = self.tok_embeddings(tokens)  # (B, S, D)
        if input_pos is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            positions = input_pos
            if start is None and tokens.shape[1] > 1:
                start = int(input_pos[0])
        cos, sin = rotation(self.config, positions)
        if self.decodes_in_cpp and input_pos is not None and x.shape[1] == 1:
            return self.decoded(x[:, 0], cos, sin, input_pos)[:, None]
        run = block_region if self.nested_regions else Block.__call__
        for layer in self.layers:
            x = run(layer, x, cos, sin, input_pos, start)
        return x

    def decoded(self, x: Tensor, cos: Tensor, sin: Tensor, input_pos: Tensor) -> Tensor:
        """What the layers make of one position of each row, x (B, D), in one op."""
        layers = [layer.for_cpp() for layer in self.layers]
        return in_cpp.layers(x, layers, cos, sin, input_pos, *self._numbers())

    def decoded_whole(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """Logits (B, V) of one position of each row, tokens (B, 1), in one op."""
        return in_cpp.decode(
            tokens,
            self.tok_embeddings.weight,
            [layer.for_cpp() for layer in self.layers],
            self.frequencies,
            input_pos,
            *self._numbers(),
            _norm(self.norm),
            _linear(self.output),
        )

    def _numbers(self) -> tuple[bool, int, int, int]:
        """Whether caches wrap, the heads, and the feed-forward width, for C++."""
        config = self.config
        wraps = config.sliding_window is not None
        return wraps, config.num_heads, config.num_kv_heads, config.ffn_dim


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normed copy and added back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.decodes_in_cpp = False

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        input_pos: Tensor | None,
        start: int | None = None,
    ) -> Tensor:
        if self.decodes_in_cpp and input_pos is not None and x.shape[1] == 1:
            return self.decoded(x[:, 0], cos, sin, input_pos)[:, None]
        x = x + self.attention(self.attention_norm(x), cos, sin, input_pos, start)
        return x + self.feed_forward(self.ffn_norm(x))

    def is_in_cpp(self) -> bool:
        """Whether C++ kernels multiply by all of its weights, so that one can call another."""
        linears = (module for module in self.modules() if isinstance(module, nn.Linear))
        return all(getattr(linear, "in_cpp", False) for linear in linears)

    def for_cpp(self) -> in_cpp.Layer:
        attention, ffn = self.attention, self.feed_forward
        assert attention.kv_cache is not None, "call setup_caches first"
        return in_cpp.Layer(
            attention_norm=_norm(self.attention_norm),
            wqkv=_linear(attention.wqkv),
            query_norm=_norm(attention.q_norm),
            key_norm=_norm(attention.k_norm),
            wo=_linear(attention.wo),
            ffn_norm=_norm(self.ffn_norm),
            w13=_linear(ffn.w13),
            w2=_linear(ffn.w2),
            keys=attention.kv_cache.key_codes,
            values=attention.kv_cache.value_codes,
        )

    def decoded(self, x: Tensor, cos: Tensor, sin: Tensor, input_pos: Tensor) -> Tensor:
        """`forward` for one position of each row, x (B, D), in three ops instead of twenty."""
        layer, attention = self.for_cpp(), self.attention
        H, K = attention.num_heads, attention.num_kv_heads
        qkv = in_cpp.before_attention(x, layer, cos, sin, H, K)  # (B, H + 2 K, E)
        query, key, value = qkv[:, :, None].split((H, K, K), dim=1)
        y = attention.kv_cache.attend(query, key, value, input_pos)  # (B, H, 1, E)
        return in_cpp.after_attention(y.flatten(1), x, layer, self.feed_forward.width)


def _norm(module: nn.Module) -> in_cpp.Norm | None:
    return in_cpp.Norm(module.weight, module.eps) if isinstance(module, nn.RMSNorm) else None


def _linear(module: nn.Linear) -> in_cpp.Linear:
    return in_cpp.Linear(module.weight, module.bias)


@torch.compiler.nested_compile_region
def block_region(
    block: Block,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    input_pos: Tensor | None,
    start: int | None,
) -> Tensor:
    """A block as a region of its own: compiled once, called for every layer."""
    return block(x, cos, sin, input_pos, start)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key/value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.window = config.head_dim, config.sliding_window
        heads = config.num_heads + 2 * config.num_kv_heads
        self.wqkv = nn.Linear(config.dim, heads * config.head_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(
            config.num_heads * config.head_dim, config.dim, bias=config.attention_out_bias
        )
        norm = nn.RMSNorm if config.qk_norm else nn.Identity
        self.q_norm = norm(config.head_dim, config.norm_eps)
        self.k_norm = norm(config.head_dim, config.norm_eps)
        self.kv_cache: KVCache | None = None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        input_pos: Tensor | None,
        start: int | None = None,
    ) -> Tensor:
        B, S, _ = x.shape
        H, K, E = self.num_heads, self.num_kv_heads, self.head_dim
        query, key, value = self.wqkv(x).view(B, S, H + 2 * K, E).split((H, K, K), dim=2)
        query = rotate(self.q_norm(query), cos, sin).transpose(1, 2)  # (B, H, S, E)
        key = rotate(self.k_norm(key), cos, sin).transpose(1, 2)  # (B, K, S, E)
        value = value.transpose(1, 2)
        if input_pos is None:
            y = self.attend_without_cache(query, key, value)
        else:
            assert self.kv_cache is not None, "call setup_caches first"
            y = self.kv_cache.attend(query, key, value, input_pos, start)
        return self.wo(y.transpose(1, 2).reshape(B, S, H * E))

    def attend_without_cache(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        S = query.shape[2]
        within_window = self.window is None or S <= self.window
        if within_window and self.num_heads == self.num_kv_heads:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        positions = torch.arange(S, device=query.device)
        return attention(query, key, value, positions, positions, self.window)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(gate) · up), gate and up the two halves of w13's output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.dim, 2 * config.ffn_dim, bias=config.mlp_bias)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=config.mlp_bias)
        self.width = config.ffn_dim

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


def rotation(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (S, 1, E/2) float32, of every position's rotary angles.

    Computed from the positions at each step: E/2 products are cheaper than reading a table, and
    a context of 131072 positions costs no memory.
    """
    angles = positions[:, None, None].float() * frequencies(config, positions.device)
    return angles.cos(), angles.sin()


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians that each of a head's pairs turns from one position to the next, (E/2,) float32."""
    exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    inverse_wavelength = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        return scaled(inverse_wavelength, config.rope_scaling)
    return inverse_wavelength


def scaled(unscaled: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's context extension: slow rotations slow down by `factor`, fast ones stay.

    "Slow" turns fewer than `low_freq_factor` times over the original context, "fast" more than
    `high_freq_factor`; between them the two are blended linearly in the number of turns.
    """
    turns = scaling.original_max_position * unscaled / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return unscaled * (blend + (1 - blend) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's (i, i + E/2) pairs of x (B, S, heads, E); in float32, then back."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)
