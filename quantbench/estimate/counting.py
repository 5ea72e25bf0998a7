"""What a forward pass computes, reads, writes, exchanges and holds, counted from shapes alone.

    count_module(module, tokens)                                # any nn.Module on the meta device
    count_model(config, "int4wo-128", batch=4, tokens=1, depth=1024)    # ours: a decoding step

Bytes of a product are those of its weight as it is stored, and of the activations in and out, each
once. Caches of the processor, and operations that a compiler fuses, are left to whoever turns
bytes into seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quantbench.devices import stored_bytes
from quantbench.errors import KernelError, UsageError
from quantbench.estimate.recording import Alive, Collective, Kind, Recorder, Work, merged, pairs
from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import KVCache
from quantbench.models import build
from quantbench.models.config import ModelConfig
from quantbench.models.split import Split
from quantbench.ops.ranks import Ranks
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import FullPrecision, Spec, parse_scheme
from quantbench.run.cutting import split_for
from quantbench.run.sizes import kv_cache_bytes

Logits = Literal["last", "all", "none"]


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
    return counted(module, inputs, named, lambda recorder: module(*inputs, **named))


def counted(
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
            caches: Any = [_CountedCache(cache, batch, depth, recorder, device) for cache in stored]
            for layer, cache in zip(model.layers, caches, strict=True):
                layer.attention.attend = cache.attend  # type: ignore[union-attr]
            x = model.hidden(ids, positions, caches)
            if logits == "none":
                return x
            return model.logits(x[:, -1:] if logits == "last" else x)

        shares = _read_shares(model, few, batch * tokens)
        return counted(model, (ids, positions), {}, call, formats, shares)

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
        self,
        cache: KVCache,
        sequences: int,
        depth: int,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self.cache, self.recorder, self.device = cache, recorder, device
        self.sequences, self.depth = sequences, depth

    def update(self, positions: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        cache, start, (B, H, S, E) = self.cache, self.depth, query.shape
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
