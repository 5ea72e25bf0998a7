"""The same counts for any model that transformers builds from a config.json, on the meta device.

count_config("config.json", batch=16, tokens=1024)          # Count
doubts("config.json")                                       # what it does not say
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantbench import files
from quantbench.errors import CheckpointError, QuantbenchError, UsageError
from quantbench.estimate.counting import Count, Recorder, count_module
from quantbench.models.config_checks import COUNT, LAYERS
from quantbench.models.hugging_face import check_keys
from quantbench.text import shown

# How the names of transformers' classes end that generate text.
GENERATE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# What a config.json has to say of a model, and the keys under which the classes of transformers
# have it. They take defaults for what is missing.
SAID = {
    "its width": ("hidden_size", "n_embd", "d_model"),
    "its number of layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
}
# What these may hold. On the meta device nothing fails for numbers that no model has.
_POSSIBLE = {
    **dict.fromkeys(SAID["its width"], COUNT),
    **dict.fromkeys(SAID["its number of layers"], LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "vocab_size"), COUNT),
}


def config_fields(path: str | Path) -> dict[str, Any]:
    """The fields of a config.json, or of that in a folder. Raises CheckpointError."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    fields = files.read_json("no config of transformers:", file, CheckpointError)
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise CheckpointError(f"{file}: no config of transformers: it has no model_type")
    return fields


def doubts(path: str | Path) -> list[str]:
    """What an estimate of a config.json's model does not say, each in a few words."""
    fields = config_fields(path)
    made = _config_of(fields, str(path))
    words = []
    if made.model_type != fields["model_type"]:
        kind = fields["model_type"]
        words.append(f"the text model of {kind} alone: its other weights are not counted")
    named = [name for name in fields.get("architectures") or [] if isinstance(name, str)]
    if named and not any(name.endswith(GENERATE) for name in named):
        words.append(f"{named[0]} generates no text: counted as if it did")
    return words


def _config_of(fields: Mapping[str, Any], name: str) -> Any:
    """The config of the language model; of one with pictures or sound, that of its text model."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise UsageError(
            f"{name}: counting a model of another architecture needs transformers: pip install "
            "transformers"
        ) from None
    try:
        others = {key: _decoded(value) for key, value in fields.items() if key != "model_type"}
        whole = AutoConfig.for_model(fields["model_type"], **others)
        config = whole.get_text_config()
    except Exception as error:  # its classes check their fields each in its own way
        raise CheckpointError(f"{name}: no config of transformers: {_said(error)}") from None
    part = next((key for key in whole.sub_configs if getattr(whole, key, None) is config), None)
    said = fields.get(part, fields) if part else fields
    for what, keys in SAID.items():
        if not any(isinstance(said.get(key), int) for key in keys):
            raise CheckpointError(
                f"{name}: it does not say {what} ({keys[0]}), and transformers would take another "
                "model's"
            )
    check_keys(name, _POSSIBLE, {key: said[key] for key in _POSSIBLE if key in said})
    heads, shared = (
        getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value")
    )
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise CheckpointError(
            f"{name}: {heads} query heads cannot share {shared} key/value heads evenly"
        )
    return config


def _decoded(value: Any) -> Any:
    """A value with infinities and NaN as numbers; transformers writes {"__float__": "Infinity"}."""
    match value:
        case {"__float__": str(number)}:
            return float(number)
        case dict():
            return {key: _decoded(item) for key, item in value.items()}
        case list():
            return [_decoded(item) for item in value]
    return value


def count_config(
    path: str | Path,
    batch: int = 1,
    tokens: int = 1,
    depth: int = 0,
    precision: torch.dtype = torch.bfloat16,
) -> Count:
    """Count a pass of the causal language model that transformers builds from a config.json, over
    `tokens` new positions of each sequence behind `depth` others. The last one has logits.

    path: of the file, or of a folder that holds one.
    Raises UsageError without transformers, CheckpointError for a config that is not understood.
    """
    fields, name = config_fields(path), str(path)
    made = _config_of(fields, name)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, DynamicCache

    if type(made) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        part = made.model_type != fields["model_type"]
        raise CheckpointError(
            f"{name}: transformers has no causal language model of {fields['model_type']}"
            f"{' alone' if part else ''}, and only these are counted; give the config.json of "
            "one of the same shape"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made, dtype=precision)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise CheckpointError(f"{name}: transformers builds no model: {_said(error)}") from None
    model.to("meta").eval().requires_grad_(False)  # some classes make a buffer elsewhere
    try:
        cache: Any = DynamicCache(config=made)
        with torch.device("meta"):
            before, ids = (torch.empty(batch, n, dtype=torch.long) for n in (depth, tokens))
            if depth:
                with torch.no_grad(), Recorder(model, before):
                    model(before, use_cache=True, past_key_values=cache)
            given = {"use_cache": True, "past_key_values": cache, "logits_to_keep": 1}
            return _with_cache(count_module(model, ids, **given), cache)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise QuantbenchError(
            f"{name}: this architecture cannot be counted from its shapes: {_said(error)}"
        ) from None


def _with_cache(count: Count, cache: Any) -> Count:
    """The count with the keys and values that are kept as a cache: the pass makes them anew, by
    concatenation, so they are among its activations."""
    tensors = [t for layer in cache.layers for name in ("keys", "values")
               if isinstance(t := getattr(layer, name, None), Tensor)]  # fmt: skip
    cached = sum(tensor.nbytes for tensor in tensors)
    rest = max(0, count.peak_activation_bytes - cached)
    return replace(count, kv_cache_bytes=cached, peak_activation_bytes=rest)


def _said(error: Exception) -> str:
    """An error of another package, in one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return shown(words, 200)
