"""What a module does with tensors of the meta device: its products, its bytes, what is alive.

    with Recorder(module, inputs) as recorder:
        module(*inputs)
    recorder.works, recorder.peak_bytes, recorder.peak_tensors

Nothing is computed: on the meta device a tensor is a shape and a dtype. Two of torch's modes see
the calls. The function mode sees `F.linear` and `F.scaled_dot_product_attention` whole, before
torch takes them apart; the dispatch mode sees every other operation. A layer that multiplies by a
packed weight is recorded by its shapes and stored bytes, and is not run.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from quantbench.devices import stored_bytes
from quantbench.quantize.kernel import KernelLinear

Kind = Literal["linear", "attention", "rest"]
aten = torch.ops.aten

# Operations that read only the chosen rows of a table, not all of it.
_CHOOSE_ROWS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.take}
# Operations that write only what they are given into a tensor, and leave the rest of it.
_WRITE_ROWS = {aten.index_put_, aten.index_copy_, aten.scatter_, aten.copy_, aten._index_put_impl_}
# Operations that read as many numbers of a tensor as they are given, and write them there again.
_ADD_ROWS = {aten.index_add_, aten.scatter_add_}
_ONLY_ALLOCATE = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided}
_ONLY_ALLOCATE |= {aten.new_empty_strided}
# The answer to a question about a tensor's numbers, by (floating point, bool). There are none; what
# models of transformers ask is whether nothing is padded, or no sequences are packed into one.
_YES = {(True, False): 1.0, (False, True): True, (False, False): 1}
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
# Products of rows (R, K), sorted by experts, with the experts' weights (X, K, N); and what
# transformers calls where torch has none.
_GROUPED = {"aten._grouped_mm", "transformers.grouped_mm_fallback"}


@dataclass(frozen=True)
class Work:
    """All calls of one operation with the same shapes.

    A product is (rows, inner) times (inner, outer). Attention has the query positions of all
    sequences as rows, the width of a head as inner, and the positions it reads as outer. Where
    these mean nothing they are 0.
    """

    operation: str  # "aten.add", "linear", "linear:int4wo-128", "attention"
    kind: Kind
    format: str  # dtype of the weight or of the numbers, or the packed format: "bfloat16", "int8wo"
    rows: int
    inner: int
    outer: int
    flops: float  # of all calls; products alone have any, a multiplication and an addition each
    bytes_read: int  # of all calls
    bytes_written: int  # of all calls
    calls: int

    def times(self, count: int) -> "Work":
        """The same work, done `count` times."""
        return replace(
            self,
            flops=self.flops * count,
            bytes_read=self.bytes_read * count,
            bytes_written=self.bytes_written * count,
            calls=self.calls * count,
        )


@dataclass(frozen=True)
class Collective:
    """What the ranks of one model exchange, in calls of the same size."""

    kind: Literal["all_reduce", "all_gather"]
    bytes: int  # of one rank's tensor, in one call
    calls: int

    def times(self, count: int) -> "Collective":
        return replace(self, calls=self.calls * count)


@dataclass(frozen=True)
class Alive:
    """A tensor that takes memory of its own."""

    name: str  # the module that made it, and the operation: "model.layers.0.mlp: aten.mul"
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def merged(works: Sequence[Work]) -> tuple[Work, ...]:
    """The works with those of the same operation and shapes summed, in the order of the first."""
    groups: dict[tuple[Any, ...], list[Work]] = {}
    for work in works:
        key = (work.operation, work.kind, work.format, work.rows, work.inner, work.outer)
        groups.setdefault(key, []).append(work)
    return tuple(
        replace(
            group[0],
            flops=sum(work.flops for work in group),
            bytes_read=sum(work.bytes_read for work in group),
            bytes_written=sum(work.bytes_written for work in group),
            calls=sum(work.calls for work in group),
        )
        for group in groups.values()
    )


def pairs(queries: int, keys: int, depth: int = 0, window: int | None = None) -> int:
    """How many (query, key) pairs causal attention computes, for one head of one sequence.

    Query i stands at position depth + i and attends to keys 0 to depth + i; with a window, to the
    last `window` of these. keys: how many there are at all.
    """
    most = keys if window is None else min(keys, window)
    growing = min(max(most - depth, 0), queries)  # queries that see fewer keys than `most`
    return growing * depth + growing * (growing + 1) // 2 + (queries - growing) * most


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes that an operation reads or writes of a tensor: one that is expanded counts once."""
    if hasattr(tensor, "__tensor_flatten__"):
        return stored_bytes(tensor)
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(n for n, step in sizes if step or not n) * tensor.element_size()


class Recorder(TorchDispatchMode):
    """Records what `module` does while it is entered; see the file's docstring.

    Weights, buffers and inputs are there before and after, and are not among what is alive.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: object = (),
        formats: Mapping[str, str] | None = None,
        read_shares: Mapping[str, float] | None = None,
    ) -> None:
        """By the name of a linear layer: formats, the name of its packed format; read_shares, how
        often its weight is read for each time that it is called here (1 where it is not given)."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.works: list[Work] = []
        self.collectives: list[Collective] = []
        self.events: list[tuple[int, int]] = []  # (tensor's number, its bytes; 0 when it is freed)
        self.live_bytes = self.peak_bytes = 0
        self.peak_tensors: tuple[Alive, ...] = ()
        self._alive: dict[int, Alive] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._next = 0
        self._path = [""]  # names of the modules that are being called
        self._making = ""  # what the next tensor is called; "" for the operation's own name
        self._undo: list[Callable[[], object]] = []
        self._module, self._formats = module, dict(formats or {})
        self._read_shares = dict(read_shares or {})
        self._functions = _Functions(self)
        given = [*module.parameters(), *module.buffers(), *tree_leaves(inputs)]
        self._tokens = next((t.numel() for t in tree_leaves(inputs) if _holds_tokens(t)), 0)
        self._known = [s for tensor in given for s in storages(tensor)]  # held: ids stay theirs
        self._known_ids = {id(storage) for storage in self._known}
        weights = (s for parameter in module.parameters() for s in storages(parameter))
        self._weight_ids = {id(storage) for storage in weights}

    def __enter__(self) -> "Recorder":
        for name, module in self._module.named_modules():
            before = module.register_forward_pre_hook(functools.partial(self._enters, name))
            after = module.register_forward_hook(self._leaves)
            self._undo += [before.remove, after.remove]
            if isinstance(module, nn.Linear) and self._is_a_product(name, module):
                share = self._read_shares.get(name, 1.0)
                counted = functools.partial(
                    self.linear_layer, module, self._formats.get(name), read_share=share
                )
                module.forward = counted  # type: ignore[method-assign]
                self._undo.append(functools.partial(module.__dict__.pop, "forward"))
        super().__enter__()  # type: ignore[no-untyped-call]
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for undo in self._undo:
            undo()

    def _is_a_product(self, name: str, layer: nn.Linear) -> bool:
        """Whether a layer multiplies by its weight and no more. Routers and adapters that are
        children of nn.Linear compute what their own forward says."""
        ours = name in self._formats or isinstance(layer, KernelLinear)
        return ours or type(layer).forward is nn.Linear.forward

    def _enters(self, name: str, *_: object) -> None:
        self._path.append(name)

    def _leaves(self, *_: object) -> None:
        self._path.pop()

    # ------------------------------------------------------------------------ what is recorded

    def linear_layer(
        self, layer: nn.Linear, format: str | None, x: Tensor, read_share: float = 1.0
    ) -> Tensor:
        """A linear layer's product, whatever its weight is stored as."""
        shape = layer.out_features, layer.in_features
        return self.linear(x, layer.weight, layer.bias, shape, format, read_share)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: Sequence[int],
        format: str | None = None,
        read_share: float = 1.0,
    ) -> Tensor:
        """x (…, K) times a weight of the shape (N, K), packed or not; returns (…, N)."""
        outer, inner = shape
        rows = x.numel() // max(inner, 1)
        y = self.make(x, (*x.shape[:-1], outer), "linear")
        read = tensor_bytes(x) + round(read_share * stored_bytes(weight))
        read += 0 if bias is None else tensor_bytes(bias)
        packed = format is not None
        self.works.append(
            Work(
                f"linear:{format}" if packed else "linear",
                "linear",
                format or dtype_name(weight),
                rows,
                inner,
                outer,
                2.0 * rows * inner * outer,
                read,
                tensor_bytes(y),
                1,
            )
        )
        return y

    def attention(
        self,
        query: Tensor,
        read: int,
        seen: int,
        width: int,
        format: str,
        operation: str = "attention",
        keys: int = 0,
        written: int = 0,
    ) -> Tensor:
        """Attention of query (…, L, E) that computes `seen` pairs of a query and a key, over all
        heads and sequences; returns (…, L, width).

        read: bytes of keys, values and a mask. keys: positions that are read. written: bytes of
        keys and values that are stored.
        """
        y = self.make(query, (*query.shape[:-1], width), operation)
        rows = query.shape[0] * query.shape[-2]
        flops = 2.0 * seen * (query.shape[-1] + width)
        read, written = read + tensor_bytes(query), written + tensor_bytes(y)
        inner = query.shape[-1]
        work = Work(operation, "attention", format, rows, inner, keys, flops, read, written, 1)
        self.works.append(work)
        return y

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """F.scaled_dot_product_attention. Fused kernels leave out the pairs that `is_causal`
        excludes; with a mask they compute every pair."""
        L, S = query.shape[-2], key.shape[-2]
        each = pairs(L, S) if is_causal else L * S
        heads = query.numel() // max(1, L * query.shape[-1])
        read = tensor_bytes(key) + tensor_bytes(value)
        read += 0 if attn_mask is None else tensor_bytes(attn_mask)
        return self.attention(query, read, heads * each, value.shape[-1], dtype_name(query), keys=S)

    def make(self, like: Tensor, shape: Sequence[int], name: str) -> Tensor:
        """A new tensor of `like`'s dtype, alive from now on."""
        self._making = name
        return like.new_empty(tuple(shape))

    def exchange(self, kind: Literal["all_reduce", "all_gather"], tensor: Tensor) -> None:
        self.collectives.append(Collective(kind, tensor_bytes(tensor), 1))

    # ------------------------------------------------------------------------ torch's operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is aten._local_scalar_dense:
            return _YES[args[0].dtype.is_floating_point, args[0].dtype == torch.bool]
        result = func(*args, **kwargs)
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        before = {id(storage) for tensor in taken for storage in storages(tensor)}
        fresh = [t for t in made if not {id(storage) for storage in storages(t)} <= before]
        name, self._making = self._making or str(func.overloadpacket), ""
        for tensor in fresh:
            self._appears(tensor, name)
        packet = func.overloadpacket
        if packet not in _ONLY_ALLOCATE and (fresh or func._schema.is_mutable):
            self.works.append(self._operation(func, args, kwargs, result, taken, made))
        return result

    def _operation(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        taken: list[Tensor],
        made: list[Tensor],
    ) -> Work:
        packet, rows, inner, outer = func.overloadpacket, 0, 0, 0
        flops, kind = 0.0, "rest"
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
            mine = {id(storage) for tensor in taken for storage in storages(tensor)}
            kind = "linear" if mine & self._weight_ids else "attention"
        if packet in _PRODUCTS:
            left, right = taken[-2:]
            inner, outer = right.shape[-2:]
            rows = left.numel() // max(inner, 1)
        written = sum(map(tensor_bytes, made))
        read = sum(map(tensor_bytes, taken))
        if packet in _CHOOSE_ROWS:
            read = written + sum(tensor_bytes(t) for t in taken if not t.is_floating_point())
        elif packet in _WRITE_ROWS:
            read = sum(map(tensor_bytes, taken[1:]))
            written = max(map(tensor_bytes, taken[1:]), default=0)
        elif packet in _ADD_ROWS:
            written = tensor_bytes(taken[-1])
            read = written + sum(map(tensor_bytes, taken[1:]))
        elif str(packet) in _GROUPED:
            left, right = taken[:2]
            kind, rows, (experts, inner, outer) = "linear", len(left), right.shape
            flops = 2.0 * rows * inner * outer
            unread = 1 - self._chosen(rows, experts) / experts
            read -= round(unread * tensor_bytes(right))
        numbers = next((t for t in (*made, *taken)), None)
        format = dtype_name(numbers) if numbers is not None else ""
        name = str(packet)
        return Work(name, kind, format, rows, inner, outer, flops, read, written, 1)  # type: ignore[arg-type]

    def _chosen(self, rows: int, experts: int) -> float:
        """How many experts the tokens choose on average: each one rows ÷ tokens different ones, or
        one where the inputs hold no tokens."""
        tokens = self._tokens if self._tokens and rows % self._tokens == 0 else rows
        each = min(rows // max(tokens, 1), experts)
        return experts * (1 - (1 - each / experts) ** tokens)

    # ------------------------------------------------------------------------ what is alive

    def _appears(self, tensor: Tensor, name: str) -> None:
        for storage in storages(tensor):
            if id(storage) in self._known_ids or self._is_alive(storage):
                continue
            number, self._next = self._next, self._next + 1
            where = f"{self._path[-1]}: {name}" if self._path[-1] else name
            size = storage.nbytes()
            alive = Alive(where, tuple(tensor.shape), dtype_name(tensor), size)
            self._alive[number] = alive
            self._references[number] = weakref.ref(
                storage, functools.partial(self._disappears, number)
            )
            self.events.append((number, size))
            self.live_bytes += size
            if self.live_bytes > self.peak_bytes:
                self.peak_bytes = self.live_bytes
                self.peak_tensors = tuple(self._alive.values())

    def _is_alive(self, storage: Any) -> bool:
        return any(reference() is storage for reference in self._references.values())

    def _disappears(self, number: int, _: object) -> None:
        self._references.pop(number)
        self.live_bytes -= self._alive.pop(number).bytes
        self.events.append((number, 0))


class _Functions(TorchFunctionMode):
    """Hands the functions that are recorded whole to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.recorder.sdpa(*args, **kwargs)
        if func is F.linear:
            x, weight, bias = (*args, *(kwargs[k] for k in ("bias",) if k in kwargs), None)[:3]
            return self.recorder.linear(x, weight, bias, weight.shape)
        return func(*args, **kwargs)


def _holds_tokens(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.long


def storages(tensor: object) -> Iterator[Any]:
    """The storage of a tensor; of a tensor subclass, those of the tensors inside it."""
    if isinstance(tensor, Tensor):
        if hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                yield from storages(getattr(tensor, name))
        else:
            yield tensor.untyped_storage()
