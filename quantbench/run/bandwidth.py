"""How fast this device reads memory: the speed limit of decoding one row."""

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from quantbench import devices
from quantbench.errors import KernelError
from quantbench.ops.cpu import bandwidth as cpu

BYTES = 1 << 30  # read in each measurement; with 256 MB, a cache of 480 MB kept a part of them
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
REPEATS = 3  # readings, of which `measure` returns the median
TORCH, OURS = "torch.amax", "quantbench::cpu_read"  # the ops that can read


def last_level_cache(device: torch.device, root: Path = CACHES) -> int | None:
    """Bytes of the largest cache that a core of the processor, or a card, has; None where the
    system does not tell."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for file in root.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
    return max(sizes, default=None) if device.type == "cpu" else None


class Bandwidth:
    """Reads a block of memory larger than any cache; on the CPU with all of torch's threads.

    probe: the op that reads. caveat: why it does not reach the memory's speed, or None. On the CPU
    torch's own loop is slower than the C++ one, so that decoding near the limit would seem to
    exceed it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.block = torch.ones(BYTES // 4, dtype=torch.int32, device=device)
        self.read: Callable[[torch.Tensor], object] = torch.amax
        self.probe, self.caveat = TORCH, None
        if device.type == "cpu":
            try:
                cpu.read(self.block)
                self.read, self.probe = cpu.read, OURS
            except KernelError as error:
                self.caveat = (
                    f"memory bandwidth was measured with {TORCH}, which is slower than the memory: "
                    f"{error}; shares of the limit are left out"
                )

    def measure(self) -> float:
        """Bytes per second: the median of REPEATS readings."""
        return statistics.median(self.once() for _ in range(REPEATS))

    def once(self) -> float:
        """Bytes per second, of one reading."""
        devices.synchronize(self.device)
        started = time.perf_counter()
        self.read(self.block)
        devices.synchronize(self.device)
        return BYTES / (time.perf_counter() - started)
