"""How fast a decoding step's attention reads each kind of KV cache, against memory's own speed.

Every round reads memory and attends over each kind of cache, so that a change in the machine's
speed affects both alike.
"""

import math
import statistics
import time
from dataclasses import dataclass

import torch

from quantbench import devices
from quantbench.errors import UsageError
from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import KVCache
from quantbench.log.config import RunConfig
from quantbench.models.loading import load_config
from quantbench.ops import attention as decode
from quantbench.progress import Progress
from quantbench.run.bandwidth import Bandwidth
from quantbench.run.environment import Environment, in_force

AT_LEAST = 512 << 20  # bytes in all layers of a kind; more than any processor's cache


@dataclass(frozen=True)
class CacheTiming:
    """How long attending over several layers of one kind of cache took."""

    name: str
    layers: int
    seconds: list[float]  # for all layers, once a round
    layer_bytes: int


@dataclass(frozen=True)
class CacheReport:
    """What was measured, and on what."""

    checkpoint_path: str
    heads: tuple[int, int, int]  # query heads, key/value heads, head_dim
    context_depth: int  # positions
    batch_size: int
    precision: str
    device: dict[str, str | int]
    environment: Environment
    kernel: str  # of attention
    why: str | None  # why it is not the device's own kernel
    refused: list[str]  # why some kinds were not measured
    read_bytes_per_s: list[float]  # once a round
    bandwidth_probe: str
    bandwidth_caveat: str | None  # why this is not the memory's speed
    kinds: list[CacheTiming]


def measured(run: RunConfig, depth: int, rounds: int) -> CacheReport:
    """Bytes and timings of every kind. depth: positions in the caches."""
    config, rows = load_config(run.checkpoint_path), run.batch_size
    device, dtype = devices.resolve(run.device), getattr(torch, run.precision)
    group = config.num_heads // config.num_kv_heads
    kernel = decode.choose(device, config.head_dim, group, dtype)
    read = Bandwidth(device)

    shape = (rows, config.num_kv_heads, depth, config.head_dim, dtype)
    query = torch.randn(rows, config.num_heads, config.head_dim, device=device).to(dtype)
    first = torch.zeros(rows, dtype=torch.long, device=device)
    count = torch.full_like(first, depth)

    def filled(cache: type[KVCache]) -> list[KVCache]:
        least = math.ceil(AT_LEAST / cache(*shape, "meta").nbytes)
        layers = [cache(*shape, device) for _ in range(max(2, least))]
        for layer in layers:
            layer.fill(depth)
        return layers

    def attend(layers: list[KVCache]) -> float:
        devices.synchronize(device)
        started = time.perf_counter()
        for layer in layers:
            key, value = layer.stored("key", rows), layer.stored("value", rows)
            decode.decode_attention(kernel.name, query, key, value, first, count)
        devices.synchronize(device)
        return time.perf_counter() - started

    kinds: dict[str, list[KVCache]] = {}
    refused, speeds = [], []
    with Progress() as progress:
        for name, cache in CACHES.items():
            progress(f"{name}: filling layers")
            try:
                kinds[name] = filled(cache)
            except UsageError as error:
                refused.append(str(error))
        timings: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(rounds + 1):
            progress("timing attention", f"round {number} of {rounds}")  # 0 does not count
            speeds.append(read.measure())
            for name, layers in kinds.items():
                timings[name].append(attend(layers))
    return CacheReport(  # without the first round, which compiled kernels and touched pages
        checkpoint_path=run.checkpoint_path,
        heads=(config.num_heads, config.num_kv_heads, config.head_dim),
        context_depth=depth,
        batch_size=rows,
        precision=run.precision,
        device={"type": device.type, **devices.describe(device)},
        environment=in_force(),
        kernel=kernel.name,
        why=kernel.reason,
        refused=refused,
        read_bytes_per_s=speeds[1:],
        bandwidth_probe=read.probe,
        bandwidth_caveat=read.caveat,
        kinds=[
            CacheTiming(name, len(layers), timings[name][1:], layers[0].nbytes)
            for name, layers in kinds.items()
        ],
    )


def table(report: CacheReport) -> str:
    """A line for each kind: a layer's bytes and milliseconds, GB/s, and the share of the limit."""
    limit = statistics.median(report.read_bytes_per_s)
    heads, kv_heads, head_dim = report.heads
    lines = [
        f"{heads} heads, {kv_heads} for keys and values, head_dim {head_dim}, "
        f"{report.context_depth} positions, {report.batch_size} rows, {report.precision}",
        f"Memory is read at {limit / 1e9:.1f} GB/s; attention runs on {report.kernel}"
        + (f", because {report.why}" if report.why else ""),
        f"{'cache':8}{'MB/layer':>10}{'ms/layer':>10}{'GB/s':>8}{'(from – to)':>16}"
        f"{'of limit':>10}",
    ]
    for kind in report.kinds:
        speeds = sorted(kind.layer_bytes * kind.layers / seconds / 1e9 for seconds in kind.seconds)
        speed = statistics.median(speeds)
        lines.append(
            f"{kind.name:8}{kind.layer_bytes / 1e6:10.2f}"
            f"{kind.layer_bytes / speed / 1e6:10.2f}{speed:8.1f}"
            f"{f'({speeds[0]:.1f} – {speeds[-1]:.1f})':>16}"
            + (f"{'-':>10}" if report.bandwidth_caveat else f"{speed * 1e9 / limit:10.0%}")
        )
    return "\n".join([*lines, *filter(None, [report.bandwidth_caveat]), *report.refused])
