"""How fast a decoding step's attention reads each kind of KV cache, against memory's own speed.

Kinds are timed in turn with reading memory, round after round, and nothing else runs: so both are
of the same minute.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import devices
from errors import UsageError
from kv_cache import CACHES
from models.checkpoints.load import load_config
from ops import attention as decode
from run.bandwidth import Bandwidth

AT_LEAST = 512 << 20  # bytes that a kind's layers hold together, more than any processor's cache


@dataclass
class Kind:
    """A kind's filled layers, and the seconds that attending over all of them took, each time."""

    name: str
    layers: list[Any]
    seconds: list[float]


def measured(
    checkpoint_path: str,
    depth: int,
    rows: int,
    device_name: str,
    precision: str,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Bytes and timings of every kind, ready for JSON.

    Raises UsageError for a dtype that no attention kernel takes.
    """
    config = load_config(checkpoint_path)
    device = devices.resolve(device_name)
    dtype = getattr(torch, precision, None)
    if dtype not in decode.DTYPES:
        raise UsageError(f"--precision {precision}: there are bfloat16, float16 and float32")
    group = config.num_heads // config.num_kv_heads
    kernel = decode.choose(device, config.head_dim, group, dtype)
    read = Bandwidth(device)

    shape = (rows, config.num_kv_heads, depth, config.head_dim, dtype)

    def filled(cache: type) -> list[Any]:
        layers = max(2, -(-AT_LEAST // cache(*shape, "meta").nbytes))
        made = [cache(*shape, device) for _ in range(layers)]
        for layer in made:
            layer.fill(depth)
        return made

    say("Filling some layers of each kind …")
    kinds, refused = [], []
    for name, cache in CACHES.items():
        try:
            kinds.append(Kind(name, filled(cache), []))
        except UsageError as error:
            refused.append(str(error))
    query = torch.randn(rows, config.num_heads, config.head_dim, device=device).to(dtype)
    first = torch.zeros(rows, dtype=torch.long, device=device)
    count = torch.full_like(first, depth)

    def attend(kind: Kind) -> float:
        devices.synchronize(device)
        started = time.perf_counter()
        for layer in kind.layers:
            key, value = layer.stored("key", rows), layer.stored("value", rows)
            decode.decode_attention(kernel.name, query, key, value, first, count)
        devices.synchronize(device)
        return time.perf_counter() - started

    speeds = []
    for number in range(rounds + 1):
        speeds.append(read.measure())
        for kind in kinds:
            seconds = attend(kind)
            if number:  # the first round compiles kernels and touches pages
                kind.seconds.append(seconds)
    return {
        "checkpoint_path": checkpoint_path,
        "heads": [config.num_heads, config.num_kv_heads, config.head_dim],
        "context_depth": depth,
        "batch_size": rows,
        "precision": precision,
        "device": {"type": device.type, **devices.describe(device)},
        "kernel": kernel.name,
        "why": kernel.reason,
        "refused": refused,
        "read_bytes_per_s": speeds[1:],
        "bandwidth_probe": read.probe,
        "bandwidth_caveat": read.caveat,
        "kinds": [
            {"name": kind.name, "layers": len(kind.layers), "seconds": kind.seconds}
            | {"layer_bytes": kind.layers[0].nbytes}
            for kind in kinds
        ],
    }


def table(report: dict[str, Any]) -> str:
    """A line for each kind: a layer's bytes and milliseconds, GB/s, and their part of the limit."""
    limit = statistics.median(report["read_bytes_per_s"])
    heads, kv_heads, head_dim = report["heads"]
    lines = [
        f"{heads} heads, {kv_heads} for keys and values, head_dim {head_dim}, "
        f"{report['context_depth']} positions, {report['batch_size']} rows, {report['precision']}",
        f"Memory is read at {limit / 1e9:.1f} GB/s; attention runs on {report['kernel']}"
        + (f", because {report['why']}" if report["why"] else ""),
        f"{'cache':8}{'MB/layer':>10}{'ms/layer':>10}{'GB/s':>8}{'(from – to)':>16}"
        f"{'of limit':>10}",
    ]
    for kind in report["kinds"]:
        speeds = sorted(
            kind["layer_bytes"] * kind["layers"] / seconds / 1e9 for seconds in kind["seconds"]
        )
        speed = statistics.median(speeds)
        lines.append(
            f"{kind['name']:8}{kind['layer_bytes'] / 1e6:10.2f}"
            f"{kind['layer_bytes'] / speed / 1e6:10.2f}{speed:8.1f}"
            f"{f'({speeds[0]:.1f} – {speeds[-1]:.1f})':>16}"
            + (f"{'-':>10}" if report["bandwidth_caveat"] else f"{speed * 1e9 / limit:10.0%}")
        )
    said = [report["bandwidth_caveat"]] if report["bandwidth_caveat"] else []
    return "\n".join(lines + said + report["refused"])
