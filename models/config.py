"""A model's architecture as data, read from Hugging Face's config.json or Meta's params.json.

A key that is not understood and may change the model's result is an error; it is never dropped.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from errors import CheckpointError, UsageError
from models import compression
from models import mixture as mixtures
from models.accepted import COUNT, LAYERS, NAME, NAMES, OBJECT, POSITIVE, TRUTH, Accepts, whole
from models.mixture import Mixture
from text import shown


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's "llama3" rotary scaling, for a context beyond that of the first training.

    Raises CheckpointError for a number that is not positive, and for bounds in the wrong order.
    """

    factor: float  # slow rotations are divided by it
    low_freq_factor: float = 1.0  # fewer turns than this over the original context are slow
    high_freq_factor: float = 4.0  # more turns than this are fast, and stay as they are
    original_max_position: int = 8192  # positions

    def __post_init__(self) -> None:
        where = "rotary scaling"
        for key in ("factor", "low_freq_factor", "high_freq_factor"):
            POSITIVE.check(where, key, getattr(self, key))
        COUNT.check(where, "original_max_position", self.original_max_position)
        if self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(
                f"{where}: high_freq_factor is {self.high_freq_factor}; accepted is a number above "
                f"low_freq_factor, {self.low_freq_factor}"
            )


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
    tie_embeddings: bool = False  # whether the output layer's weight is the embedding
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # whether queries and keys are normed
    joint_qk_norm: bool = False  # whether that norm is over all heads together, and not of each
    mixture: Mixture | None = None  # the experts, of a model that has any
    architecture: str = "llama"  # the class that computes it: a key of models.ARCHITECTURES

    def __post_init__(self) -> None:
        for key, accepts in _FIELDS.items():
            if getattr(self, key) is not None or key not in _MAY_BE_NONE:
                accepts.check(self.name, key, getattr(self, key))
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.name}: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"{self.name}: head_dim {self.head_dim} is odd; rotation pairs")

    def with_layers(self, count: int) -> "ModelConfig":
        """The same model with only its first `count` layers. Raises UsageError if it has fewer."""
        if not 1 <= count <= self.num_layers:
            raise UsageError(
                f"--num_layers {count}: {self.name} has {self.num_layers} layers; "
                f"give a number from 1 to {self.num_layers}"
            )
        return replace(self, num_layers=count)

    def kinds_of_layers(self) -> list[int]:
        """How many layers there are of each kind: with experts, and without, if there are both."""
        experts = self.mixture
        dense = sum(experts.is_dense(i) for i in range(self.num_layers)) if experts else 0
        return [count for count in (self.num_layers - dense, dense) if count]

    def one_of_each_kind(self) -> "ModelConfig":
        """The same model with one layer of each kind, in the order of `kinds_of_layers`."""
        count, experts = len(self.kinds_of_layers()), self.mixture
        if experts is not None:
            last = self.num_layers - 1 if count == 1 else None
            dense = (1,) if last is None else (0,) if experts.is_dense(last) else ()
            experts = replace(experts, dense_layers=dense)
        return replace(self, num_layers=count, mixture=experts)

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Every linear layer's (out_features, in_features), by its name in the model."""
        D, H, K, E = self.dim, self.num_heads, self.num_kv_heads, self.head_dim
        attention = {"attention.wqkv": ((H + 2 * K) * E, D), "attention.wo": (D, H * E)}
        shapes: dict[str, tuple[int, int]] = {}
        for i in range(self.num_layers):
            layer = dict(attention)
            for name, width in self.feed_forwards(i).items():
                layer |= {f"{name}.w13": (2 * width, D), f"{name}.w2": (D, width)}
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes | {"output": (self.vocab_size, D)}

    def feed_forwards(self, layer: int) -> dict[str, int]:
        """The widths of a layer's feed-forward networks, by their names in the layer."""
        experts = self.mixture
        if experts is None or experts.is_dense(layer):
            return {"feed_forward": self.ffn_dim}
        widths = {
            f"feed_forward.experts.{i}": experts.expert_dim for i in range(experts.num_experts)
        }
        shared = {"feed_forward.shared": experts.shared_dim} if experts.shared_dim else {}
        return widths | shared

    def parameters(self) -> int:
        """The number of parameters. A tied output is the embedding, and counts once."""
        biased = {"attention.wqkv": self.qkv_bias, "attention.wo": self.attention_out_bias}
        count = self.vocab_size * self.dim  # the embedding
        for name, (rows, columns) in self.linear_shapes().items():
            if name == "output":
                count += 0 if self.tie_embeddings else rows * columns
            else:
                count += rows * columns + rows * biased.get(name.split(".", 2)[2], self.mlp_bias)
        norms = self.num_layers * 2 * self.dim + self.dim
        heads = self.num_heads + self.num_kv_heads if self.joint_qk_norm else 2
        return count + norms + self.num_layers * heads * self.head_dim * self.qk_norm + self._gates

    @property
    def _gates(self) -> int:
        """Parameters of the routers, and of what weighs the shared experts."""
        experts = self.mixture
        if experts is None:
            return 0
        dense = sum(layer < self.num_layers for layer in experts.dense_layers)
        rows = experts.num_experts + bool(experts.shared_dim)
        return (self.num_layers - dense) * rows * self.dim


_FIELDS = {
    "name": NAME,
    "num_layers": LAYERS,
    **dict.fromkeys(("dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim"), COUNT),
    **dict.fromkeys(("vocab_size", "max_position", "sliding_window"), COUNT),
    **dict.fromkeys(("norm_eps", "rope_theta"), POSITIVE),
    **dict.fromkeys(("tie_embeddings", "qkv_bias", "attention_out_bias"), TRUTH),
    **dict.fromkeys(("mlp_bias", "qk_norm", "joint_qk_norm"), TRUTH),
    "rope_scaling": Accepts("a RopeScaling", lambda value: isinstance(value, RopeScaling)),
    "mixture": Accepts("a Mixture", lambda value: isinstance(value, Mixture)),
}
_MAY_BE_NONE = {"sliding_window", "rope_scaling", "mixture"}


def from_fields(fields: Any, name: str) -> ModelConfig:
    """The config that `dataclasses.asdict` turned into these fields, with the name `name`.

    Raises CheckpointError for fields that are missing, unknown or impossible.
    """
    OBJECT.check(name, "architecture", fields)
    try:
        scaling = fields["rope_scaling"]
        if scaling is not None:
            OBJECT.check(name, "rope_scaling", scaling)
            scaling = RopeScaling(**scaling)
        experts = mixtures.from_fields(fields.get("mixture"), name)
        changes = {"name": name, "rope_scaling": scaling, "mixture": experts}
        return ModelConfig(**{**fields, **changes})
    except (TypeError, KeyError):
        raise CheckpointError(
            f"{name}: its architecture is damaged; save the model again"
        ) from None


# ---------------------------------------------------------------------------------- config.json

_REQUIRED = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
}
_OPTIONAL = {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings"}
# Defaults of Hugging Face's config classes for absent keys.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position": 2048},
    "mistral": {"max_position": 131072, "num_kv_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position": 32768, "num_kv_heads": 32, "qkv_bias": True},
    "qwen3": {"max_position": 32768, "num_kv_heads": 32, "head_dim": 128, "qk_norm": True},
    "mixtral": {"max_position": 131072, "num_kv_heads": 8, "norm_eps": 1e-5, "theta": 1000000.0},
    "olmoe": {"norm_eps": 1e-5, "max_position": 4096, "qk_norm": True, "joint_qk_norm": True},
    "qwen2_moe": {"max_position": 32768, "num_kv_heads": 16, "qkv_bias": True},
    "qwen3_moe": {"max_position": 32768, "num_kv_heads": 4, "qk_norm": True},
}
# Keys that change no logit: training, bookkeeping, generation defaults, memory strategies.
_HARMLESS = {
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "max_window_layers", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "torch_dtype", "torchscript", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_cache", "use_sliding_window",
}  # fmt: skip
# Keys with the only value that is supported; with another the model would compute something else.
_FIXED = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "cross_attention_hidden_size": None,
    "clip_qkv": None,
}
# What each key may hold. For an optional key null means the same as leaving it out.
_ACCEPTED = {
    "model_type": NAME,
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size"), COUNT),
    **dict.fromkeys(("vocab_size", "num_key_value_heads", "head_dim"), COUNT),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), COUNT),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "partial_rotary_factor"), POSITIVE),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), TRUTH),
    "use_sliding_window": TRUTH,
    "max_window_layers": whole(0),
    "layer_types": NAMES,
    "hidden_act": NAME,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
}
_ROPE_ACCEPTED = {
    **dict.fromkeys(("type", "rope_type"), NAME),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "factor"), POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), POSITIVE),
    "original_max_position_embeddings": COUNT,
}


def _check_keys(where: object, accepted: Mapping[str, Accepts], given: Mapping[str, Any]) -> None:
    for key, accepts in accepted.items():
        if given.get(key) is not None:
            accepts.check(where, key, given[key])


def _listed(keys: Iterable[object]) -> str:
    return ", ".join(shown(key) for key in keys)


def from_hugging_face(
    config: Mapping[str, Any], name: str, file: object | None = None
) -> ModelConfig:
    """The architecture in a Hugging Face config.json of one of the types in _DEFAULTS.

    file: its name in error messages; `name` if not given. Raises CheckpointError for another type,
    for a missing or impossible value, and for a key that is not understood.
    """
    where = file or name
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise CheckpointError(
            f"{where}: model_type {shown(kind)} is not supported; supported: {', '.join(_DEFAULTS)}"
        )
    of_experts = mixtures.ACCEPTED.get(kind, {})
    accepted = _ACCEPTED | of_experts
    harmless = _HARMLESS | mixtures.HARMLESS if of_experts else _HARMLESS
    if kind == "qwen2_moe" and not config.get("sliding_window"):  # 0 is written for none
        config = {key: value for key, value in config.items() if key != "sliding_window"}
    for key, value in config.items():
        if key in _FIXED and value not in (_FIXED[key], None):
            given = "given" if isinstance(value, Mapping) else shown(value)
            raise CheckpointError(
                f"{where}: {key} {given} is not supported; only {_FIXED[key]!r} is"
            )
        if key == "quantization_config" and value is not None:
            compression.check(value, where)
            continue
        known = key in _REQUIRED or key in _OPTIONAL or key in harmless
        if not known and key not in _FIXED and key not in accepted and value is not None:
            raise CheckpointError(
                f"{where}: config key {shown(key)} is not understood, and it may change the result"
            )
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise CheckpointError(f"{where}: config has no {', '.join(missing)}")

    _check_keys(where, accepted, config)
    values: dict[str, Any] = {"norm_eps": 1e-6, **_DEFAULTS[kind]}
    theta = values.pop("theta", 10000.0)
    values |= {field: config[key] for key, field in _REQUIRED.items()}
    values |= {
        field: config[key] for key, field in _OPTIONAL.items() if config.get(key) is not None
    }
    values |= {
        field: config[key]
        for key, field in (
            ("num_key_value_heads", "num_kv_heads"),
            ("max_position_embeddings", "max_position"),
            ("head_dim", "head_dim"),
        )
        if config.get(key) is not None
    }
    values.setdefault("num_kv_heads", values["num_heads"])
    if "head_dim" not in values:
        values["head_dim"] = _divided(values["dim"], values["num_heads"], where)
    if config.get("attention_bias") and kind in ("llama", "qwen3", "qwen3_moe", "olmoe"):
        values |= {"qkv_bias": True, "attention_out_bias": True}
    if kind == "qwen2_moe" and config.get("qkv_bias") is not None:
        values["qkv_bias"] = config["qkv_bias"]
    if config.get("mlp_bias") and kind == "llama":
        values["mlp_bias"] = True
    values["sliding_window"] = _window(config, kind, values, where)
    if of_experts:
        try:
            experts = mixtures.from_hugging_face(config, kind, values["num_layers"])
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        values |= {"mixture": experts, "architecture": "mixtral"}
    return ModelConfig(name=name, **values, **_rope(config, where, theta))


def _divided(dim: Any, heads: Any, where: object) -> int:
    if dim % heads:
        raise CheckpointError(f"{where}: hidden_size {dim} does not divide into {heads} heads")
    return dim // heads


def _window(config: Mapping[str, Any], kind: str, values: Mapping[str, Any], where: object) -> Any:
    """The sliding window of all layers, or None. Raises CheckpointError if layers differ."""
    window = config.get("sliding_window", values.get("sliding_window"))
    layers = values["num_layers"]
    if kind in ("llama", "olmoe") or window is None:
        return None
    if config.get("layer_types"):
        kinds = set(config["layer_types"])
        if kinds == {"full_attention"}:
            return None
        if kinds == {"sliding_attention"}:
            return window
    elif kind in ("mistral", "mixtral"):
        return window
    elif kind == "qwen3_moe" and config.get("use_sliding_window"):
        return window
    elif not config.get("use_sliding_window"):
        return None
    elif kind == "qwen2_moe":
        pass  # every second layer has the window
    elif config.get("max_window_layers", 28) >= layers:
        return None
    elif config.get("max_window_layers") == 0:
        return window
    raise CheckpointError(
        f"{where}: layers that differ in their attention window are not supported"
    )


def _rope(config: Mapping[str, Any], where: object, default: float) -> dict[str, Any]:
    """Rotary theta, `default` if absent, and scaling, from the keys of transformers 4 or 5."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    _check_keys(where, _ROPE_ACCEPTED, rope)
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    theta = default if theta is None else theta
    old_kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or old_kind or "default"
    if rope.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise CheckpointError(f"{where}: a partial rotary embedding is not supported")
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise CheckpointError(
            f"{where}: rotary scaling {shown(kind)} is not supported; supported: default, llama3"
        )
    keys = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    }
    missing, unknown = keys.keys() - rope.keys(), rope.keys() - keys.keys()
    if missing or unknown:
        wrong = _listed(sorted(missing or unknown))
        verb = "lacks" if missing else "has keys that are not understood:"
        raise CheckpointError(f"{where}: llama3 rotary scaling {verb} {wrong}")
    for key in keys:
        _ROPE_ACCEPTED[key].check(where, key, rope[key])
    try:
        scaling = RopeScaling(**{field: rope[key] for key, field in keys.items()})
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return {"rope_theta": theta, "rope_scaling": scaling}


# ---------------------------------------------------------------------------------- params.json

_PARAMS_ACCEPTED = {
    "n_layers": LAYERS,
    **dict.fromkeys(("dim", "n_heads", "n_kv_heads", "multiple_of"), COUNT),
    **dict.fromkeys(("ffn_dim_multiplier", "norm_eps", "rope_theta"), POSITIVE),
    "vocab_size": whole(-1),
    "use_scaled_rope": TRUTH,
}


def from_params(
    params: Mapping[str, Any],
    name: str,
    vocab_size: int | None = None,
    file: object | None = None,
) -> ModelConfig:
    """The architecture of a Meta checkpoint's params.json.

    vocab_size: rows of the embedding, for Llama 2's files, which give -1. The file does not give
    the context: with theta 500000 it is Llama 3's 8192, or 131072 if the rotation is scaled, and
    4096 otherwise. Raises CheckpointError for missing, impossible or unknown values.
    """
    where = file or name
    unknown = sorted(params.keys() - _PARAMS_ACCEPTED.keys())
    if unknown:
        raise CheckpointError(f"{where}: params.json key {shown(unknown[0])} is not understood")
    missing = [key for key in ("dim", "n_layers", "n_heads", "norm_eps") if params.get(key) is None]
    if missing:
        raise CheckpointError(f"{where}: params.json has no {', '.join(missing)}")
    _check_keys(where, _PARAMS_ACCEPTED, params)
    params = {key: value for key, value in params.items() if value is not None}
    dim, heads = params["dim"], params["n_heads"]
    head_dim = _divided(dim, heads, where)
    multiple = params.get("multiple_of", 256)
    # Three matrices of width 2/3 · 4 · dim have as many parameters as two of width 4 · dim.
    width = int(min(int(2 * 4 * dim / 3) * params.get("ffn_dim_multiplier", 1.0), 2**40))
    stated = params.get("vocab_size", -1)
    vocab = stated if stated > 0 else vocab_size
    if vocab is None:
        raise CheckpointError(f"{where}: params.json has no vocab_size")
    theta = params.get("rope_theta", 10000.0)
    scaled = bool(params.get("use_scaled_rope"))
    # Meta's own code scales by 8 for 3.1; the 1 B and 3 B models of 3.2 were published with 32.
    factor = 32.0 if dim in (2048, 3072) else 8.0
    context = (131072 if scaled else 8192) if theta == 500000.0 else 4096
    return ModelConfig(
        name=name,
        dim=dim,
        num_layers=params["n_layers"],
        num_heads=heads,
        num_kv_heads=params.get("n_kv_heads") or heads,
        head_dim=head_dim,
        ffn_dim=-(-width // multiple) * multiple,
        vocab_size=vocab,
        max_position=context,
        norm_eps=params["norm_eps"],
        rope_theta=theta,
        rope_scaling=RopeScaling(factor) if scaled else None,
    )
