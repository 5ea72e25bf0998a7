"""Measures what two ranks on this machine take to exchange numbers, by size: part of `calibrate`.

    measured(torch.device("cpu"), "bfloat16")       # [ExchangePoint("all_reduce", …), …]

Two processes meet as the ranks of a run do (run/parallel.py) and call ops.ranks.Ranks, whatever it
exchanges through here. Rank 0 writes what it measured into a file.

    python -m estimate.exchanging FILE cpu bfloat16     # one rank of them
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quantbench import devices
from quantbench.estimate.calibration import ExchangePoint
from quantbench.log.config import RunConfig
from quantbench.ops.ranks import Ranks
from quantbench.run import environment, launch, parallel
from quantbench.typed_json import from_json, to_json

MODULE = "quantbench.estimate.exchanging"
RANKS = 2
SUMS = tuple(2**n for n in range(11, 24, 3))  # bytes: a position of a small model to a long prompt
GATHERS = SUMS[1:4]  # logits of some sequences
REPEATS = 7
AT_LEAST = 0.01  # seconds of each repeat


def measured(device: torch.device, precision: str) -> list[ExchangePoint]:
    """The exchanges that were timed; none where two ranks cannot run on this kind of device.

    Raises RankFailed, one line, where a rank fails.
    """
    if device.type not in parallel.BACKENDS or (
        device.type == "cuda" and torch.cuda.device_count() < RANKS
    ):
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points.json"
        command = [sys.executable, "-m", MODULE, str(path), device.type, precision]
        with launch.run_ranks(command, RANKS) as ranks:
            ranks.wait()
        return from_json(list[ExchangePoint], json.loads(path.read_text()))


def main(path: str, device_type: str, precision: str) -> None:
    """One rank: meet the others, and exchange."""
    where = launch.place()
    assert where is not None
    launch.end_with_launcher()
    environment.prepare()
    environment.use_threads(RunConfig(device=device_type))
    ranks = parallel.join(where, torch.device(device_type))
    points = timed(ranks, devices.resolve(device_type), getattr(torch, precision))
    if where.rank == 0:
        Path(path).write_text(json.dumps(to_json(points)))
    parallel.meet(ranks)


def timed(
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    sums: Sequence[int] = SUMS,
    gathers: Sequence[int] = GATHERS,
) -> list[ExchangePoint]:
    """Sums and gathers of tensors of so many bytes. Every rank calls it."""
    points = []
    through = parallel.backend(ranks)
    for kind, sizes, call in (
        ("all_reduce", sums, ranks.sum),
        ("all_gather", gathers, ranks.gather),
    ):
        for size in sizes:
            x = torch.ones(1, size // dtype.itemsize, dtype=dtype, device=device)
            seconds = _seconds(ranks, device, call, x)
            points.append(ExchangePoint(kind, through, ranks.size, size, seconds))
    return points


def _seconds(
    ranks: Ranks, device: torch.device, call: Callable[[torch.Tensor], object], x: torch.Tensor
) -> float:
    """The median of some repeats. All ranks make as many calls as rank 0 says."""
    once = _timed(device, call, x, 3) / 3
    (calls,) = ranks.first([max(1.0, AT_LEAST / once)], device)
    each = []
    for _ in range(REPEATS):
        ranks.total([0.0], device)  # they begin together
        each.append(_timed(device, call, x, int(calls)) / int(calls))
    return statistics.median(each)


def _timed(
    device: torch.device, call: Callable[[torch.Tensor], object], x: torch.Tensor, calls: int
) -> float:
    devices.synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        call(x)
    devices.synchronize(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
