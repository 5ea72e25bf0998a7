"""A model's architecture as data. models/hugging_face.py reads it from config.json, and
models/formats/meta.py from Meta's params.json.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantbench.errors import CheckpointError, UsageError
from quantbench.models.config_checks import (
    LAYERS,
    POSITIVE,
    STRETCH,
    Accepts,
    by_field,
    check_fields,
    list_of,
    whole,
)


@dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling, for a context beyond that of the first training. `kind` is the rope_type of
    transformers: llama3 (Llama 3.1), linear, dynamic, yarn, longrope or proportional.

    Raises CheckpointError for a factor below 1, which would shorten the context or overflow, for
    another number that is not positive, and for bounds in the wrong order.
    """

    factor: float  # slow rotations are divided by it
    low_freq_factor: float = 1.0  # fewer turns than this over the original context are slow
    high_freq_factor: float = 4.0  # more turns than this are fast, and stay as they are
    original_max_position: int = 8192  # positions
    kind: str = "llama3"
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    beta_fast: float = 32.0  # of yarn: more turns than this stay as they are
    beta_slow: float = 1.0  # of yarn: fewer turns than this are slow
    truncate: bool = True  # of yarn: whether both bounds are rounded to a pair's number
    short_factors: tuple[float, ...] = ()  # of longrope: each pair is slowed by its factor, …
    long_factors: tuple[float, ...] = ()  # … by this one if the text exceeds the original context
    temperature: float = 0.0  # queries grow by temperature · log(1 + position // original)
    share: float = 1.0  # of proportional: the first pairs of a head that rotate, of all

    def __post_init__(self) -> None:
        where = "rotary scaling"
        check_fields(where, SCALING_FIELDS, self)
        if self.kind not in ROPE_KINDS:
            raise CheckpointError(
                f"{where} {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
            )
        if self.kind == "longrope" and not (self.short_factors and self.long_factors):
            raise CheckpointError(f"{where}: longrope lacks its short or long factors")
        if self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(
                f"{where}: high_freq_factor is {self.high_freq_factor}; accepted is a number above "
                f"low_freq_factor, {self.low_freq_factor}"
            )

    @property
    def is_table(self) -> bool:
        """Whether it changes rotations alone, and these alike for texts of any length."""
        alike = self.kind == "longrope" and self.short_factors == self.long_factors
        return (alike or self.kind in ("llama3", "linear", "yarn")) and not self.temperature


ROPE_KINDS = ("llama3", "linear", "dynamic", "yarn", "longrope", "proportional")
_NOT_NEGATIVE = Accepts("a number of at least 0", lambda value: value == 0 or POSITIVE.test(value))
SCALING_FIELDS = by_field(RopeScaling, factor=STRETCH, temperature=_NOT_NEGATIVE)


@dataclass(frozen=True)
class Mixture:
    """Each token goes through `experts_per_token` of `num_experts` feed-forward networks.

    Raises CheckpointError for values that no model can have.
    """

    num_experts: int  # of each layer
    experts_per_token: int
    expert_dim: int  # width of each expert's feed-forward network
    # Whether the weights of a token's experts add up to 1. If not, they are the router's
    # probabilities, which add up to 1 over all experts.
    normalized: bool = True
    shared_dim: int = 0  # width of an expert that every token goes through; 0: there is none
    router_bias: bool = False  # whether the router adds a bias to its scores
    dense_layers: tuple[int, ...] = ()  # layers that have one feed-forward network and no experts

    def __post_init__(self) -> None:
        check_fields("mixture of experts", MIXTURE_FIELDS, self)
        if self.experts_per_token > self.num_experts:
            raise CheckpointError(
                f"mixture of experts: a token goes through {self.experts_per_token} experts, and "
                f"there are {self.num_experts}"
            )

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has one feed-forward network and no experts."""
        return layer in self.dense_layers

    def distinct(self, tokens: int) -> float:
        """Experts that are chosen by at least one of so many tokens, on average, if each chooses
        independently and evenly: X · (1 − (1 − k/X)^tokens)."""
        unchosen = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.num_experts * (1 - unchosen)


MIXTURE_FIELDS = by_field(Mixture, shared_dim=whole(0))


def compiles(mixture: Mixture | None, device: str, two_tiers: bool) -> bool:
    """Whether torch.compile makes one graph of a decoding step.

    A mixture's is compiled only on CUDA, where reading the experts' numbers stalls the device. A
    graph cannot fetch experts from a second tier of memory. device: its type.
    """
    return mixture is None or (device == "cuda" and not two_tiers)


@dataclass(frozen=True)
class LayerSpec:
    """What may differ between the layers of a model."""

    window: int | None  # positions that a query attends to, its own included; None: all
    rope_theta: float  # base of the rotary embedding
    rope_scaling: RopeScaling | None
    scale: float | None  # of attention scores; None: 1/√head_dim
    softcap: float | None  # of attention scores: softcap · tanh(score / softcap)
    post_norms: bool  # whether outputs of attention and feed-forward network are normed, too
    head_dim: int  # width of a head
    kv_heads: int  # key/value heads
    ffn_dim: int  # width of the feed-forward network
    rotates: bool = True  # whether queries and keys are rotated
    recurrent: Any = None  # the models.recurrent.Recurrent in the place of attention
    shared: bool = False  # whether keys and values are those of an earlier layer
    value_is_key: bool = False  # whether values have the keys' projection


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides what the model computes. Widths are in elements.

    Raises CheckpointError for values that no model can have.
    """

    name: str
    dim: int  # width of the model
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; num_heads is a multiple
    head_dim: int  # width of a head; even
    ffn_dim: int  # width of the feed-forward network
    vocab_size: int
    max_position: int  # positions of the context it was trained for; caches may be larger
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # positions that a query attends to, its own included
    full_layers: tuple[int, ...] = ()  # layers that attend to all positions all the same
    window_rope_theta: float | None = None  # of layers with a window; None: as rope_theta has it
    attention_scale: float | None = None  # of scores; None: 1/√head_dim
    attention_softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    attention_sinks: bool = False  # whether each head sees a position of value 0 (ops/attend.py)
    logit_softcap: float | None = None  # the same of logits
    post_norms: bool = False  # whether outputs of attention and feed-forward network are normed
    pre_norms: bool = True  # whether their inputs are
    rotary_dim: int | None = None  # elements of a head that are rotated; None: all
    no_rope_layers: tuple[int, ...] = ()  # layers without rotation
    squared_relu: bool = False  # feed-forward networks have no gate: w2(relu(w13(x))²)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and feed-forward network add
    logits_divisor: float = 1.0
    tie_embeddings: bool = False  # whether the output layer's weight is the embedding
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # whether queries and keys are normed
    joint_qk_norm: bool = False  # whether that norm is over all heads together, and not of each
    gated_attention: bool = False  # whether what heads return is multiplied by sigmoids of x
    full_head_dim: int | None = None  # of layers without a window; None: head_dim
    full_kv_heads: int | None = None  # of layers without a window; None: num_kv_heads
    value_is_key: bool = False  # whether values of these layers have the keys' projection
    # Layers with the keys and values of the last layer before that is not among them and has a
    # window as they do, or none. Widths of their feed-forward networks; None: ffn_dim.
    shared_layers: tuple[int, ...] = ()
    shared_ffn_dim: int | None = None
    # Width of each layer's own embedding of a token; 0: there is none. One table has them all, for
    # `layer_input_vocab` tokens and `layer_input_layers` layers.
    layer_input_dim: int = 0
    layer_input_layers: int = 0
    layer_input_vocab: int = 0
    mixture: Mixture | None = None  # the experts, of a model that has any
    recurrent: Any = None  # a models.recurrent.Recurrent in the place of attention …
    recurrent_layers: tuple[int, ...] = ()  # … in these layers
    architecture: str = "llama"  # the file in models/ that computes it (models/registry.py)
    # Keys of config.json that this architecture alone reads, with their values.
    extras: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self.name, FIELDS, self)
        object.__setattr__(self, "extras", tuple(map(tuple, self.extras)))  # JSON has lists
        for heads in {self.num_kv_heads, self.full_kv_heads or self.num_kv_heads}:
            if self.num_heads % heads:
                raise CheckpointError(
                    f"{self.name}: {self.num_heads} query heads cannot share "
                    f"{heads} key/value heads evenly"
                )
        for width in {self.head_dim, self.full_head_dim or self.head_dim}:
            if width % 2:
                raise CheckpointError(f"{self.name}: head_dim {width} is odd; rotation pairs")
        rotated = self.rotary_dim or self.head_dim
        if rotated % 2 or rotated > self.head_dim:
            raise CheckpointError(
                f"{self.name}: rotary_dim is {rotated}; accepted is an even number up to head_dim, "
                f"{self.head_dim}"
            )
        for key in ("short_factors", "long_factors"):
            pairs = getattr(self.rope_scaling, key, ())
            if len(pairs) not in (0, (self.full_head_dim or rotated) // 2):
                raise CheckpointError(
                    f"{self.name}: rotary scaling: {len(pairs)} {key} for {rotated // 2} pairs"
                )

    def with_layers(self, count: int | None) -> "ModelConfig":
        """The same model with only its first `count` layers; None: all. Raises UsageError if it has
        fewer."""
        if count is None:
            return self
        if not 1 <= count <= self.num_layers:
            raise UsageError(
                f"--num_layers {count}: {self.name} has {self.num_layers} layers; "
                f"give a number from 1 to {self.num_layers}"
            )
        return replace(self, num_layers=count)

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Each layer's own part of the architecture."""
        usual = self.attention_scale in (None, self.head_dim**-0.5)
        scale = None if usual else self.attention_scale
        shared = scale, self.attention_softcap, self.post_norms
        width = self.full_head_dim or self.head_dim, self.full_kv_heads or self.num_kv_heads
        full = LayerSpec(
            *(None, self.rope_theta, self.rope_scaling, *shared, *width, self.ffn_dim),
            value_is_key=self.value_is_key,
        )
        rope = self.rope_theta, self.rope_scaling
        if self.window_rope_theta is not None:
            rope = self.window_rope_theta, None
        width = self.head_dim, self.num_kv_heads
        narrow = LayerSpec(self.sliding_window, *rope, *shared, *width, self.ffn_dim)
        all_full = self.sliding_window is None
        specs = (
            full if all_full or i in self.full_layers else narrow for i in range(self.num_layers)
        )
        specs = (
            replace(spec, shared=True, ffn_dim=self.shared_ffn_dim or self.ffn_dim)
            if i in self.shared_layers
            else spec
            for i, spec in enumerate(specs)
        )
        return tuple(
            replace(full, recurrent=self.recurrent)
            if i in self.recurrent_layers
            else replace(spec, rotates=i not in self.no_rope_layers)
            for i, spec in enumerate(specs)
        )

    def heads_of(self, layer: int) -> tuple[int, int, int]:
        """The heads of queries, keys and values that a layer projects its inputs to."""
        spec = self.layers[layer]
        keys = 0 if spec.shared else spec.kv_heads
        return self.num_heads, keys, 0 if spec.value_is_key else keys

    def kinds_of_layers(self) -> list[list[int]]:
        """The layers of each kind, by their numbers: those with experts first."""
        kinds: dict[tuple[bool, LayerSpec], list[int]] = {}
        for i, spec in enumerate(self.layers):
            kinds.setdefault((self.is_dense(i), spec), []).append(i)
        return [kinds[kind] for kind in sorted(kinds, key=lambda kind: kind[0])]

    def picked(self, layers: Sequence[int]) -> "ModelConfig":
        """The same model with only these of its layers, in this order."""
        kinds = ("full_layers", "no_rope_layers", "shared_layers", "recurrent_layers")
        places = {
            kind: tuple(place for place, i in enumerate(layers) if i in getattr(self, kind))
            for kind in kinds
        }
        dense = tuple(place for place, i in enumerate(layers) if self.is_dense(i))
        experts = self.mixture and replace(self.mixture, dense_layers=dense)
        return replace(self, num_layers=len(layers), mixture=experts, **places)

    def one_of_each_kind(self) -> "ModelConfig":
        """The same model with one layer of each kind, in the order of `kinds_of_layers`."""
        return self.picked([numbers[0] for numbers in self.kinds_of_layers()])

    def is_dense(self, layer: int) -> bool:
        return self.mixture is not None and self.mixture.is_dense(layer)

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Every linear layer's (out_features, in_features), by its name in the model."""
        from quantbench.models import shapes

        return shapes.linear_shapes(self)

    def parameters(self) -> int:
        """The number of parameters. A tied output is the embedding, and counts once."""
        from quantbench.models import shapes

        return shapes.parameters(self)


_PAIR = Accepts(
    "", lambda pair: isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)
)
_PAIRS = list_of(_PAIR, "a list of pairs, a key and its value")
_ANY = Accepts("", lambda value: True)
_NONE = dict.fromkeys(("layer_input_dim", "layer_input_layers", "layer_input_vocab"), whole(0))
# What each may hold.
FIELDS = by_field(ModelConfig, num_layers=LAYERS, extras=_PAIRS, recurrent=_ANY, **_NONE)
