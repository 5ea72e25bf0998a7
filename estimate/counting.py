"""What a forward pass computes, reads, writes, exchanges and holds, counted from shapes alone.

    count_module(module, tokens)                                # any nn.Module on the meta device
    count_model(config, "int4wo-128", batch=4, tokens=1, depth=1024)    # ours: a decoding step
    count_config("config.json", batch=16, tokens=1024)          # any model of transformers

Bytes of a product are those of its weight as it is stored, and of the activations in and out, each
once. Caches of the processor, and operations that a compiler fuses, are left to whoever turns
bytes into seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import files
from devices import stored_bytes
from errors import CheckpointError, KernelError, QuantbenchError, UsageError
from estimate.recording import Alive, Collective, Kind, Recorder, Work, merged, pairs
from kv_cache import CACHES
from kv_cache.base import KVCache
from models import build
from models.accepted import COUNT, LAYERS
from models.config import ModelConfig
from models.hugging_face import check_keys
from models.split import Split
from ops.ranks import Ranks
from quantize.registry import Quantizer
from quantize.spec import FullPrecision, Spec, parse_scheme
from run.cutting import split_for
from run.sizes import kv_cache_bytes
from text import shown

Logits = Literal["last", "all", "none"]
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


@dataclass(frozen=True)
class Count:
    """What one forward pass does. Where ranks share a model, it is what one rank does."""

    works: tuple[Work, ...]
    collectives: tuple[Collective, ...]
    weight_bytes: int  # of all weights in memory; one that is used twice counts once
    kv_cache_bytes: int  # of the caches as they are allocated
    peak_activation_bytes: int  # of tensors that the pass makes, at the moment when they are most
    peak_tensors: tuple[Alive, ...]  # the tensors that are alive at that moment
    # What is allocated and freed: (number of the tensor, its bytes, or 0 when it is freed).
    events: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    weight_tensors: tuple[int, ...] = field(default=(), repr=False)  # bytes of each, in order

    @property
    def flops(self) -> float:
        return sum(work.flops for work in self.works)

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(work.bytes_read + work.bytes_written for work in self.works)

    def of_kind(self, kind: Kind) -> tuple[Work, ...]:
        return tuple(work for work in self.works if work.kind == kind)


def count_module(module: nn.Module, *inputs: Any, **named: Any) -> Count:
    """Count module(*inputs, **named). Module and inputs are on the meta device.

    Raises UsageError where they are not, for there everything would really be computed.
    """
    return _counted(module, inputs, named, lambda recorder: module(*inputs, **named))


def _counted(
    module: nn.Module,
    inputs: Any,
    named: Any,
    call: Any,
    formats: dict[str, str] | None = None,
    read_shares: dict[str, float] | None = None,
) -> Count:
    given = [*module.parameters(), *module.buffers()]
    elsewhere = next((t for t in given if not t.is_meta), None)
    if elsewhere is not None:
        raise UsageError(
            f"a module is counted on the meta device; this one is on {elsewhere.device}: build it "
            'inside `with torch.device("meta"):`'
        )
    recorder = Recorder(module, (inputs, named), formats, read_shares)
    with torch.no_grad(), recorder:
        result = call(recorder)
    events = tuple(recorder.events)
    del result  # what it returns is alive until here
    sizes = tuple(map(stored_bytes, module.parameters()))  # a tied weight is one parameter
    return Count(
        merged(recorder.works),
        exchanged(recorder.collectives),
        sum(sizes),
        0,
        recorder.peak_bytes,
        recorder.peak_tensors,
        events,
        sizes,
    )


def exchanged(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """The collectives with those of the same kind and size summed."""
    calls: dict[tuple[Any, int], int] = {}
    for one in collectives:
        calls[one.kind, one.bytes] = calls.get((one.kind, one.bytes), 0) + one.calls
    return tuple(Collective(kind, size, count) for (kind, size), count in calls.items())


# ---------------------------------------------------------------------------------- our models


def count_model(
    config: ModelConfig,
    scheme: str | Spec = "none",
    kv_cache: str = "dense",
    batch: int = 1,
    tokens: int = 1,
    depth: int = 0,
    tp: int = 1,
    logits: Logits = "last",
    precision: torch.dtype = torch.bfloat16,
    *,
    device: torch.device | str = "cpu",
    chunk: int | None = None,
    cache_size: int | None = None,
) -> Count:
    """Count a pass of our model over `tokens` new positions of `batch` sequences.

    depth: positions that the caches hold before. tp: ranks; the count is of the first.
    logits: of the last position, of all, or none. device: where it would run; it decides how
    kernels store weights. chunk: positions per pass; if not given, all in one. cache_size:
    positions of the caches; if not given, as many as are filled at the end.

    Raises UsageError for a number of ranks or a cache that the model does not take, KernelError for
    a scheme that does not take the model's shapes.
    """
    spec = parse_scheme(scheme) if isinstance(scheme, str) else scheme
    device = torch.device(device)
    size = cache_size or depth + tokens
    split = split_for(config, _CountedRanks(0, tp), spec) if tp > 1 else None
    mine = split.config if split else config
    steps = range(0, tokens, chunk or tokens)
    passes = [
        _pass(
            config,
            split,
            spec,
            kv_cache,
            batch,
            min(chunk or tokens, tokens - first),
            depth + first,
            size,
            logits if first == steps[-1] or logits == "all" else "none",
            precision,
            device,
        )
        for first in steps
    ]
    peak = max(passes, key=lambda one: one.peak_activation_bytes)
    return replace(
        peak,
        works=merged([work for one in passes for work in one.works]),
        collectives=exchanged([c for one in passes for c in one.collectives]),
        kv_cache_bytes=kv_cache_bytes(mine, batch, size, precision, CACHES[kv_cache]),
    )


def _pass(
    config: ModelConfig,
    split: Split | None,
    spec: Spec,
    kv_cache: str,
    batch: int,
    tokens: int,
    depth: int,
    cache_size: int,
    logits: Logits,
    precision: torch.dtype,
    device: torch.device,
) -> Count:
    """One pass. Layers of a kind are alike, so a second one's work stands for that of the rest."""

    def of_layers(few: ModelConfig) -> Count:
        layers = few.num_layers
        cut = None if split is None else Split(few, split.ranks, split.unit)
        with torch.device("meta"):
            model = build(few, cut).to(precision)
        formats = _quantize(model, spec, device, precision)
        table, output = model.tok_embeddings, model.output
        alike = type(table.weight.data) is type(output.weight.data)
        if config.tie_embeddings and alike and table.weight.shape == output.weight.shape:
            output.weight = table.weight  # packed, it would have another shape
        own = model.config
        stored = [
            CACHES[kv_cache](batch, own.num_kv_heads, cache_size, own.head_dim, precision, "meta",
                             own.sliding_window)
            for _ in range(layers)
        ]  # fmt: skip
        ids = torch.empty(batch, tokens, dtype=torch.long, device="meta")
        positions = torch.empty(tokens, dtype=torch.long, device="meta")

        def call(recorder: Recorder) -> Tensor:
            if split is not None:
                split.ranks.recorder = recorder  # type: ignore[attr-defined]
            caches: Any = [_CountedCache(cache, batch, recorder, device) for cache in stored]
            x = model.hidden(ids, positions, caches, start=depth)
            if logits == "none":
                return x
            return model.logits(x[:, -1:] if logits == "last" else x)

        shares = _read_shares(model, few, batch * tokens)
        return _counted(model, (ids, positions), {}, call, formats, shares)

    kinds, alike = config.kinds_of_layers(), config
    if len(kinds) > 1 and config.mixture:  # layers with experts come first among the kinds
        alike = replace(config, mixture=replace(config.mixture, dense_layers=()))
    first = total = of_layers(alike.with_layers(1))
    further = [(alike.with_layers(2), kinds[0] - 1)] if kinds[0] > 1 else []
    further += [(config.one_of_each_kind(), more) for more in kinds[1:]]
    for two, more in further:
        total = _with_more(total, first, of_layers(two), more)
    return total


def _with_more(total: Count, first: Count, second: Count, more: int) -> Count:
    """The total with `more` layers of which each adds what `second` has beyond `first`."""
    works = [*total.works, *(work.times(more) for work in second.works)]
    works += [work.times(-more) for work in first.works]
    exchanges = [*total.collectives, *(one.times(more) for one in second.collectives)]
    exchanges += [one.times(-more) for one in first.collectives]
    peak = second.peak_activation_bytes - first.peak_activation_bytes
    return replace(
        second,
        works=tuple(work for work in merged(works) if work.calls),
        collectives=tuple(one for one in exchanged(exchanges) if one.calls),
        weight_bytes=total.weight_bytes + more * (second.weight_bytes - first.weight_bytes),
        peak_activation_bytes=total.peak_activation_bytes + more * peak,
    )


def _read_shares(model: nn.Module, config: ModelConfig, tokens: int) -> dict[str, float]:
    """How often an expert's weight is read for each expert that is counted, by the layers' names.

    On the meta device tokens are spread over as many experts as possible. Really some choose the
    same ones: so many that X · (1 − (1 − k/X)^tokens) are read on average.
    """
    mixture = config.mixture
    if mixture is None:
        return {}
    counted = min(mixture.num_experts, tokens * mixture.experts_per_token)
    share = mixture.distinct(tokens) / counted
    return {name: share for name, _ in model.named_modules() if ".experts." in name}


def _quantize(
    model: nn.Module, spec: Spec, device: torch.device, precision: torch.dtype
) -> dict[str, str]:
    """Put each layer's weight into the form in which its kernel stores it on `device`; where none
    can run here, into the form in which it is saved. Returns the packed layers' formats."""
    if isinstance(spec, FullPrecision):
        return {}
    try:
        runs = device.type == "cpu" or bool(getattr(torch, device.type).is_available())
        quantizer = Quantizer(spec, device, precision, "auto" if runs else None)
    except KernelError:
        quantizer, runs = Quantizer.of_shapes(spec, device, precision), False
    formats = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        layer = quantizer.quantized(name, module)
        if isinstance(layer, nn.Linear):
            formats[name] = str(spec)
            layer = quantizer.stored(name, layer) if runs else layer
        model.set_submodule(name, layer)
    return formats


class _CountedRanks(Ranks):
    """Ranks that exchange nothing, and record what they would."""

    recorder: Recorder

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def sum(self, x: Tensor) -> Tensor:
        self.recorder.exchange("all_reduce", x)
        return x

    def gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        self.recorder.exchange("all_gather", x)
        width = sum(widths) if widths else self.size * x.shape[-1]
        return self.recorder.make(x, (*x.shape[:-1], width), "all_gather")


class _CountedCache:
    """A layer's cache that records its attention instead of computing it.

    Decoding reads the stored keys and values once for all heads that share them. In a prompt the
    chunk's own keys and values are read as they come, those before it as they are stored. On the
    CPU all pairs of the chunk with itself are computed and half of them masked
    (ops/prefill_attention.py); flash attention on other devices leaves them out.
    """

    def __init__(
        self, cache: KVCache, sequences: int, recorder: Recorder, device: torch.device
    ) -> None:
        self.cache, self.recorder, self.device = cache, recorder, device
        self.sequences = sequences

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        input_pos: Tensor,
        start: int | None = None,
    ) -> Tensor:
        assert start is not None
        cache, (B, H, S, E) = self.cache, query.shape
        a_slot = cache.nbytes // (cache.slots * self.sequences)  # of one sequence
        end = start + S
        own = B * S * a_slot  # what is stored of the chunk
        if S == 1:
            keys = min(end, cache.slots)
            seen, read, name = keys, B * keys * a_slot, "attention:decode"
        else:
            past = min(start, cache.slots)
            keys, name = past + S, "attention:prompt"
            read = B * past * a_slot + key.nbytes + value.nbytes
            seen = pairs(S, end, start, cache.window)
            if self.device.type == "cpu":
                seen += S * S - pairs(S, S, 0, cache.window)
        return self.recorder.attention(
            query, read, B * H * seen, E, cache.format, name, keys=keys, written=own
        )


# ---------------------------------------------------------------------------------- transformers


def config_fields(path: str | Path) -> dict[str, Any]:
    """What stands in a config.json, or in that of a folder. Raises CheckpointError."""
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
    config: str | Path | Mapping[str, Any],
    batch: int = 1,
    tokens: int = 1,
    depth: int = 0,
    logits: Logits = "last",
    precision: torch.dtype = torch.bfloat16,
    cached: bool = True,
    name: str = "config.json",
) -> Count:
    """Count a pass of the causal language model that transformers builds from a config.json.

    config: the file, a folder that holds one, or what stands in one; then messages call it `name`.
    The other arguments are those of `count_model`. cached: whether keys and values are kept.
    Raises UsageError without transformers, CheckpointError for a config that is not understood.
    """
    if depth and not cached:
        raise UsageError("positions before the pass are kept in a cache: leave out cached=False")
    if isinstance(config, Mapping):
        fields: Mapping[str, Any] = config
    else:
        fields, name = config_fields(config), str(config)
    made = _config_of(fields, name)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, DynamicCache

    if type(made) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        part = made.model_type != fields["model_type"]
        raise CheckpointError(
            f"{name}: transformers has no causal language model of {fields['model_type']}"
            f"{' alone' if part else ''}, and no other is counted; give the config.json of one of "
            "the same shape"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made, dtype=precision)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise CheckpointError(f"{name}: transformers builds no model: {_said(error)}") from None
    model.to("meta").eval().requires_grad_(False)  # some classes make a buffer elsewhere
    given: dict[str, Any] = {"use_cache": cached}
    if logits == "last":
        given["logits_to_keep"] = 1
    try:
        if cached:
            given["past_key_values"] = DynamicCache(config=made)
        if depth:
            before = torch.empty(batch, depth, dtype=torch.long, device="meta")
            with torch.device("meta"), torch.no_grad(), Recorder(model, before):
                model(before, use_cache=True, past_key_values=given["past_key_values"])
        ids = torch.empty(batch, tokens, dtype=torch.long, device="meta")
        with torch.device("meta"):
            count = _counted(model, ids, given, lambda recorder: model(ids, **given))
        return _with_cache(count, given.get("past_key_values"))
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise QuantbenchError(
            f"{name}: this architecture cannot be counted from its shapes: {_said(error)}"
        ) from None


def _with_cache(count: Count, cache: Any) -> Count:
    """The count with the keys and values that are kept as a cache: the pass makes them anew, by
    concatenation, so they are among its activations."""
    layers = getattr(cache, "layers", None) or ()
    tensors = [t for layer in layers for name in ("keys", "values")
               if isinstance(t := getattr(layer, name, None), Tensor)]  # fmt: skip
    cached = sum(tensor.nbytes for tensor in tensors)
    rest = max(0, count.peak_activation_bytes - cached)
    return replace(count, kv_cache_bytes=cached, peak_activation_bytes=rest)


def _said(error: Exception) -> str:
    """An error of another package, in one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return shown(words, 200)
