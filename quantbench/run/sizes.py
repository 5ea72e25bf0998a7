"""The memory that a model needs, from shapes alone: nothing is allocated, a 70B takes a second.

Most layers have the same shapes, so one of each kind is quantized on the meta device and multiplied
by their number.
"""

import bisect
import contextlib
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from quantbench.devices import stored_bytes
from quantbench.environment import place
from quantbench.errors import KernelError, MemoryShortage, UsageError
from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import CacheFactory
from quantbench.log.config import RunConfig
from quantbench.models import build
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer, weight_bytes
from quantbench.quantize.spec import AsIs, Selection, Spec
from quantbench.run.decoding import state_of
from quantbench.run.plan import Plan, kv_cache
from quantbench.text import bytes_in
from quantbench.text import size as size_text


@dataclass(frozen=True)
class ModelSize:
    model_bytes: int  # all weights but the embedding table
    embedding_bytes: int  # embedding tables
    memory_bytes: int  # both; a tied output that shares the table's memory counts once
    bits_per_weight: float  # of linear layers as saved: with scales, without a kernel's padding
    kernel: str | None  # the kernel that would run; None if none can
    reason: str | None = None  # why no kernel can run
    expert_bytes: int = 0  # of each expert of a mixture, as its kernel holds it


@dataclass(frozen=True)
class Shapes:
    """A layer of each kind of a model, on the meta device."""

    model: Transformer  # its layers as their kernels hold them
    linears: dict[str, nn.Linear]  # its linear layers by name, as --save writes them
    kernels: str | None  # that run; None if none can
    reason: str | None  # why no kernel can run


def shapes_of(
    architecture: ModelConfig,
    spec: Spec,
    device: torch.device,
    precision: torch.dtype,
    kernel: str = "auto",
) -> Shapes:
    """A model of this architecture, quantized by `spec` for a kernel of `device`.

    Raises KernelError if the scheme does not support the model's shapes.
    """
    with torch.device("meta"):
        alike = not isinstance(spec, AsIs)  # whose layers may differ in their types
        model = build(architecture.one_of_each_kind() if alike else architecture).to(precision)
    return Shapes(model, *quantize_shapes(model, spec, device, precision, kernel))


def quantize_shapes(
    model: Transformer,
    spec: Spec,
    device: torch.device,
    precision: torch.dtype,
    kernel: str | None = "auto",
) -> tuple[dict[str, nn.Linear], str | None, str | None]:
    """Give each layer of a model on the meta device the form in which its kernel stores it; where
    none can run, or kernel is None, that in which it is saved. Returns the fields of Shapes."""
    from quantbench.quantize.registry import quantizer_of

    reason = None
    try:
        quantizer = quantizer_of(spec, device, precision, kernel)
    except KernelError as error:
        reason, quantizer = str(error), quantizer_of(spec, device, precision, None)
    linears: dict[str, nn.Linear] = {}
    for name in [name for name, module in model.named_modules() if module._parameters]:
        layer = quantizer.quantized(name, model.get_submodule(name))
        if isinstance(layer, nn.Linear):
            linears[name] = layer
            layer = quantizer.stored(name, layer) if kernel and not reason else layer
        model.set_submodule(name, layer)
    return linears, None if reason else ", ".join(quantizer.ran) or "torch", reason


def size_of(
    architecture: ModelConfig,
    spec: Spec,
    device: torch.device,
    precision: torch.dtype,
    kernel: str = "auto",
) -> ModelSize:
    """The size of a model of this architecture in the scheme `spec`, on a kernel for `device`.

    Raises KernelError if the scheme does not support the model's shapes.
    """
    shapes = shapes_of(architecture, spec, device, precision, kernel)
    model = shapes.model
    kinds = [len(numbers) for numbers in architecture.kinds_of_layers()]
    if len(kinds) < len(model.layers):
        kinds = [1] * len(model.layers)
    repeated = [
        sum(map(stored_bytes, layer.parameters())) * (count - 1)
        for layer, count in zip(model.layers, kinds, strict=True)
    ]
    model_bytes = weight_bytes(model) + sum(repeated)
    count = packed = 0
    for name, layer in shapes.linears.items():
        times = kinds[int(name.split(".")[1])] if "layers." in name else 1
        count += layer.weight.numel() * times
        packed += stored_bytes(layer.weight) * times
    table, output = model.tok_embeddings.weight, shapes.linears["output"].weight
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedding_bytes = sum(stored_bytes(module.weight) for module in tables)
    alike = type(table.data) is type(output.data) and stored_bytes(table) == stored_bytes(output)
    shared = stored_bytes(table) if architecture.tie_embeddings and alike else 0
    experts = [layer for name, layer in model.named_modules() if name.endswith(".experts.0")]
    return ModelSize(
        model_bytes,
        embedding_bytes,
        model_bytes + embedding_bytes - shared,
        8 * packed / count,
        shapes.kernels,
        shapes.reason,
        sum(map(stored_bytes, experts[0].parameters())) if experts else 0,
    )


def expert_slots(config: RunConfig, nbytes: int, free: float) -> int:
    """For how many experts of so many bytes --expert_memory has room.

    free: bytes for them, where it is "auto".
    """
    room = config.expert_memory
    assert room is not None
    if room.isdigit():
        return int(room)
    from quantbench.experts.layout import whole_pages

    return int((free if room == "auto" else bytes_in(room)) // whole_pages(nbytes))


def slow_bytes(config: RunConfig, architecture: ModelConfig, nbytes: int) -> int:
    """Bytes of the experts that --expert_memory leaves in slow memory alone, at most; each has
    nbytes."""
    mixture = architecture.mixture
    if config.expert_memory is None or mixture is None:
        return 0
    layers = sum(not mixture.is_dense(layer) for layer in range(architecture.num_layers))
    least = mixture.experts_per_token * nbytes  # what "auto" takes where there is nothing more
    return max(0, layers * mixture.num_experts - expert_slots(config, nbytes, least)) * nbytes


# ---------------------------------------------------------------------------------- does it fit


def fits(plan: Plan, free: int | None) -> str:
    """`check_memory` for a plan, or for this rank's share of it and of the free memory.

    free: bytes, or None if not known.
    """
    architecture, where = plan.architecture, place()
    if plan.split and where:
        architecture = plan.split.config
        if free is not None and plan.device.type == "cpu":
            free //= where.local_size
    line = check_memory(plan.config, architecture, plan.spec, plan.device, plan.cache_size, free)
    return f"Each of {plan.ranks.size} ranks: {line}" if plan.split else line


def check_memory(
    config: RunConfig,
    architecture: ModelConfig,
    spec: Spec | Selection,
    device: torch.device,
    positions: int,
    free: int | None,
) -> str:
    """A line that says how much memory weights and caches need.

    Raises MemoryShortage if that is more than `free` bytes. The weights of autoquant count as
    nothing, because their size is known only after it has chosen.
    """
    precision, name = getattr(torch, config.precision), kv_cache(config)
    weights = slow = 0
    if spec.scheme:
        size = size_of(architecture, spec.scheme, device, precision, config.kernel)
        slow = slow_bytes(config, architecture, size.expert_bytes)
        weights = size.memory_bytes - slow

    def cached(positions: int, kind: CacheFactory = CACHES[name]) -> int:
        return kv_cache_bytes(architecture, config.batch_size, positions, precision, kind)

    need = cached(positions)
    line = f"Weights: {size_text(weights)}; " if spec.scheme else ""
    line += f"experts in slow memory alone: {size_text(slow)}; " if slow else ""
    line += f"KV cache: {size_text(need)}, {name}, {positions} positions"
    if config.batch_size > 1:
        line += f", batch {config.batch_size}"
    if free is None or weights + need <= free:
        return line
    fitting = bisect.bisect_right(range(1, positions + 1), free - weights, key=cached)
    if fitting:
        advice = f"--cache_size {fitting} is the largest that fits"
        smaller = []
        for name, kind in CACHES.items():
            with contextlib.suppress(UsageError):  # it does not support the model's head_dim
                smaller += [name] if cached(positions, kind) < need else []
        if smaller:
            advice += f"; --kv_cache {' or '.join(smaller)} makes it smaller"
    elif weights > free:
        advice = "not even the weights fit: a --quantization makes them smaller"
    else:
        advice = "the weights fit, but no position of a KV cache with them"
    raise MemoryShortage(
        f"out of memory: weights of {size_text(weights)} and a KV cache of {size_text(need)} for "
        f"{positions} positions need {size_text(weights + need)}, and {device} has "
        f"{size_text(free)} free; {advice}"
    )


def kv_cache_bytes(
    architecture: ModelConfig,
    rows: int,
    positions: int,
    precision: torch.dtype,
    cache: CacheFactory,
) -> int:
    """Bytes of the caches and states of all layers."""
    kinds = Counter(
        (spec.kv_heads, spec.head_dim, spec.window)
        for spec in architecture.layers
        if not (spec.shared or spec.recurrent)
    )
    caches = sum(
        cache(rows, heads, positions, width, precision, "meta", window).nbytes * count
        for (heads, width, window), count in kinds.items()
    )
    return caches + state_bytes(architecture, rows, precision)


def state_bytes(architecture: ModelConfig, rows: int, precision: torch.dtype) -> int:
    """Bytes of the states of layers without attention, whatever the positions."""
    if not architecture.recurrent:
        return 0
    state = state_of(architecture.recurrent, architecture.dim, rows, precision, "meta")
    return state.nbytes * len(architecture.recurrent_layers)
