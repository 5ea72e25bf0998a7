"""What the parts of a model take alone: products, attention, a layer's rest, memory, draws, calls.

    list(alone.products(model, scheme, kernels, settings, probe))       # ProductPoints
    list(alone.weight_stacks(model, scheme, settings, probe))           # StackPoints
    list(alone.attention_of_steps(settings, probe))                     # AttentionPoints

Weights and caches that are read once in a step lie at several places and are read in turn, so that
the processor's caches hold little of them; stacks are of several sizes, for what they do hold.
estimate/machine.py puts them together.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantbench.estimate.calibration import (
    STREAMED,
    AttentionPoint,
    BandwidthPoint,
    DrawPoint,
    ProductPoint,
    RestPoint,
    StackPoint,
    copies_of,
)
from quantbench.estimate.calibration_models import MODELS
from quantbench.estimate.probe import Probe, Settings, median_seconds
from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import KVCache
from quantbench.models.llama import Block, Transformer, rotation
from quantbench.ops import attention as decode
from quantbench.ops.prefill_attention import chunk_attention
from quantbench.quantize.autoquant.race import module_bytes

# (heads, kv_heads, head_dim): groups of 2, 4, 8 and 5 query heads. A kernel that takes heads in
# fours takes as long for the last as for eight; one that takes them one by one does not.
HEADS = [(16, 8, 128), (24, 6, 64), (24, 3, 64), (10, 2, 64)]
# Rows of x in a product. On the CPU a prompt's pass has 512, or 32 of each sequence if these are
# more: 4096 with 128 sequences (devices.prefill_chunk).
ROWS = (1, 4, 16, 128, 512, 2048, 4096)
LAST_ROWS = 16  # most rows for which the output layer is measured: a prompt has one row each
DEPTHS = ((1, 4), (1, 256), (1, 2048), (1, 8192), (4, 4), (4, 256), (4, 4096), (16, 4), (16, 256),
          (16, 2048))  # fmt: skip
QUANTIZED_DEPTHS = ((1, 4), (16, 4), (1, 256), (1, 4096), (4, 2048), (16, 2048))
BATCHES = (1, 4, 16)
# batch, positions, earlier ones
CHUNKS = ((1, 128, 0), (1, 512, 0), (1, 512, 512), (1, 512, 2048), (4, 128, 0), (4, 128, 128),
          (4, 128, 896), (16, 32, 0), (16, 32, 96), (16, 32, 992))  # fmt: skip
PASSES = ((1, 32), (1, 128), (1, 512), (4, 128), (16, 32))  # of the rest of a layer
# Bytes, up to 1 GiB; closer where last-level caches end.
SIZES = (1, 4, 16, 64, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
BLOCKS = tuple(size << 16 for size in SIZES)
# Bytes of all weights or caches of a stack. Kernels fall off at other sizes than the reading of a
# block does (docs/LOG.md), so sizes are close up to those of the largest caches.
MIB = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)
STACKS = tuple(size << 20 for size in MIB)
STACKED_POSITIONS = 2048  # in each cache of a stack, of one sequence
AT_LEAST = 0.04  # seconds of every measurement
SETTLED = 0.15  # of a block's, or a stack's: a cache takes it in bit by bit

# ----------------------------------------------------------------------------------- memory, calls


def bandwidth(probe: Probe) -> Iterator[BandwidthPoint]:
    """Blocks of BLOCKS bytes; what a cache holds is read from there after the first time."""
    read, device = probe.bandwidth.read, probe.device
    for size in BLOCKS:
        block = probe.bandwidth.block[: size // 4]
        times = max(1, (64 << 20) // size)
        speed, reading = probe.timed(SETTLED, _again, times, read, block, each=times)
        other = torch.empty_like(block)
        half, to = block[: len(block) // 2], other[: len(block) // 2]
        copying = median_seconds(device, AT_LEAST, _again, times, to.copy_, half, each=times)
        yield BandwidthPoint(size, size / reading, size / copying, speed)


def _again(times: int, call: Callable[..., object], *arguments: Any) -> None:
    for _ in range(times):
        call(*arguments)


def call_seconds(device: torch.device) -> float:
    """Seconds of an op on one number, called from Python."""
    x = torch.zeros(1, device=device)
    return median_seconds(device, AT_LEAST, _again, 1000, x.add_, 1, each=1000)


def draws(settings: Settings) -> Iterator[DrawPoint]:
    """The draw of a token, greedy and among the likeliest 200."""
    device = settings.device
    for rows, vocabulary in itertools.product(BATCHES, (32768, 131072)):
        logits = torch.randn(rows, vocabulary, device=device).to(settings.precision)
        seconds = median_seconds(device, AT_LEAST / 2, logits.max, -1, True)
        yield DrawPoint(True, rows, vocabulary, seconds)
        seconds = median_seconds(device, AT_LEAST / 2, _likeliest, logits)
        yield DrawPoint(False, rows, vocabulary, seconds)


def _likeliest(logits: Tensor) -> object:
    return logits.float().topk(200)


# ---------------------------------------------------------------------------------- products


def products(
    model: Transformer,
    scheme: str,
    kernels: dict[str, str],
    settings: Settings,
    probe: Probe,
) -> Iterator[ProductPoint]:
    """Each shape of the model's linear layers, over ROWS."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    shapes: dict[tuple[int, int], list[str]] = {}
    for layer, module in layers.items():
        shapes.setdefault((module.out_features, module.in_features), []).append(layer)
    for (outer, inner), names in shapes.items():
        module = layers[names[0]]
        stack: list[nn.Module] = [layers[layer] for layer in names]
        size = module_bytes(module)
        while len(stack) * size < STREAMED and len(stack) < 64:
            stack.append(_copied(module))
        for rows in ROWS:
            if rows > LAST_ROWS and "output" in names:
                continue
            used = stack if rows <= LAST_ROWS else stack[: max(1, 512 // rows)]
            x = torch.randn(rows, inner, device=settings.device).to(settings.precision)
            speed, seconds = probe.timed(AT_LEAST, _each, used, x, each=len(used))
            yield ProductPoint(scheme, kernels[names[0]], rows, inner, outer, size, seconds, speed)


def weight_stacks(
    model: Transformer, scheme: str, settings: Settings, probe: Probe
) -> Iterator[StackPoint]:
    """Products of one shape, over STACKS of its weights."""
    module = model.get_submodule("layers.0.attention.wqkv")
    assert isinstance(module, nn.Linear)
    size, stack = module_bytes(module), [module]
    for count in _counts(size):
        stack += [_copied(module) for _ in range(count - len(stack))]
        for rows in BATCHES:
            x = torch.randn(rows, module.in_features, device=settings.device)
            x = x.to(settings.precision)
            speed, seconds = probe.timed(SETTLED, _each, stack, x)
            yield StackPoint(scheme, rows, count * size, seconds, speed)


def _counts(size: int) -> list[int]:
    """How many weights or caches of `size` bytes the STACKS have; more than one."""
    counts = (round(whole / size) for whole in STACKS)
    return sorted({count for count in counts if count > 1})


def _each(layers: Sequence[nn.Module], x: Tensor) -> None:
    for layer in layers:
        layer(x)


def _copied(module: nn.Linear) -> nn.Linear:
    """The layer at another place in memory."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(module.__dict__)
    copied._parameters = dict(module._parameters)
    copied.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    return copied


# ---------------------------------------------------------------------------------- attention


def _filled(
    kind: str, rows: int, heads: tuple[int, int, int], slots: int, settings: Settings
) -> KVCache:
    """A cache of one layer, every byte of it written: what is only allocated lies nowhere."""
    _, kv_heads, head_dim = heads
    cache = CACHES[kind](rows, kv_heads, slots, head_dim, settings.precision, settings.device)
    write(cache)
    return cache


def write(cache: KVCache) -> None:
    """Write every byte of a cache."""
    for buffer in cache.buffers():
        if buffer.is_floating_point() and buffer.itemsize > 1:
            some = torch.randn(buffer.shape[-1], device=buffer.device).to(buffer.dtype)
            buffer.copy_(some.expand_as(buffer))
        else:
            buffer.view(torch.uint8).fill_(0x35)


def attention_of_steps(settings: Settings, probe: Probe) -> Iterator[AttentionPoint]:
    """One new position per row over a filled cache."""
    device = settings.device
    for heads, kind in itertools.product(HEADS, settings.caches):
        H, K, E = heads
        kernel = decode.choose(device, E, H // K, settings.precision).name
        for rows, depth in DEPTHS if kind == "dense" else QUANTIZED_DEPTHS:
            size = CACHES[kind](rows, K, depth, E, settings.precision, "meta").nbytes
            count = copies_of(size)
            caches = [_filled(kind, rows, heads, depth, settings) for _ in range(count)]
            query = torch.randn(rows, H, E, device=device).to(settings.precision)
            first = torch.zeros(rows, dtype=torch.long, device=device)
            filled = torch.full_like(first, depth)
            speed, seconds = probe.timed(
                AT_LEAST, _attend, kernel, caches, query, first, filled, each=count
            )
            yield AttentionPoint(kind, rows, 1, depth, *heads, size, seconds, speed)


def cache_stacks(settings: Settings, probe: Probe) -> Iterator[StackPoint]:
    """A new position of one sequence over STACKS of caches."""
    device, heads = settings.device, HEADS[0]
    H, K, E = heads
    kernel = decode.choose(device, E, H // K, settings.precision).name
    query = torch.randn(1, H, E, device=device).to(settings.precision)
    first = torch.zeros(1, dtype=torch.long, device=device)
    filled = torch.full_like(first, STACKED_POSITIONS)
    for kind in settings.caches:
        caches: list[KVCache] = []
        size = CACHES[kind](1, K, STACKED_POSITIONS, E, settings.precision, "meta").nbytes
        for count in _counts(size):
            more = range(count - len(caches))
            caches += [_filled(kind, 1, heads, STACKED_POSITIONS, settings) for _ in more]
            speed, seconds = probe.timed(SETTLED, _attend, kernel, caches, query, first, filled)
            yield StackPoint(kind, 1, count * size, seconds, speed)


def _attend(
    kernel: str, caches: Sequence[KVCache], query: Tensor, first: Tensor, filled: Tensor
) -> None:
    for cache in caches:
        key, value = cache.stored("key", len(query)), cache.stored("value", len(query))
        decode.decode_attention(kernel, query, key, value, first, filled)


def attention_of_prompts(settings: Settings, probe: Probe) -> Iterator[AttentionPoint]:
    """A chunk of a prompt to itself and to what is before it."""
    device = settings.device
    for heads, (rows, S, start) in itertools.product(HEADS, CHUNKS):
        H, K, E = heads
        for kind in settings.caches if start else settings.caches[:1]:
            if kind != "dense" and rows > 1:
                continue
            cache = _filled(kind, rows, heads, start + S, settings)
            sides = [torch.randn(rows, n, S, E, device=device) for n in (H, K, K)]
            query, key, value = (side.to(settings.precision) for side in sides)
            past = cache.stored("key", rows), cache.stored("value", rows)
            given = (query, key, value, *past, torch.arange(start, start + S))
            speed, seconds = probe.timed(AT_LEAST, chunk_attention, *given)
            yield AttentionPoint(kind, rows, S, start, *heads, cache.nbytes, seconds, speed)


# ---------------------------------------------------------------------------------- the rest


class _Given(nn.Module):
    """A layer that gives the same tensor for every x: what is left costs the time of the rest."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Tensor:
        return self.result


class _StoresOnly:
    """A cache that stores keys and values, and gives a result that it did not compute."""

    def __init__(self, cache: KVCache, result: Tensor) -> None:
        self.cache, self.result = cache, result

    def update(self, positions: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.cache.store(positions, key, value)
        return key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        return self.result


def rest(settings: Settings, probe: Probe) -> Iterator[RestPoint]:
    """A layer of which products and attention take no time, over PASSES and widths."""
    device, dtype = settings.device, settings.precision
    narrow, wide = MODELS["narrow"], MODELS["wide"]
    others = (
        replace(wide, qk_norm=False),
        replace(narrow, ffn_dim=8192),
        replace(narrow, dim=2816, num_heads=36),
        replace(wide, dim=896, num_kv_heads=2, ffn_dim=2560, qk_norm=False),
    )

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    for config in (narrow, wide, *others):
        D, E, F = config.dim, config.head_dim, config.ffn_dim
        H, K = config.num_heads, config.num_kv_heads
        block = Block(config).to(device, dtype)
        for B, S in PASSES:
            for name, width in (
                ("attention.wqkv", (H + 2 * K) * E),
                ("attention.wo", D),
                ("feed_forward.w13", 2 * F),
                ("feed_forward.w2", D),
            ):
                block.set_submodule(name, _Given(noise(B, S, width)))
            cache = CACHES["dense"](B, K, S, E, dtype, device)
            stores = _StoresOnly(cache, noise(B, H, S, E))
            positions = torch.arange(S, device=device)
            cos, sin = rotation(config, positions, device)
            x = noise(B, S, D)
            block.attention.attend = stores.attend
            speed, seconds = probe.timed(AT_LEAST, block, x, cos, sin, positions, stores)
            normed = (H + K) * E if config.qk_norm else 0
            yield RestPoint(B * S, D, (H + 2 * K) * E, F, normed, seconds, speed)
