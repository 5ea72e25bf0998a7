"""Measure this machine, so that runs can be predicted: what `quantbench calibrate` does.

    calibration = measure(settings, make_generator, say)

The models of MODELS exist only here: their widths are those of no published model, so that nothing
that is predicted later was calibrated on. Of them it measures

- the product of each shape by each scheme's kernel, over the rows of x;
- attention over each kind of cache, over depth, rows and heads, of a step and of a prompt;
- a prompt's layer without products and attention (norms, rotation, gates), over rows and widths;
- whole steps and prompts: what they take beyond these parts is the cost of a layer and of a step;
- memory, over the size of a block, read and copied; the draw of a token; the call of an op.

Each measurement takes some tenths of a second, and before each stands a reading of memory and of
arithmetic (`Speed`), so that a machine that drifts meanwhile can be corrected for it.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import devices
from benchlog.origin import versions
from estimate.calibration import (
    AttentionPoint,
    BandwidthPoint,
    Calibration,
    DrawPoint,
    ProductPoint,
    RestPoint,
    Speed,
    WholePoint,
)
from estimate.calibration_models import LARGE, MODELS
from estimate.resident import base_bytes
from kv_cache import CACHES
from kv_cache.base import KVCache
from models import build
from models.config import ModelConfig
from models.llama import Block, Transformer, rotation
from ops import attention as decode
from ops.prefill_attention import chunk_attention
from quantize.autoquant.race import module_bytes
from quantize.registry import Quantizer
from quantize.spec import COMPARED, parse_scheme
from run.bandwidth import Bandwidth
from run.generation import Generates

# (heads, kv_heads, head_dim): groups of 2, 4 and 8 query heads.
HEADS = [(16, 8, 128), (24, 6, 64), (24, 3, 64)]
ROWS = (1, 4, 16, 64, 128, 512, 2048, 4096)  # of x, in a product
LAST_ROWS = 16  # most rows for which the output layer is measured: a prompt has one row each
COSTLY_ROWS = 2048  # above this only the widest shape is measured: rates no longer change
CACHE_KINDS = ("dense", "int8", "int4")
STEP_BATCHES = (1, 4, 16)
STEP_DEPTHS = (0, 4096)  # of whole steps; with the second only full precision
PROMPTS = ((1, 128), (1, 512), (4, 128), (4, 512), (1, 1024))  # batch, positions
DEPTHS = ((1, 256), (1, 2048), (1, 8192), (4, 256), (4, 4096), (16, 256), (16, 2048))
QUANTIZED_DEPTHS = ((1, 256), (1, 4096), (4, 2048), (16, 2048))
CHUNKS = ((1, 128, 0), (1, 512, 0), (1, 512, 512), (1, 512, 2048), (4, 512, 0), (4, 512, 512),
          (16, 128, 0), (16, 512, 0), (16, 512, 512))  # batch, positions, earlier ones  # fmt: skip
BLOCKS = tuple(2**n for n in range(16, 31, 2))  # bytes, 64 KiB to 1 GiB
AT_LEAST = 0.08  # seconds of every measurement, and
REPEATS = 3  # times, at least
STREAMED = 128 << 20  # bytes of copies of a weight that are read in turn, so that none is cached
PROBE = (512, 2048, 2048)  # rows, inner, outer of the product by which arithmetic is read
HOLDS = 2.0  # seconds for which a reading of the machine's speed is taken to hold
USUAL = 0.85  # of the best reading of memory: below it the machine is not as it usually is
PAUSES, PAUSE = 2, 0.3  # readings, and seconds between them

Say = Callable[[str], None]
MakeGenerator = Callable[[Transformer, int, int, str], Generates]  # model, batch, cache, kind


@dataclass(frozen=True)
class Settings:
    """What is calibrated."""

    device: torch.device
    precision: torch.dtype
    schemes: Sequence[str] = COMPARED
    caches: Sequence[str] = CACHE_KINDS


class Probe:
    """Reads the machine's speed: of memory, and of a product in the calibration's precision."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.bandwidth = device, Bandwidth(device)
        rows, inner, outer = PROBE
        self.x = torch.randn(rows, inner, device=device).to(dtype)
        self.weight = torch.randn(outer, inner, device=device).to(dtype)
        self.operations = 2 * rows * inner * outer
        self.read_at: float = -math.inf
        self.last, self.best = Speed(0.0, 0.0), 0.0

    def speed(self, fresh: bool = False) -> Speed:
        """The machine's speed before a measurement: the last reading, if it is not older than
        HOLDS and not fresh, or a new one, of some hundredths of a second.

        Virtual machines are moved about by their host: on some, memory is read at two thirds of its
        speed for half a minute, whenever both cores happen to lie on one chip. So a reading far
        below the best so far is taken again after a pause, some times.
        """
        if not fresh and time.perf_counter() - self.read_at <= HOLDS:
            return self.last
        for _ in range(PAUSES):
            self.last = self.reading()
            self.best = max(self.best, self.last.read)
            if self.last.read >= USUAL * self.best:
                break
            time.sleep(PAUSE)
        self.read_at = time.perf_counter()
        return self.last

    def reading(self) -> Speed:
        """The speed at this moment."""
        seconds = statistics.median(self._seconds() for _ in range(3))
        return Speed(self.bandwidth.measure(), self.operations / seconds)

    def _seconds(self) -> float:
        devices.synchronize(self.device)
        started = time.perf_counter()
        nn.functional.linear(self.x, self.weight)
        devices.synchronize(self.device)
        return time.perf_counter() - started


def measure(settings: Settings, make_generator: MakeGenerator, say: Say) -> Calibration:
    """Calibrate the device. make_generator: (model, batch_size, cache_size, kv_cache) ->
    generate.Generator. Raises UsageError or KernelError for a scheme that has no kernel there."""
    started = time.perf_counter()
    for name in settings.schemes:
        Quantizer(parse_scheme(name), settings.device, settings.precision)
    resting = base(settings, make_generator)
    probe = Probe(settings.device, settings.precision)
    say("Memory, attention, the rest of a layer, and draws …")
    measured = replace(of_every_scheme(settings, probe), base_bytes=resting)
    for number, scheme in enumerate(settings.schemes, 1):
        say(f"Scheme {number} of {len(settings.schemes)}: {scheme} …")
        products, wholes = of_scheme(scheme, settings, make_generator, probe)
        measured.products.extend(products)
        measured.wholes.extend(wholes)
    return replace(measured, seconds=time.perf_counter() - started)


@torch.no_grad()
def of_every_scheme(settings: Settings, probe: Probe) -> Calibration:
    """What does not depend on the scheme: a calibration without products and whole models."""
    device = settings.device
    return Calibration(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        device={"type": device.type, **devices.describe(device)},
        precision=str(settings.precision).removeprefix("torch."),
        versions=versions(),
        bandwidth=list(_bandwidth(device, probe)),
        products=[],
        attention=[*_steps_attention(settings, probe), *_chunks_attention(settings, probe)],
        rest=list(_rest(settings, probe)),
        draws=list(_draws(settings)),
        wholes=[],
        call_seconds=_call_seconds(device),
        memory_bytes=devices.free_memory(device),
    )


@torch.no_grad()
def of_scheme(
    scheme: str, settings: Settings, make_generator: MakeGenerator, probe: Probe
) -> tuple[list[ProductPoint], list[WholePoint]]:
    """The scheme's products, and the steps and prompts of the calibration models in it."""
    products: list[ProductPoint] = []
    wholes: list[WholePoint] = []
    for name, config in MODELS.items():
        if name not in LARGE and scheme != settings.schemes[0]:
            continue
        model, kernels = random_model(config, scheme, settings)
        if name in LARGE:
            products += _products(model, scheme, kernels, settings, probe)
        wholes += _wholes(name, model, scheme, settings, make_generator, probe)
        del model
    return products, wholes


@torch.no_grad()
def base(settings: Settings, make_generator: MakeGenerator) -> int:
    """Resident bytes of a process that has run a model of next to no bytes."""
    small = ModelConfig("small", 128, 1, 2, 1, 64, 256, 512, 1024)
    for scheme in settings.schemes[:2]:
        model, _ = random_model(small, scheme, settings)
        prompt = torch.zeros(1, 32, dtype=torch.long, device=settings.device)
        make_generator(model, 1, 64, "dense").generate(prompt, 4)
        del model
    return base_bytes()


def timed(
    device: torch.device, call: Callable[..., object], *arguments: Any, each: int = 1
) -> float:
    """The median seconds of call(*arguments) ÷ each, after one that is not counted."""
    call(*arguments)
    seconds: list[float] = []
    while len(seconds) < REPEATS or sum(seconds) < AT_LEAST:
        devices.synchronize(device)
        started = time.perf_counter()
        call(*arguments)
        devices.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) / each


def _again(times: int, call: Callable[..., object], *arguments: Any) -> None:
    for _ in range(times):
        call(*arguments)


# ----------------------------------------------------------------------------------- memory, calls


def _bandwidth(device: torch.device, probe: Probe) -> Iterator[BandwidthPoint]:
    """Blocks of BLOCKS bytes; what a cache holds is read from there after the first time."""
    read = probe.bandwidth.read
    for size in BLOCKS:
        block = probe.bandwidth.block[: size // 4]
        times = max(1, (64 << 20) // size)
        reading = timed(device, _again, times, read, block, each=times)
        other = torch.empty_like(block)
        half, to = block[: len(block) // 2], other[: len(block) // 2]
        copying = timed(device, _again, times, to.copy_, half, each=times)
        yield BandwidthPoint(size, size / reading, size / copying)


def _call_seconds(device: torch.device) -> float:
    """Seconds of an op on one number, called from Python."""
    x = torch.zeros(1, device=device)
    return timed(device, _again, 1000, x.add_, 1, each=1000)


def _draws(settings: Settings) -> Iterator[DrawPoint]:
    """The draw of a token, greedy and among the likeliest 200."""
    for rows, vocabulary in itertools.product((1, 16), (32768, 131072)):
        logits = torch.randn(rows, vocabulary, device=settings.device).to(settings.precision)
        seconds = timed(settings.device, logits.argmax, -1, True)
        yield DrawPoint(True, rows, vocabulary, seconds)
        seconds = timed(settings.device, _likeliest, logits)
        yield DrawPoint(False, rows, vocabulary, seconds)


def _likeliest(logits: Tensor) -> object:
    return logits.float().topk(200)


# ---------------------------------------------------------------------------------- products


def random_model(
    config: ModelConfig, scheme: str, settings: Settings
) -> tuple[Transformer, dict[str, str]]:
    """A model of random weights, quantized; and the kernel of each of its layers."""
    with torch.device("meta"):
        model = build(config).to(settings.precision)
    noise = torch.randn(1 << 18, device=settings.device).mul_(0.02).to(settings.precision)
    quantizer = Quantizer(parse_scheme(scheme), settings.device, settings.precision)
    kernels = {}
    for name in [name for name, module in model.named_modules() if module._parameters]:
        module = model.get_submodule(name)
        for kind, parameter in list(module.named_parameters(recurse=False)):
            count = parameter.numel()
            weight = noise.repeat(-(-count // len(noise)))[:count].view(parameter.shape)
            setattr(module, kind, nn.Parameter(weight.clone(), requires_grad=False))
        before = dict(quantizer.ran)
        model.set_submodule(name, quantizer(name, module))
        ran = [kernel for kernel, n in quantizer.ran.items() if n > before.get(kernel, 0)]
        kernels[name] = ran[0] if ran else "torch"
    return model.eval().requires_grad_(False), kernels


def _products(
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
    widest = max((s for s, names in shapes.items() if "output" not in names), key=lambda s: s[0])
    for (outer, inner), names in shapes.items():
        module = layers[names[0]]
        stack: list[nn.Module] = [layers[layer] for layer in names]
        size = module_bytes(module)
        while len(stack) * size < STREAMED and len(stack) < 64:
            stack.append(_copied(module))
        for rows in ROWS:
            last = "output" in names and rows > LAST_ROWS
            if last or (rows > COSTLY_ROWS and (outer, inner) != widest):
                continue
            used = stack if rows <= LAST_ROWS else stack[: max(1, 512 // rows)]
            x = torch.randn(rows, inner, device=settings.device).to(settings.precision)
            speed = probe.speed()
            seconds = timed(settings.device, _each, used, x, each=len(used))
            yield ProductPoint(scheme, kernels[names[0]], rows, inner, outer, size, seconds, speed)


def _each(layers: Sequence[nn.Module], x: Tensor) -> None:
    for layer in layers:
        layer(x)


def _copied(module: nn.Linear) -> nn.Module:
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
    _write(cache)
    return cache


def _write(cache: KVCache) -> None:
    for buffer in cache.buffers():
        if buffer.is_floating_point() and buffer.itemsize > 1:
            some = torch.randn(buffer.shape[-1], device=buffer.device).to(buffer.dtype)
            buffer.copy_(some.expand_as(buffer))
        else:
            buffer.view(torch.uint8).fill_(0x35)


def _steps_attention(settings: Settings, probe: Probe) -> Iterator[AttentionPoint]:
    """One new position per row over a filled cache."""
    device = settings.device
    for heads, kind in itertools.product(HEADS, settings.caches):
        H, K, E = heads
        kernel = decode.choose(device, E, H // K, settings.precision).name
        for rows, depth in DEPTHS if kind == "dense" else QUANTIZED_DEPTHS:
            size = CACHES[kind](rows, K, depth, E, settings.precision, "meta").nbytes
            count = max(1, min(32, STREAMED // size))
            caches = [_filled(kind, rows, heads, depth, settings) for _ in range(count)]
            query = torch.randn(rows, H, E, device=device).to(settings.precision)
            first = torch.zeros(rows, dtype=torch.long, device=device)
            filled = torch.full_like(first, depth)

            speed = probe.speed()
            seconds = timed(device, _attend, kernel, caches, query, first, filled, each=count)
            yield AttentionPoint(kind, rows, 1, depth, *heads, size, seconds, speed)


def _attend(
    kernel: str, caches: Sequence[KVCache], query: Tensor, first: Tensor, filled: Tensor
) -> None:
    for cache in caches:
        key, value = cache.stored("key", len(query)), cache.stored("value", len(query))
        decode.decode_attention(kernel, query, key, value, first, filled)


def _chunks_attention(settings: Settings, probe: Probe) -> Iterator[AttentionPoint]:
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
            speed = probe.speed()
            seconds = timed(device, chunk_attention, query, key, value, *past, start)
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

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, start: int
    ) -> Tensor:
        self.cache.update(positions, key, value)
        return self.result


def _rest(settings: Settings, probe: Probe) -> Iterator[RestPoint]:
    """A layer of which products and attention take no time, over PROMPTS and widths."""
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
        for B, S in (*PROMPTS[:4], (16, 512)):
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
            cos, sin = rotation(config, positions)
            x = noise(B, S, D)
            speed = probe.speed()
            seconds = timed(device, block, x, cos, sin, positions, stores, 0)
            normed = (H + K) * E if config.qk_norm else 0
            yield RestPoint(B * S, D, (H + 2 * K) * E, F, normed, seconds, speed)


# ---------------------------------------------------------------------------------- whole models


def _wholes(
    name: str,
    model: Transformer,
    scheme: str,
    settings: Settings,
    make_generator: MakeGenerator,
    probe: Probe,
) -> Iterator[WholePoint]:
    """Steps and prompts of a calibration model, as a run computes them."""
    config, device = model.config, settings.device
    all_caches = scheme == settings.schemes[0] and name in LARGE
    depths = STEP_DEPTHS if all_caches else STEP_DEPTHS[:1]
    kinds = settings.caches if all_caches else settings.caches[:1]
    for B, depth, kind in itertools.product(STEP_BATCHES, depths, kinds):
        generator = make_generator(model, B, depth + 64, kind)
        token = torch.zeros(B, 1, dtype=torch.long, device=device)
        if depth:
            for cache in generator.caches:
                _write(cache)
        speed = probe.speed()
        generator.generate(token, 3, depth)
        seconds: list[float] = []
        while len(seconds) < REPEATS or sum(seconds) * 8 < 2 * AT_LEAST:
            seconds.append(generator.generate(token, 9, depth).decode_seconds / 8)
        step = statistics.median(seconds)
        yield WholePoint(scheme, name, kind, generator.decoder.name, B, 1, depth + 5, step, speed)
    for B, S in PROMPTS:
        generator = make_generator(model, B, S + 1, "dense")
        prompt = torch.randint(config.vocab_size, (B, S), device=device)
        speed = probe.speed()
        generator.generate(prompt, 1)
        seconds = []
        while len(seconds) < 2 or sum(seconds) < AT_LEAST:
            seconds.append(generator.generate(prompt, 1).prefill_seconds)
        whole = statistics.median(seconds)
        yield WholePoint(scheme, name, "dense", generator.decoder.name, B, S, 0, whole, speed)
