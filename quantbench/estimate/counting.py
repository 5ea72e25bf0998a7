"""What a forward pass computes, reads, writes and holds, counted from shapes alone.

    count_module(module, tokens)        # any nn.Module on the meta device; Count

On the meta device a tensor is a shape and a dtype. torch's dispatch mode sees each operation, and
torch.utils.flop_counter knows the operations of products. Bytes are those of stored weights, and of
the activations in and out, each once.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from quantbench.devices import stored_bytes

Kind = Literal["linear", "attention", "rest"]
MIB = 1 << 20
aten = torch.ops.aten
# Operations that read only the chosen rows of a table, not all of it.
_GATHER = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.take}
# Operations that write into a tensor only what they are given; how often they read those rows, too.
_SCATTER = {
    **dict.fromkeys((aten.index_put_, aten.index_copy_, aten.scatter_, aten.copy_), 0),
    **dict.fromkeys((aten.index_add_, aten.scatter_add_), 1),
}
_ALLOCATE = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided,
             aten.new_empty_strided}  # fmt: skip
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
# Products of rows (R, K), sorted by experts, with the experts' weights (X, K, N).
_GROUPED = {"aten._grouped_mm", "transformers.grouped_mm_fallback"}
# Models of transformers ask about numbers whether nothing is padded; there are none: yes.
_YES = {(True, False): 1.0, (False, True): True, (False, False): 1}


@dataclass(frozen=True)
class Work:
    """One call of an operation. A product is (rows, inner) times (inner, outer); attention reads
    `outer` positions for each of `rows` queries."""

    kind: Kind
    format: str  # dtype of the numbers, or the packed format: "bfloat16", "int8wo"
    rows: int
    inner: int
    outer: int
    flops: float  # a multiplication and an addition each
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class Collective:
    """What the ranks of one model exchange in a call."""

    kind: Literal["all_reduce", "all_gather"]
    bytes: int  # of one rank's tensor


@dataclass(frozen=True)
class Count:
    """What one forward pass does. Where ranks share a model, it is what one rank does."""

    works: Counter[Work]  # and how often each is done
    collectives: Counter[Collective]
    weight_bytes: int  # of all weights in memory; a tied weight counts once
    block_bytes: int  # of the blocks in which torch's allocator for cards keeps these weights
    kv_cache_bytes: int  # of the caches as they are allocated
    peak_activation_bytes: int  # most bytes of tensors of the pass that are alive at once

    def total(self, field: str, kind: Kind | None = None) -> float:
        """The sum of a field of Work over all calls, or over those of a kind."""
        works = ((w, n) for w, n in self.works.items() if kind in (None, w.kind))
        return math.fsum(n * getattr(work, field) for work, n in works)


def count_module(module: nn.Module, *inputs: Any, **named: Any) -> Count:
    """Count module(*inputs, **named), all on the meta device."""
    recorder = Recorder(module, (inputs, named))
    with torch.no_grad(), recorder, _Attention(recorder):
        result = module(*inputs, **named)
    del result  # alive until here
    return recorder.count()


class Recorder(TorchDispatchMode):
    """Records what a module does while it is entered. Its weights, buffers and inputs are not
    counted among the tensors that are alive."""

    def __init__(self, module: nn.Module, inputs: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.works: Counter[Work] = Counter()
        self.collectives: Counter[Collective] = Counter()
        self.live_bytes = self.peak_bytes = 0
        self._module = module
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._tokens = next((t.numel() for t in leaves if t.dtype == torch.long), 0)
        given = _storages([*module.parameters(), *module.buffers(), *leaves])
        self._seen: dict[int, object] = {id(s): s for s in given}  # alive, so that ids stay valid
        self._weights = {id(storage) for storage in _storages(module.parameters())}

    def count(self) -> Count:
        sizes = [stored_bytes(parameter) for parameter in self._module.parameters()]
        return Count(self.works, self.collectives, sum(sizes), blocks(sizes), 0, self.peak_bytes)

    def linear(self, layer: Any, format: str | None, share: float, x: Tensor) -> Tensor:
        """The product of a linear layer, recorded whole: its weight may be packed. format: the
        packed one. share: how often its weight is read for each call, on average."""
        inner, outer = layer.in_features, layer.out_features
        rows, y = x.numel() // inner, x.new_empty((*x.shape[:-1], outer))
        read = x.nbytes + round(share * stored_bytes(layer.weight))
        read += 0 if layer.bias is None else layer.bias.nbytes
        numbers, flops = format or _dtype(layer.weight), 2.0 * rows * inner * outer
        self.works[Work("linear", numbers, rows, inner, outer, flops, read, y.nbytes)] += 1
        return y

    def attention(
        self, query: Tensor, seen: int, width: int, read: int, format: str, keys: int,
        written: int = 0,
    ) -> Tensor:  # fmt: skip
        """Attention of query (…, L, E) that computes `seen` pairs of a query and a key over all
        heads and sequences; returns (…, L, width). read, written: bytes of keys and values."""
        y = query.new_empty((*query.shape[:-1], width))
        inner, rows = query.shape[-1], query.shape[0] * query.shape[-2]
        flops, read = 2.0 * seen * (inner + width), read + query.nbytes
        self.works[
            Work("attention", format, rows, inner, keys, flops, read, written + y.nbytes)
        ] += 1
        return y

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet is aten._local_scalar_dense:
            return _YES[args[0].dtype.is_floating_point, args[0].dtype == torch.bool]
        result = func(*args, **kwargs)
        taken, made = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
            for tree in ((args, kwargs), result)
        )
        before = {id(storage) for storage in _storages(taken)}
        fresh = [storage for storage in _storages(made) if id(storage) not in before]
        for storage in fresh:
            self._appears(storage)
        if packet not in _ALLOCATE and (fresh or func._schema.is_mutable):
            formula = flop_registry.get(packet)
            flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
            kind: Kind = "rest" if formula is None else "attention"
            if formula and before & self._weights:
                kind = "linear"
            self.works[self._operation(packet, kind, flops, taken, made)] += 1
        return result

    def _operation(
        self, packet: Any, kind: Kind, flops: float, taken: list[Tensor], made: list[Tensor]
    ) -> Work:
        read, written = sum(map(_bytes, taken)), sum(map(_bytes, made))
        rows = inner = outer = 0
        if packet in _PRODUCTS:
            left, right = taken[-2:]
            inner, outer = right.shape[-2:]
            rows = left.numel() // max(inner, 1)
        elif packet in _GATHER:
            read = written + sum(_bytes(t) for t in taken if not t.is_floating_point())
        elif packet in _SCATTER:
            given = [_bytes(tensor) for tensor in taken[1:]]
            written = max(given, default=0)
            read = sum(given) + _SCATTER[packet] * written
        elif str(packet) in _GROUPED:
            left, right = taken[:2]
            kind, rows, (experts, inner, outer) = "linear", len(left), right.shape
            flops = 2.0 * rows * inner * outer
            tokens = self._tokens if self._tokens and rows % self._tokens == 0 else rows
            each = min(rows // max(tokens, 1), experts)  # experts that a token chooses
            read -= round((1 - each / experts) ** tokens * _bytes(right))  # of experts not chosen
        format = next(map(_dtype, (*made, *taken)), "")
        return Work(kind, format, rows, inner, outer, flops, read, written)

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


def pairs(queries: int, keys: int, depth: int = 0, window: int | None = None) -> int:
    """How many (query, key) pairs causal attention computes for one head of one sequence: query i
    stands at position depth + i, and attends to the last `window` keys up to its own."""
    most = keys if window is None else min(keys, window)
    growing = min(max(most - depth, 0), queries)  # queries that see fewer keys than `most`
    return growing * depth + growing * (growing + 1) // 2 + (queries - growing) * most


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


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> int:
    """Bytes that an operation reads or writes of a tensor: expanded dimensions count once."""
    if hasattr(tensor, "__tensor_flatten__"):
        return stored_bytes(tensor)
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(n for n, step in sizes if step or not n) * tensor.element_size()


def _storages(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """The storages of tensors; of a tensor subclass, those of the tensors inside it."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            inside = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from _storages(part for part in inside if isinstance(part, Tensor))
        else:
            yield tensor.untyped_storage()
