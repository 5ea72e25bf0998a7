"""What a forward pass computes, reads, writes, exchanges and holds, counted from shapes alone.

    count_module(module, tokens)                                # any nn.Module on the meta device
    count_model(config, "int4wo-128", batch=4, tokens=1, depth=1024)    # ours: a decoding step

The pass runs on the meta device, where a tensor is a shape and a dtype; torch's dispatch mode sees
each operation, and torch.utils.flop_counter knows the operations of products. Layers with packed
weights and attention over our caches are recorded whole and do not run. Bytes are those of the
stored weight, and of the activations in and out, each once.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from quantbench.devices import stored_bytes
from quantbench.errors import KernelError, UsageError
from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import KVCache
from quantbench.models import build
from quantbench.models.config import ModelConfig
from quantbench.models.split import Split
from quantbench.ops.ranks import Ranks
from quantbench.quantize.kernel import KernelLinear
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import FullPrecision, Spec, parse_scheme
from quantbench.run.cutting import split_for
from quantbench.run.sizes import kv_cache_bytes

T = TypeVar("T", bound="Work | Collective")
Kind = Literal["linear", "attention", "rest"]
Logits = Literal["last", "all", "none"]
MIB = 1 << 20
aten = torch.ops.aten
# Operations that read only the chosen rows of a table, not all of it.
_GATHER = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.take}
# Operations that write into a tensor only what they are given; the latter also read those rows.
_SCATTER = {aten.index_put_, aten.index_copy_, aten.scatter_, aten.copy_, aten._index_put_impl_}
_SCATTER_ADD = {aten.index_add_, aten.scatter_add_}
_ALLOCATE = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided,
             aten.new_empty_strided}  # fmt: skip
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
# Products of rows (R, K), sorted by experts, with the experts' weights (X, K, N).
_GROUPED = {"aten._grouped_mm", "transformers.grouped_mm_fallback"}
# Models of transformers ask about numbers whether nothing is padded; there are none: yes.
_YES = {(True, False): 1.0, (False, True): True, (False, False): 1}


@dataclass(frozen=True)
class Work:
    """All calls of one operation with the same shapes.

    A product is (rows, inner) times (inner, outer). Attention has the query positions of all
    sequences as rows, the width of a head as inner, and the positions it reads as outer.
    """

    operation: str  # "aten.add", "linear:int4wo-128", "attention:decode"
    kind: Kind
    format: str  # dtype of the numbers, or the packed format: "bfloat16", "int8wo"
    rows: int
    inner: int
    outer: int
    flops: float  # of all calls; a multiplication and an addition each
    bytes_read: int  # of all calls
    bytes_written: int  # of all calls
    calls: int = 1


@dataclass(frozen=True)
class Collective:
    """What the ranks of one model exchange, in calls of the same size."""

    kind: Literal["all_reduce", "all_gather"]
    bytes: int  # of one rank's tensor, in one call
    calls: int = 1


SUMS = ("flops", "bytes_read", "bytes_written", "calls")  # fields of these two


@dataclass(frozen=True)
class Count:
    """What one forward pass does. Where ranks share a model, it is what one rank does."""

    works: tuple[Work, ...]
    collectives: tuple[Collective, ...]
    weight_bytes: int  # of all weights in memory; a tied weight counts once
    block_bytes: int  # of the blocks in which torch's allocator for cards keeps these weights
    kv_cache_bytes: int  # of the caches as they are allocated
    peak_activation_bytes: int  # most bytes of tensors of the pass that are alive at once

    @property
    def flops(self) -> float:
        return sum(work.flops for work in self.works)

    @property
    def bytes(self) -> int:
        return sum(work.bytes_read + work.bytes_written for work in self.works)

    def of_kind(self, kind: Kind) -> tuple[Work, ...]:
        return tuple(work for work in self.works if work.kind == kind)


def _summed(parts: Iterable[tuple[int, Iterable[T]]]) -> tuple[T, ...]:
    """One for all calls with the same shapes, each part so many times; none where there are 0."""
    sums: dict[T, dict[str, Any]] = {}
    for times, items in parts:
        for item in items:
            own = {name: times * getattr(item, name) for name in SUMS if hasattr(item, name)}
            none: dict[str, Any] = dict.fromkeys(own, 0)
            shape = replace(item, **none)
            total = sums.setdefault(shape, dict.fromkeys(own, 0))
            total.update({name: total[name] + value for name, value in own.items()})
    return tuple(replace(shape, **total) for shape, total in sums.items() if total["calls"])


def blocks(sizes: Iterable[int]) -> int:
    """Bytes that tensors allocated in this order occupy on a card (the rules are those of torch's
    c10/cuda/CUDACachingAllocator.cpp).

    A block has a multiple of 512 bytes. Above 1 MiB it is cut from the tightest rest of a segment:
    of 20 MiB, or for 10 MiB and more a segment of its own, a multiple of 2 MiB. A rest of up to
    1 MiB stays in the block.
    """
    total, rests = 0, list[int]()
    for size in sizes:
        size = -(-size // 512) * 512
        if size > MIB:
            whole = min((rest for rest in rests if rest >= size), default=0)
            if whole:
                rests.remove(whole)
            else:
                whole = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if whole - size > MIB:
                rests.append(whole - size)
            else:
                size = whole
        total += size
    return total


def pairs(queries: int, keys: int, depth: int = 0, window: int | None = None) -> int:
    """How many (query, key) pairs causal attention computes for one head of one sequence: query i
    stands at position depth + i, and attends to the last `window` keys up to its own."""
    most = keys if window is None else min(keys, window)
    growing = min(max(most - depth, 0), queries)  # queries that see fewer keys than `most`
    return growing * depth + growing * (growing + 1) // 2 + (queries - growing) * most


# ---------------------------------------------------------------------------------- recording


def count_module(
    module: nn.Module,
    *inputs: Any,
    call: Callable[["Recorder"], object] | None = None,
    formats: Mapping[str, str] | None = None,
    shares: Mapping[str, float] | None = None,
    **named: Any,
) -> Count:
    """Count module(*inputs, **named), all on the meta device; or call(recorder), which uses them.

    By the name of a linear layer: formats, its packed format; shares, how often its weight is read
    for each time that it is called here (1 where it is missing). Raises UsageError elsewhere.
    """
    given = [*module.parameters(), *module.buffers()]
    if (elsewhere := next((t for t in given if not t.is_meta), None)) is not None:
        raise UsageError(
            f"a module is counted on the meta device; this one is on {elsewhere.device}: build it "
            'inside `with torch.device("meta"):`'
        )
    recorder = Recorder(module, (inputs, named), formats or {}, shares or {})
    with torch.no_grad(), recorder:
        result = call(recorder) if call else module(*inputs, **named)
    del result  # alive until here
    sizes = [stored_bytes(parameter) for parameter in module.parameters()]
    works, exchanged = _summed([(1, recorder.works)]), _summed([(1, recorder.collectives)])
    return Count(works, exchanged, sum(sizes), blocks(sizes), 0, recorder.peak_bytes)


class Recorder(TorchDispatchMode):
    """Records what `module` does while it is entered. Weights, buffers and inputs are not counted
    among the tensors that are alive."""

    def __init__(
        self, module: nn.Module, inputs: object, formats: Mapping[str, str],
        shares: Mapping[str, float],
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.works: list[Work] = []
        self.collectives: list[Collective] = []
        self.live_bytes = self.peak_bytes = 0
        self._module, self._formats, self._shares = module, formats, shares
        given = [*module.parameters(), *module.buffers(), *tree_leaves(inputs)]
        ids = (t for t in given if isinstance(t, Tensor) and t.dtype == torch.long)
        self._tokens = next((t.numel() for t in ids), 0)
        self._given = [s for tensor in given for s in _storages(tensor)]  # keeps their ids valid
        self._seen: dict[int, object] = {id(storage): storage for storage in self._given}
        self._weights = {id(s) for p in module.parameters() for s in _storages(p)}
        self._attention = _Attention(self)

    def __enter__(self) -> "Recorder":
        for name, layer in self._module.named_modules():
            packed = isinstance(layer, KernelLinear) or name in self._formats
            if packed or (name in self._shares and isinstance(layer, nn.Linear)):
                layer.forward = partial(
                    self._linear, layer, self._formats.get(name), self._shares.get(name, 1.0)
                )
        super().__enter__()  # type: ignore[no-untyped-call]
        self._attention.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._attention.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for layer in self._module.modules():
            layer.__dict__.pop("forward", None)

    def _linear(self, layer: Any, format: str | None, share: float, x: Tensor) -> Tensor:
        """The product of a linear layer with a weight that may be packed."""
        inner, outer = layer.in_features, layer.out_features
        rows, y = x.numel() // inner, x.new_empty((*x.shape[:-1], outer))
        read = x.nbytes + round(share * stored_bytes(layer.weight))
        read += 0 if layer.bias is None else layer.bias.nbytes
        name, numbers = f"linear:{format}" if format else "aten.mm", format or _dtype(layer.weight)
        flops = 2.0 * rows * inner * outer
        self.works.append(Work(name, "linear", numbers, rows, inner, outer, flops, read, y.nbytes))
        return y

    def attention(
        self, query: Tensor, seen: int, width: int, read: int, format: str, keys: int,
        operation: str = "attention", written: int = 0,
    ) -> Tensor:  # fmt: skip
        """Attention of query (…, L, E) that computes `seen` pairs of a query and a key over all
        heads and sequences; returns (…, L, width). read, written: bytes of keys and values."""
        y = query.new_empty((*query.shape[:-1], width))
        inner, rows = query.shape[-1], query.shape[0] * query.shape[-2]
        flops, read = 2.0 * seen * (inner + width), read + query.nbytes
        self.works.append(
            Work(operation, "attention", format, rows, inner, keys, flops, read, written + y.nbytes)
        )
        return y

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet is aten._local_scalar_dense:
            return _YES[args[0].dtype.is_floating_point, args[0].dtype == torch.bool]
        result = func(*args, **kwargs)
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        before = {id(storage) for tensor in taken for storage in _storages(tensor)}
        fresh = [s for t in made for s in _storages(t) if id(s) not in before]
        for storage in fresh:
            self._appears(storage)
        if packet not in _ALLOCATE and (fresh or func._schema.is_mutable):
            known = packet in flop_registry
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if known else 0
            self.works.append(self._operation(packet, float(flops), taken, made))
        return result

    def _operation(
        self, packet: Any, flops: float, taken: list[Tensor], made: list[Tensor]
    ) -> Work:
        read, written = sum(map(_bytes, taken)), sum(map(_bytes, made))
        kind: Kind = "rest"
        rows = inner = outer = 0
        if packet in flop_registry:
            weights = {id(s) for tensor in taken for s in _storages(tensor)} & self._weights
            kind = "linear" if weights else "attention"
        if packet in _PRODUCTS:
            left, right = taken[-2:]
            inner, outer = right.shape[-2:]
            rows = left.numel() // max(inner, 1)
        elif packet in _GATHER:
            read = written + sum(_bytes(t) for t in taken if not t.is_floating_point())
        elif packet in _SCATTER:
            read, written = sum(map(_bytes, taken[1:])), max(map(_bytes, taken[1:]), default=0)
        elif packet in _SCATTER_ADD:
            written = _bytes(taken[-1])
            read = written + sum(map(_bytes, taken[1:]))
        elif str(packet) in _GROUPED:
            left, right = taken[:2]
            kind, rows, (experts, inner, outer) = "linear", len(left), right.shape
            flops = 2.0 * rows * inner * outer
            tokens = self._tokens if self._tokens and rows % self._tokens == 0 else rows
            each = min(rows // max(tokens, 1), experts)  # experts that a token chooses
            read -= round((1 - each / experts) ** tokens * _bytes(right))  # of experts not chosen
        format = next(map(_dtype, (*made, *taken)), "")
        return Work(str(packet), kind, format, rows, inner, outer, flops, read, written)

    def _appears(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, partial(self._disappears, key, size))
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _disappears(self, key: int, size: int, _: object) -> None:
        self._seen.pop(key)
        self.live_bytes -= size


class _Attention(TorchFunctionMode):
    """Records F.scaled_dot_product_attention whole, which torch would take apart on the meta
    device. Fused kernels leave out the pairs that is_causal excludes, and none for a mask."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        named = dict(zip(names, args, strict=False)) | (kwargs or {})
        query, key, value = (named[name] for name in names[:3])
        length, keys = query.shape[-2], key.shape[-2]
        each = pairs(length, keys) if named.get("is_causal") else length * keys
        seen = each * query.numel() // max(1, length * query.shape[-1])
        read = sum(_bytes(t) for t in (key, value, named.get("attn_mask")) if t is not None)
        return self.recorder.attention(query, seen, value.shape[-1], read, _dtype(query), keys)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> int:
    """Bytes that an operation reads or writes of a tensor: expanded dimensions count once."""
    if hasattr(tensor, "__tensor_flatten__"):
        return stored_bytes(tensor)
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(n for n, step in sizes if step or not n) * tensor.element_size()


def _storages(tensor: object) -> Iterator[Any]:
    """The storage of a tensor; of a tensor subclass, those of the tensors inside it."""
    if isinstance(tensor, Tensor):
        if hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                yield from _storages(getattr(tensor, name))
        else:
            yield tensor.untyped_storage()


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
    split = split_for(config, _CountedRanks(0, tp), spec) if tp > 1 else None
    size, chunk, device = cache_size or depth + tokens, chunk or tokens, torch.device(device)

    def one_pass(first: int) -> Count:
        """Layers of a kind are counted once: what a second one adds stands for each of the rest."""
        some = logits if first + chunk >= tokens or logits == "all" else "none"
        new, before = min(chunk, tokens - first), depth + first

        def few(cut: ModelConfig) -> Count:
            part = split and Split(cut, split.ranks, split.unit)
            return _count(cut, part, spec, CACHES[kv_cache], batch, new, before, some, precision,
                          device, size)  # fmt: skip

        (first_layer, *alike), *others = config.kinds_of_layers()
        more = [
            (len(layers), few(config.picked([first_layer, layers[0]])))
            for layers in (alike, *others)
            if layers
        ]
        return _extrapolated(few(config.picked([first_layer])), more)

    passes = [one_pass(first) for first in range(0, tokens, chunk)]
    own = split.config if split else config
    return replace(
        max(passes, key=lambda one: one.peak_activation_bytes),
        works=_summed((1, one.works) for one in passes),
        collectives=_summed((1, one.collectives) for one in passes),
        kv_cache_bytes=kv_cache_bytes(own, batch, size, precision, CACHES[kv_cache]),
    )


def _extrapolated(base: Count, more: Sequence[tuple[int, Count]]) -> Count:
    """The count with so many layers more, of which each adds what its count has beyond `base`."""
    parts = [(1, base), *((n, count) for n, count in more), *((-n, base) for n, _ in more)]
    return Count(
        _summed((n, count.works) for n, count in parts),
        _summed((n, count.collectives) for n, count in parts),
        *(
            sum(n * getattr(count, name) for n, count in parts)
            for name in ("weight_bytes", "block_bytes", "kv_cache_bytes", "peak_activation_bytes")
        ),
    )


def _count(
    few: ModelConfig, part: Split | None, spec: Spec, kind: type[KVCache], batch: int, tokens: int,
    depth: int, logits: Logits, precision: torch.dtype, device: torch.device, cache_size: int,
) -> Count:  # fmt: skip
    """One pass of a model of a few layers, or of a rank's part of it."""
    with torch.device("meta"):
        model = build(few, part).to(precision)
        ids = torch.empty(batch, tokens, dtype=torch.long)
        positions = torch.empty(tokens, dtype=torch.long)
    formats = _quantize(model, spec, device, precision)
    table, output, own = model.tok_embeddings, model.output, model.config
    alike = type(table.weight.data) is type(output.weight.data)
    if few.tie_embeddings and alike and table.weight.shape == output.weight.shape:
        output.weight = table.weight  # packed, it would have another shape
    caches: Any = []
    for layer, spec_of_layer in zip(model.layers, own.layers, strict=True):
        stored = kind(batch, own.num_kv_heads, cache_size, own.head_dim, precision, "meta",
                      spec_of_layer.window)  # fmt: skip
        caches.append(_CountedCache(stored, batch, depth, device))
        layer.attention.attend = caches[-1].attend  # type: ignore[union-attr]

    def call(recorder: Recorder) -> Tensor:
        for one in [*caches, *([part.ranks] if part else [])]:
            one.recorder = recorder
        x = model.hidden(ids, positions, caches)
        if logits == "none":
            return x
        return model.logits(x[:, -1:] if logits == "last" else x)

    # On the meta device tokens are spread over as many experts as possible. Really some choose the
    # same ones, so that X · (1 − (1 − k/X)^tokens) are read on average.
    shares, mixture = {}, few.mixture
    if mixture is not None:
        rows = batch * tokens
        share = mixture.distinct(rows) / min(mixture.num_experts, rows * mixture.experts_per_token)
        shares = {name: share for name, _ in model.named_modules() if ".experts." in name}
    return count_module(model, ids, positions, call=call, formats=formats, shares=shares)


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
        if isinstance(module, nn.Linear | nn.Embedding):
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
        self.recorder.collectives.append(Collective("all_reduce", x.nbytes))
        return x

    def gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        self.recorder.collectives.append(Collective("all_gather", x.nbytes))
        return x.new_empty((*x.shape[:-1], sum(widths) if widths else self.size * x.shape[-1]))


class _CountedCache:
    """A layer's cache that records its attention instead of computing it.

    Decoding reads the stored keys and values once for all heads that share them. In a prompt the
    chunk's own keys and values are read as they come, those before it as they are stored. On the
    CPU all pairs of the chunk with itself are computed and half of them masked
    (ops/prefill_attention.py); flash attention on other devices leaves them out.
    """

    recorder: Recorder

    def __init__(self, cache: KVCache, sequences: int, depth: int, device: torch.device) -> None:
        self.cache, self.depth, self.device = cache, depth, device
        self.slot_bytes = cache.nbytes // (cache.slots * sequences)  # of one sequence

    def update(self, positions: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        cache, start, (B, H, S, E) = self.cache, self.depth, query.shape
        if S == 1:
            seen = keys = min(start + 1, cache.slots)
            read, name = B * keys * self.slot_bytes, "attention:decode"
        else:
            past = min(start, cache.slots)
            keys, name = past + S, "attention:prompt"
            read = B * past * self.slot_bytes + key.nbytes + value.nbytes
            seen = pairs(S, start + S, start, cache.window)
            if self.device.type == "cpu":
                seen += S * S - pairs(S, S, 0, cache.window)
        written = B * S * self.slot_bytes
        return self.recorder.attention(
            query, B * H * seen, E, read, cache.format, keys, name, written
        )
