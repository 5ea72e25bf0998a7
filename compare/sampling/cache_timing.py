"""python -m kv_cache: what each kind of KV cache takes, and how fast a step's attention reads it.

python -m kv_cache                                         # Llama-3.2-1B's heads, 65536 positions
python -m kv_cache --checkpoint_path dummy:Meta-Llama-3-8B --context_depth 8192

Kinds are timed in turn with reading memory and doing nothing else, round after round, so that both
are of the same minute.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from errors import QuantbenchError, UsageError

AT_LEAST = 512 << 20  # bytes that a kind's layers hold together, more than any processor's cache


@click.command()
@click.option("--checkpoint_path", default="dummy:Llama-3.2-1B", help="A model with such heads.")
@click.option("--context_depth", default=65536, help="Positions to attend over. [65536]")
@click.option("--batch_size", default=1, help="Rows. [1]")
@click.option("--device", default="auto", help="cpu, cuda, xpu, mps. [auto]")
@click.option("--precision", default="bfloat16", help="bfloat16, float16, float32. [bfloat16]")
@click.option("--rounds", default=15, help="Timings of each kind. [15]")
@click.option("--json", "json_path", help="Write every timing here, too.")
def main(
    checkpoint_path: str,
    context_depth: int,
    batch_size: int,
    device: str,
    precision: str,
    rounds: int,
    json_path: str | None,
) -> None:
    """Measure decode attention alone, over every kind of KV cache, against memory's speed."""
    from run import environment

    environment.prepare()
    try:
        if min(context_depth, batch_size, rounds) < 1:
            raise UsageError("--context_depth, --batch_size and --rounds begin at 1")
        report = measured(checkpoint_path, context_depth, batch_size, device, precision, rounds)
        click.echo(table(report))
        if json_path:
            Path(json_path).write_text(json.dumps(report, indent=1) + "\n")
    except (QuantbenchError, OSError) as error:
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(getattr(error, "exit_code", 1))


@dataclass
class Kind:
    """A kind's filled layers, and the seconds that attending over all of them took, each time."""

    name: str
    layers: list[Any]
    seconds: list[float]


def measured(
    checkpoint_path: str, depth: int, rows: int, device_name: str, precision: str, rounds: int
) -> dict[str, Any]:
    """Bytes and timings of every kind, ready for JSON."""
    import torch

    import devices
    from kv_cache import CACHES
    from models.checkpoints.load import load_config
    from ops import attention as decode
    from run.bandwidth import Bandwidth

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

    click.echo("Filling some layers of each kind …", err=True)
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
            sides = (layer.stored(side, rows) for side in ("key", "value"))
            decode.decode_attention(kernel.name, query, *sides, first, count)
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


if __name__ == "__main__":
    main()
