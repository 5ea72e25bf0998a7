"""Joining the ranks of a run (ops/ranks.py): gloo on CPUs, NCCL on CUDA.

line = warning(place(), device)     # what it costs if ranks have to share cores
ranks = join(place(), device)       # which can exchange numbers now
"""

import os
import secrets
from pathlib import Path

import torch
import torch.distributed as dist

from quantbench import host
from quantbench.environment import STORE, Place, crowded
from quantbench.errors import UsageError
from quantbench.ops.cpu import build
from quantbench.ops.cpu import ranks as shared_memory
from quantbench.ops.ranks import Ranks

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def warning(where: Place, device: torch.device) -> str | None:
    """A line that says what it costs if the ranks have to share cores; None if each has its own.

    Raises UsageError if they cannot run on this machine's devices."""
    if device.type not in BACKENDS:
        raise UsageError(f"--tp {where.size}: ranks run on cpu or cuda, not on {device.type}")
    if device.index is not None:
        raise UsageError(
            f"--tp {where.size}: --device {device} is one device, and every rank takes its own; "
            f"give --device {device.type}"
        )
    if device.type == "cuda" and where.local_size > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(
            f"--tp {where.local_size}: every rank needs its own GPU, and here "
            f"{'is' if count == 1 else 'are'} {count}; --tp {count} is the most"
        )
    return crowded(where.local_size, host.cores()) if device.type == "cpu" else None


def join(where: Place, device: torch.device) -> Ranks:
    """Meet the other ranks. On CUDA each takes the device of its number on its machine."""
    if device.type == "cuda":
        torch.cuda.set_device(where.local_rank)
    if not dist.is_initialized():
        store = os.environ.get(STORE)
        dist.init_process_group(
            BACKENDS[device.type],
            init_method=f"file://{store}" if store else "env://",
            rank=where.rank,
            world_size=where.size,
        )
    assert dist.group.WORLD is not None
    group = where.rank, where.size, dist.group.WORLD.group_name
    ranks = Ranks(*group)
    together = device.type == "cpu" and where.local_size == where.size
    memory = _shared_memory(ranks) if together else 0
    return shared_memory.SharedMemoryRanks(*group, memory) if memory else ranks


def _shared_memory(ranks: Ranks) -> int:
    """A handle of ops/cpu/ranks.py; 0 where one of the ranks cannot have it."""
    folder = Path("/dev/shm")
    path = [str(folder / f"quantbench-{secrets.token_hex(8)}")]
    dist.broadcast_object_list(path)
    possible = folder.is_dir() and build.refusal() is None
    handle = shared_memory.open_memory(path[0], ranks.rank, ranks.size) if possible else 0
    (opened,) = ranks.total([float(handle != 0)])
    if ranks.rank == 0:
        Path(path[0]).unlink(missing_ok=True)  # it lives as long as the ranks
    return handle if opened == ranks.size else 0
