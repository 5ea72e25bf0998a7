"""A model's architecture from Hugging Face's config.json.

    from_hugging_face(json.loads(text), "my-model")         # a ModelConfig

models/registry.py has what differs between kinds of models. A key that is not understood is an
error if its name speaks of the model's arithmetic and its value is not that of absence. Other keys
say nothing to transformers' class of the model either: training, generation, bookkeeping.
"""

import math
import pkgutil
import re
from collections.abc import Iterable, Mapping
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.config import FIELDS, SCALING_FIELDS, ModelConfig, RopeScaling
from quantbench.models.config_checks import (
    COUNT,
    LAYERS,
    NAME,
    NAMES,
    OBJECT,
    POSITIVE,
    TRUTH,
    Accepts,
    whole,
)
from quantbench.models.registry import ARCHITECTURES, Architecture
from quantbench.text import shown

_REQUIRED = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
}
_OPTIONAL = {
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_position",
    "head_dim": "head_dim",
}
OF_KEYS = _REQUIRED | _OPTIONAL  # fields of ModelConfig by the key that has their value alone
# Words in the names of keys that would change the result if they were heeded, as in lm_head_bias,
# use_mrope, logit_scale or compression_config, …
_ARITHMETIC = re.compile(
    r"(?:^|_|\.)(\w*rope|rotary|interleaved?|\w*norm|normali[sz]ed|(re)?scal(e|es|ing)|multipliers?"
    r"|\w*bias|\w*cap(ping)?|clip|clamp|\w*act|activation|attns?|attention|\w*windows?|experts?|moe"
    r"|route[rd]|scoring|topk|alibi|residual|parallel|qkv?|query|key|kv|heads?|layers?|emb\w*"
    r"|\w*logits?|masks?|gat(e|ed|ing)|mlp|ffn|\w*glu|ssm|mamba|conv|lora|rank|dims?|hidden|width"
    r"|\w*intermediate|position|sinks?|softmax|hc|time|state|mup|quant\w*|compress\w*|spars\w*)"
    r"(?=$|_|\.)"
)
# … and those among them that change none: of training, of generation, of memory and kernels, and
# quantization_config, which formats/ checks. Names that start with _ are transformers' own notes.
_HARMLESS = re.compile(
    r"_.*|.*(dropout|pdrop)(_prob)?|.*_token_(id|index)s?|.*_aux_loss_coef|.*_jitter_noise|.*init.*"
    r"|output_(attentions|hidden_states|router_logits|logits)|.*flash.*|\w+_implementation"
    r"|chunk_size_feed_forward|full_attn_mod|quantization_config"
)
# With these names 1 means the same as absence; attention_multiplier's absence is 1/√head_dim.
_NEUTRAL = re.compile(r"(?!attention).*(multiplier|scal|factor).*")
# Keys with the only value that is supported; with another the model would compute something else.
_FIXED = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "cross_attention_hidden_size": None,
    "clip_qkv": None,
}
# What each key may hold. For an optional key null means the same as leaving it out.
_ACCEPTED = {
    **{key: FIELDS[field] for key, field in OF_KEYS.items()},
    "sliding_window": COUNT,
    **dict.fromkeys(("rope_theta", "partial_rotary_factor"), POSITIVE),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), TRUTH),
    "max_window_layers": whole(0),
    "layer_types": NAMES,
    **dict.fromkeys(("model_type", "hidden_act"), NAME),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), OBJECT),
}
_ORIGINAL = "original_max_position_embeddings"
# By rope_type the keys that it must have and those that it may have: fields of RopeScaling, …
_ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}, set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor", _ORIGINAL},
        {"attention_factor", "beta_fast", "beta_slow", "truncate", "llama_4_scaling_beta"},
    ),
    "longrope": ({_ORIGINAL, "short_factor", "long_factor"}, {"factor", "attention_factor"}),
    "proportional": (set(), {"factor", "share"}),
}
_ROPE_FIELDS = {  # … of these names, where they are not those of the keys
    _ORIGINAL: "original_max_position",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "llama_4_scaling_beta": "temperature",
}
_ROPE_ACCEPTED = {
    **SCALING_FIELDS,
    **{key: SCALING_FIELDS[field] for key, field in _ROPE_FIELDS.items()},
    **dict.fromkeys(("type", "rope_type"), NAME),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), POSITIVE),
}
_YARN_MSCALES = {"mscale", "mscale_all_dim", "max_position_embeddings"}


def check_keys(where: object, accepted: Mapping[str, Accepts], config: Mapping[str, Any]) -> None:
    for key, accepts in accepted.items():
        if config.get(key) is not None:
            accepts.check(where, key, config[key])


def _listed(keys: Iterable[object]) -> str:
    return ", ".join(shown(key) for key in keys)


def from_hugging_face(
    config: Mapping[str, Any], name: str, file: object | None = None
) -> ModelConfig:
    """The architecture in a Hugging Face config.json of a model_type in ARCHITECTURES.

    file: its name in error messages; `name` if not given. Raises CheckpointError for another type,
    for a missing or impossible value, and for a key that is not understood.
    """
    where = file or name
    if str(config.get("model_type")) not in ARCHITECTURES:
        from quantbench.models import picture

        config = picture.config_of(config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: model_type {shown(kind)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    row = ARCHITECTURES[kind]
    if row.experts and not config.get("sliding_window"):  # transformers writes 0 for none
        config = {key: value for key, value in config.items() if key != "sliding_window"}
    if config.get("num_hidden_layers") is not None:  # before anything has a part for each layer
        LAYERS.check(where, "num_hidden_layers", config["num_hidden_layers"])
    if row.described:
        config = pkgutil.resolve_name(row.described)(config, where)
    config = _one_rope(config, where)
    given_rope = config.get("rope_parameters") or config.get("rope_scaling")
    if kind == "phi3" and isinstance(given_rope, Mapping):
        # As its config class has it.
        config = {_ORIGINAL: 4096, **config, "rope_parameters": _of_phi(given_rope)}
    accepted = _understood(row, config, where)
    needed = [key for key in _REQUIRED if _REQUIRED[key] not in row.defaults]
    missing = [key for key in (*needed, *row.required) if config.get(key) is None]
    if missing:
        raise CheckpointError(f"{where}: config has no {', '.join(missing)}")
    check_keys(where, accepted, config)

    values: dict[str, Any] = {"norm_eps": 1e-6, **row.defaults}
    theta = values.pop("rope_theta", 10000.0)
    sets = {key: (field,) for key, field in OF_KEYS.items()}
    for key, fields in {**sets, **row.fields}.items():
        value = config.get(key)
        null = key in config and all(FIELDS[field].test(None) for field in fields)
        if value is not None or null:
            values |= {
                field: row.converted[field](value) if field in row.converted else value
                for field in fields
            }
    values.setdefault("num_kv_heads", values["num_heads"])
    if "head_dim" not in values:
        values["head_dim"] = head_width(values["dim"], values["num_heads"], where)
    values |= _windows(row, config, values, where)
    if row.recurrent:
        values |= row.recurrent.read(config, values["num_layers"], where)
    if config.get("num_experts", row.experts.get("num_experts")):
        from quantbench.models.mixture_keys import mixture

        try:
            values["mixture"] = mixture(config, row.experts, row.accepts, values["num_layers"])
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
    rope = _rope(config, where, theta, values.get("max_position"), row.partial_rotary)
    if (share := rope.pop("rotary_share")) != 1:
        values["rotary_dim"] = int(values["head_dim"] * share)
    if "no_rope_layers" in values:  # the list may be longer than the model
        values["no_rope_layers"] = tuple(
            i for i in values["no_rope_layers"] if i < values["num_layers"]
        )
    values["extras"] = tuple((key, config[key]) for key in row.extras if key in config)
    return ModelConfig(name=name, **values, **rope, architecture=row.name)


def _understood(row: Architecture, config: Mapping[str, Any], where: object) -> dict[str, Accepts]:
    """What each key may hold. Raises CheckpointError for a key that is not understood."""
    accepted = _ACCEPTED | {key: FIELDS[fields[0]] for key, fields in row.fields.items()}
    accepted |= {**row.extras, **row.accepts}
    if row.recurrent:
        accepted |= row.recurrent.accepted
    if row.experts:
        from quantbench.models.mixture_keys import EXPERT_KEYS

        accepted |= EXPERT_KEYS
    fixed = {k: v for k, v in (_FIXED | dict(row.fixed)).items() if k not in row.harmless}
    if row.partial_rotary is not None:
        del fixed["partial_rotary_factor"]
    for key, value in config.items():
        if key in fixed and value != fixed[key] and not _is_off(key, value):
            text = "given" if isinstance(value, Mapping) else shown(value)
            raise CheckpointError(f"{where}: {key} {text} is not supported; only {fixed[key]!r} is")
        if key in fixed or key in accepted or key in row.harmless or _is_off(key, value):
            continue
        if _ARITHMETIC.search(key) and not _HARMLESS.fullmatch(key):
            raise CheckpointError(
                f"{where}: config key {shown(key)} is not understood, and it may change the result"
            )
    return accepted


def _is_off(key: str, value: Any) -> bool:
    """Whether a key with this value means what its absence means."""
    is_neutral = value == 1 and bool(_NEUTRAL.fullmatch(key))
    return value in (None, False, {}, []) or is_neutral or (key, value) == ("hidden_act", "swish")


def head_width(dim: Any, heads: Any, where: object) -> int:
    if dim % heads:
        raise CheckpointError(f"{where}: hidden_size {dim} does not divide into {heads} heads")
    return dim // heads


_KINDS = {"full_attention": False, "sliding_attention": True}  # whether it has the window


def _windows(
    row: Architecture, config: Mapping[str, Any], values: Mapping[str, Any], where: object
) -> dict[str, Any]:
    """The sliding window, and the layers without it. Raises CheckpointError."""
    count, kinds = values["num_layers"], config.get("layer_types")
    window = config.get("sliding_window", values.get("sliding_window"))
    if row.window is None or window is None:
        return {"sliding_window": None}
    if kinds and (len(kinds) != count or not _KINDS.keys() >= set(kinds)):
        raise CheckpointError(
            f"{where}: layer_types {_listed(sorted(set(kinds)))} of {len(kinds)} layers; accepted "
            f"are {' and '.join(_KINDS)}, one for each of the {count} layers"
        )
    narrow = [_KINDS[kinds[i]] if kinds else row.window(i, config) for i in range(count)]
    if not any(narrow):
        return {"sliding_window": None}
    full = tuple(i for i in range(count) if not narrow[i])
    return {"sliding_window": window, "full_layers": full}


def _one_rope(config: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """A config.json of transformers 5 with rotary parameters by kind of layer, in the words of
    transformers 4. Raises CheckpointError for scaling of layers with a window."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or not _KINDS.keys() >= rope.keys() or not rope:
        return config
    for kind in rope:
        OBJECT.check(where, f"rope_parameters: {kind}", rope[kind])
    narrow = _rope({"rope_parameters": rope.get("sliding_attention")}, where, 10000.0)
    if "rope_scaling" in narrow:
        raise CheckpointError(f"{where}: rotary scaling of sliding_attention is not supported")
    full = rope.get("full_attention")
    return {**config, "rope_parameters": full, "rope_local_base_freq": narrow["rope_theta"]}


def _of_phi(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Phi-3's first files call longrope su or yarn."""
    old = (key for key in ("type", "rope_type") if rope.get(key) in ("su", "yarn"))
    return {**rope, **dict.fromkeys(old, "longrope")}


def _rope(
    config: Mapping[str, Any],
    where: object,
    default: float,
    context: int | None = None,
    partial: float | None = None,
) -> dict[str, Any]:
    """Rotary theta, `default` if absent, scaling, and the share of a head that rotates, from the
    keys of transformers 4 or 5.

    context: the model's positions. partial: the share if absent; None: it must be 1.
    """
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    rope = {k: v for k, v in rope.items() if v or v is not None and k not in _YARN_MSCALES}
    check_keys(where, _ROPE_ACCEPTED, rope)
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    theta = default if theta is None else theta
    old_kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or old_kind or "default"
    share = rope.pop("partial_rotary_factor", None)
    if kind == "proportional":  # which pads the rotations itself
        rope, share = {"factor": 1.0, "share": 1.0 if share is None else share, **rope}, None
    if partial is None and share not in (None, 1.0):
        raise CheckpointError(f"{where}: a partial rotary embedding is not supported")
    share = config.get("partial_rotary_factor") if share is None else share
    rotation = {"rope_theta": theta, "rotary_share": (partial or 1.0) if share is None else share}
    if kind == "default":
        return rotation
    if kind not in _ROPE_KEYS:
        raise CheckpointError(
            f"{where}: rotary scaling {shown(kind)} is not supported; supported: default, "
            f"{', '.join(_ROPE_KEYS)}"
        )
    keys, optional = _ROPE_KEYS[kind]
    notes = _YARN_MSCALES if kind == "yarn" else set()
    if kind == "dynamic" or (kind in ("yarn", "llama3") and _ORIGINAL not in rope):
        rope[_ORIGINAL] = context
        keys = keys | {_ORIGINAL}
    original = config.get(_ORIGINAL)
    if kind == "longrope" and original is not None:  # as in transformers it comes first
        rope[_ORIGINAL] = original
    missing = keys - rope.keys()
    unknown = rope.keys() - keys - optional - notes - {"finetuned"}
    if missing or unknown:
        wrong = _listed(sorted(missing or unknown))
        verb = "lacks" if missing else "has keys that are not understood:"
        raise CheckpointError(f"{where}: {kind} rotary scaling {verb} {wrong}")
    for key in sorted(keys):
        _ROPE_ACCEPTED[key].check(where, key, rope[key])
    fields = {
        _ROPE_FIELDS.get(key, key): rope[key]
        for key in keys | optional
        if rope.get(key) is not None
    }
    if kind == "longrope" and "factor" not in fields:
        fields["factor"] = (context or 1) / fields["original_max_position"]
    if kind in ("yarn", "longrope") and "attention_factor" not in fields:
        fields["attention_factor"] = _attention_factor(kind, fields, rope)
    try:
        scaling = RopeScaling(**fields, kind=kind)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return rotation | {"rope_scaling": scaling}


def _attention_factor(kind: str, fields: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied by if the file does not say it."""
    growth = math.log(max(fields["factor"], 1))
    if kind == "longrope":
        return math.sqrt(1 + growth / math.log(fields["original_max_position"]))
    scale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if scale and all_dim:
        return float((0.1 * scale * growth + 1) / (0.1 * all_dim * growth + 1))
    return 0.1 * growth + 1
