"""The counts of our own models: of each scheme, cache and number of ranks.

    count_model(Request(config, "int4wo-128"), device, tokens=1, depth=1024)    # a step; Count

Linear layers, whose weights may be packed, and attention over caches are recorded whole. One layer
of each kind is counted, and stands for the others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from quantbench.devices import prefill_chunk
from quantbench.estimate.counting import Collective, Count, Recorder, pairs
from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import KVCache, LayerMemory
from quantbench.kv_cache.shared import source_of
from quantbench.models import build
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.models.split import Split
from quantbench.ops.ranks import Ranks
from quantbench.parallel.split_loading import split_for
from quantbench.quantize.spec import FullPrecision, Spec, parse_scheme
from quantbench.run.decoding import state_of
from quantbench.run.sizes import kv_cache_bytes, quantize_shapes

if TYPE_CHECKING:
    from quantbench.estimate.predict import Request

Item = TypeVar("Item")


def count_model(
    request: "Request", device: torch.device, tokens: int, depth: int, cache_size: int | None = None
) -> Count:
    """Count a pass of our model over `tokens` new positions of each sequence, the last of which has
    logits. The count is of the first rank.

    device: where it would run; it decides how kernels store weights, and how many positions a pass
    has if the request does not say. depth: positions that the caches hold before. cache_size:
    positions of the caches; if not given, as many as are filled at the end.

    Raises UsageError for a number of ranks or a cache that the model does not take, KernelError for
    a scheme that does not take the model's shapes.
    """
    config, spec, batch = request.config, parse_scheme(request.scheme), request.batch
    assert not isinstance(config, str)
    precision: torch.dtype = getattr(torch, request.precision)
    split = split_for(config, _CountedRanks(0, request.tp), spec) if request.tp > 1 else None
    size, chunk = cache_size or depth + tokens, request.chunk or prefill_chunk(device, batch)
    run = _Run(spec, CACHES[request.kv_cache], size, batch, precision, device, split)
    passes = []
    for first in range(0, tokens, chunk):
        some = min(chunk, tokens - first)
        passes.append(_whole(run, config, some, depth + first, first + some == tokens))
    own = split.config if split else config
    return replace(
        max(passes, key=lambda one: one.peak_activation_bytes),
        works=sum((one.works for one in passes), Counter()),
        collectives=sum((one.collectives for one in passes), Counter()),
        kv_cache_bytes=kv_cache_bytes(own, batch, size, precision, run.cache),
    )


def _whole(run: "_Run", config: ModelConfig, tokens: int, depth: int, last: bool) -> Count:
    """The first layer is counted, with those whose keys and values others share; of each kind the
    rest adds what one more layer adds."""
    kinds = config.kinds_of_layers()
    shared = (numbers[0] for numbers in kinds if config.layers[numbers[0]].shared)
    first = sorted({kinds[0][0], *(source_of(config.layers, number) for number in shared)})
    base = total = run.count(config.picked(first), tokens, depth, last)
    rest = ([number for number in numbers if number not in first] for numbers in kinds)
    for layers in filter(None, rest):
        more, n = run.count(config.picked([*first, layers[0]]), tokens, depth, last), len(layers)
        numbers = (
            getattr(total, name) + n * (getattr(more, name) - getattr(base, name))
            for name in ("weight_bytes", "block_bytes", "kv_cache_bytes", "peak_activation_bytes")
        )
        total = Count(
            total.works + _times(n, more.works - base.works),
            total.collectives + _times(n, more.collectives - base.collectives),
            *numbers,
        )
    return total


def _times(number: int, counter: Counter[Item]) -> Counter[Item]:
    return Counter({item: number * times for item, times in counter.items()})


@dataclass(frozen=True)
class _Run:
    """What all passes of a run have in common."""

    spec: Spec
    cache: type[KVCache]
    cache_size: int  # positions
    batch: int
    precision: torch.dtype
    device: torch.device
    split: Split | None

    def count(self, few: ModelConfig, tokens: int, depth: int, last: bool) -> Count:
        """One pass of a model of a few layers, or of a rank's part of it. last: whether it has the
        logits."""
        part = self.split and Split(few, self.split.ranks, self.split.unit)
        with torch.device("meta"):
            model = build(few, part).to(self.precision)
            ids = torch.empty(self.batch, tokens, dtype=torch.long)
            positions = torch.empty(tokens, dtype=torch.long)
        formats = self._quantize(model)
        table, output = model.tok_embeddings, model.output
        alike = type(table.weight.data) is type(output.weight.data)
        if few.tie_embeddings and alike and table.weight.shape == output.weight.shape:
            output.weight = table.weight  # packed, it would have another shape
        caches: Any = [self._cache(model, i, depth) for i in range(few.num_layers)]
        recorder = Recorder(model, (ids, positions))
        for one in [*caches, *([part.ranks] if part else [])]:
            object.__setattr__(one, "recorder", recorder)
        share = self._chosen(few, self.batch * tokens)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) or name in formats:
                read = share if ".experts." in name else 1.0
                layer.forward = partial(recorder.linear, layer, formats.get(name), read)
        with torch.no_grad(), recorder:
            x = model.hidden(ids, positions, caches)
            if last:
                x = model.logits(x[:, -1:])
        return recorder.count()

    def _cache(self, model: Transformer, number: int, depth: int) -> "_CountedCache | LayerMemory":
        """A layer's memory. What a state does is recorded as any other operation."""
        config, spec = model.config, model.config.layers[number]
        if spec.recurrent:
            return state_of(config.recurrent, config.dim, self.batch, self.precision, "meta")
        shape = self.batch, spec.kv_heads, self.cache_size, spec.head_dim
        cache = _CountedCache(
            self.cache(*shape, self.precision, "meta", spec.window), self.batch, depth, self.device
        )
        cache.writes = not spec.shared
        model.layers[number].attention.attend = cache.attend  # type: ignore[union-attr]
        return cache

    def _chosen(self, config: ModelConfig, rows: int) -> float:
        """How often an expert's weight is read for each call of it. On the meta device tokens are
        spread over as many experts as possible; really some choose the same ones."""
        mixture = config.mixture
        if mixture is None:
            return 1.0
        return mixture.distinct(rows) / min(mixture.num_experts, rows * mixture.experts_per_token)

    def _quantize(self, model: Transformer) -> dict[str, str]:
        """Quantize the layers for a kernel of the device; where that is not here, as they are
        saved. Returns the packed layers' formats."""
        spec, device = self.spec, self.device
        if isinstance(spec, FullPrecision):
            return {}
        here = device.type == "cpu" or getattr(torch, device.type).is_available()
        kernel = "auto" if here else None
        linears, *_ = quantize_shapes(model, spec, device, self.precision, kernel)
        return dict.fromkeys(linears, str(spec))


class _CountedRanks(Ranks):
    """Ranks that exchange nothing, and record what they would."""

    recorder: Recorder

    def sum(self, x: Tensor) -> Tensor:
        self.recorder.collectives[Collective("all_reduce", x.nbytes)] += 1
        return x

    def gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        self.recorder.collectives[Collective("all_gather", x.nbytes)] += 1
        return x.new_empty((*x.shape[:-1], sum(widths) if widths else self.size * x.shape[-1]))


class _CountedCache:
    """A layer's cache that records its attention instead of computing it.

    Decoding reads the stored keys and values once for all heads that share them. In a prompt the
    chunk's own keys and values are read as they come, those before it as they are stored. On the
    CPU all pairs of the chunk with itself are computed and half of them masked
    (ops/attend.py); flash attention on other devices leaves them out.
    """

    recorder: Recorder
    writes = True  # whether keys and values are this layer's own

    def __init__(self, cache: KVCache, sequences: int, depth: int, device: torch.device) -> None:
        self.cache, self.depth, self.device = cache, depth, device
        self.slot_bytes = cache.nbytes // (cache.slots * sequences)  # of one sequence

    def update(self, positions: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def stored(self, name: str, rows: int) -> Tensor:
        """The cache of a layer that reads an earlier layer's: `attend` counts what it reads."""
        return torch.empty(0, device="meta")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        cache, start, (B, H, S, E) = self.cache, self.depth, query.shape
        if S == 1:
            seen = keys = min(start + 1, cache.slots)
            read = B * keys * self.slot_bytes
        else:
            past = min(start, cache.slots)
            keys, read = past + S, B * past * self.slot_bytes + key.nbytes + value.nbytes
            seen = pairs(S, start + S, start, cache.window)
            if self.device.type == "cpu":
                seen += S * S - pairs(S, S, 0, cache.window)
        written = B * S * self.slot_bytes if self.writes else 0
        return self.recorder.attention(query, B * H * seen, E, read, cache.format, keys, written)
