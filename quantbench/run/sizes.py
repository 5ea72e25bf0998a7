"""The memory that a model needs, from shapes alone: nothing is allocated, a 70B takes a second.

Most layers have the same shapes, so one of each kind is quantized on the meta device and multiplied
by their number.
"""

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantbench.devices import stored_bytes
from quantbench.errors import KernelError, MemoryShortage, UsageError
from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import CacheFactory, KVCache
from quantbench.log.config import RunConfig
from quantbench.log.kinds import room_bytes
from quantbench.models import build
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer, weight_bytes
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import Selection, Spec
from quantbench.run.environment import place
from quantbench.run.plan import Plan, kv_cache
from quantbench.text import size as size_text


@dataclass(frozen=True)
class Size:
    """The size of a quantized model."""

    model_bytes: int  # all weights but the embedding table
    embedding_bytes: int  # the embedding table
    memory_bytes: int  # both; a tied output that shares the table's memory counts once
    bits_per_weight: float  # of linear layers as saved: with scales, without a kernel's padding
    bits_read: float  # of linear layers as the kernel holds them: what model_bytes counts
    kernel: str | None  # the kernel that would run; None if none can
    reason: str | None = None  # why no kernel can run

    @property
    def widened(self) -> bool:
        """Whether the kernel holds more than was saved: scales in a wider dtype."""
        return self.bits_read - self.bits_per_weight > 0.05


def size_of(
    architecture: ModelConfig,
    spec: Spec,
    device: torch.device,
    precision: torch.dtype,
    kernel: str = "auto",
) -> Size:
    """The size of a model of this architecture in the scheme `spec`, on a kernel for `device`.

    Raises KernelError if the scheme does not support the model's shapes.
    """
    kinds = [len(numbers) for numbers in architecture.kinds_of_layers()]
    model, quantizer, reason = _shapes(architecture, spec, device, precision, kernel)
    linears: dict[str, nn.Linear] = {}
    read: dict[str, int] = {}  # bytes of a linear layer as its kernel holds it, without the bias
    for name in [name for name, module in model.named_modules() if module._parameters]:
        layer = quantizer.quantized(name, model.get_submodule(name))
        if isinstance(layer, nn.Linear):
            linears[name] = layer
            if reason is None:
                layer = quantizer.stored(name, layer)
            bias = linears[name].bias
            read[name] = sum(map(stored_bytes, layer.parameters()))
            read[name] -= 0 if bias is None else stored_bytes(bias)
        model.set_submodule(name, layer)
    times = {name: kinds[int(name.split(".")[1])] if "layers." in name else 1 for name in linears}
    in_layers = [sum(map(stored_bytes, layer.parameters())) for layer in model.layers]
    packed = sum(stored_bytes(layer.weight) * times[name] for name, layer in linears.items())
    count = sum(layer.weight.numel() * times[name] for name, layer in linears.items())
    more = [size * (count - 1) for size, count in zip(in_layers, kinds, strict=True)]
    model_bytes = weight_bytes(model) + sum(more)
    table, output = model.tok_embeddings.weight, model.output.weight
    alike = type(table.data) is type(output.data) and table.shape == output.shape
    shared = architecture.tie_embeddings and alike
    embedding_bytes = stored_bytes(table)
    return Size(
        model_bytes,
        embedding_bytes,
        model_bytes + (0 if shared else embedding_bytes),
        8 * packed / count,
        8 * sum(bytes_read * times[name] for name, bytes_read in read.items()) / count,
        None if reason else ", ".join(quantizer.ran) or "torch",
        reason,
    )


def _shapes(
    architecture: ModelConfig,
    spec: Spec,
    device: torch.device,
    precision: torch.dtype,
    kernel: str,
) -> tuple[Transformer, Quantizer, str | None]:
    """A layer of each kind on the meta device, a quantizer, and why no kernel can run, if so."""
    with torch.device("meta"):
        model = build(architecture.one_of_each_kind()).to(precision)
    try:
        return model, Quantizer(spec, device, precision, kernel), None
    except KernelError as error:
        return model, Quantizer.of_shapes(spec, device, precision), str(error)


# ---------------------------------------------------------------------------------- experts


def expert_bytes(architecture: ModelConfig, *how: Any) -> int:
    """Bytes of one expert of a mixture, as its kernels hold it. how: the spec, the device, the
    precision and the kernel, as for `size_of`.

    Raises KernelError if the scheme does not support the expert's shapes.
    """
    model, quantizer, reason = _shapes(architecture, *how)
    name = next(name for name, _ in model.named_modules() if name.endswith(".experts.0"))
    count = 0
    for part, module in model.get_submodule(name).named_children():
        layer = quantizer.quantized(f"{name}.{part}", module)
        if isinstance(layer, nn.Linear) and reason is None:
            layer = quantizer.stored(f"{name}.{part}", layer)
        count += sum(map(stored_bytes, layer.parameters()))
    return count


def expert_slots(config: RunConfig, nbytes: int, free: float) -> int:
    """The number of experts of nbytes each that --expert_memory has room for.

    free: bytes for them, if it is "auto".
    """
    from quantbench.experts.layout import whole_pages

    asked = config.expert_memory
    assert asked is not None
    if asked.isdigit():
        return int(asked)
    room = room_bytes(asked)
    return int((free if room is None else room) // whole_pages(nbytes))


def slow_bytes(config: RunConfig, architecture: ModelConfig, *how: Any) -> int:
    """Bytes of the experts that --expert_memory leaves in slow memory alone, at most. how: the
    spec, the device and the precision."""
    mixture = architecture.mixture
    if config.expert_memory is None or mixture is None:
        return 0
    nbytes = expert_bytes(architecture, *how, config.kernel)
    layers = sum(not mixture.is_dense(layer) for layer in range(architecture.num_layers))
    least = mixture.experts_per_token * nbytes  # what "auto" takes if nothing more is free
    return max(0, layers * mixture.num_experts - expert_slots(config, nbytes, least)) * nbytes


# ---------------------------------------------------------------------------------- what fits


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
    weights = 0
    if spec.scheme:
        size = size_of(architecture, spec.scheme, device, precision, config.kernel)
        slow = slow_bytes(config, architecture, spec.scheme, device, precision)
        weights = size.memory_bytes - slow

    def cached(positions: int, kind: CacheFactory = CACHES[name]) -> int:
        return kv_cache_bytes(architecture, config.batch_size, positions, precision, kind)

    need = cached(positions)
    shown = f"Weights: {size_text(weights)}; " if spec.scheme else ""
    shown += f"experts in slow memory alone: {size_text(slow)}; " if spec.scheme and slow else ""
    shown += f"KV cache: {size_text(need)}, {name}, {positions} positions"
    if config.batch_size > 1:
        shown += f", batch {config.batch_size}"
    if free is None or weights + need <= free:
        return shown
    fitting = bisect.bisect_right(range(1, positions + 1), free - weights, key=cached)
    if fitting:
        advice = f"--cache_size {fitting} is the largest that fits"
        smaller = [name for name in CACHES if _takes(CACHES[name], architecture)]
        smaller = [name for name in smaller if cached(positions, CACHES[name]) < need]
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


def _takes(kind: type[KVCache], architecture: ModelConfig) -> bool:
    """Whether this kind of cache supports the model's head_dim."""
    try:
        kind(1, 1, 1, architecture.head_dim, torch.bfloat16, "meta")
    except UsageError:
        return False
    return True


def kv_cache_bytes(
    architecture: ModelConfig,
    rows: int,
    positions: int,
    precision: torch.dtype,
    cache: CacheFactory,
) -> int:
    """Bytes of the caches of all layers."""
    shape = rows, architecture.num_kv_heads, positions, architecture.head_dim
    windows = Counter(spec.window for spec in architecture.layers)
    return sum(
        cache(*shape, precision, "meta", window).nbytes * count for window, count in windows.items()
    )
