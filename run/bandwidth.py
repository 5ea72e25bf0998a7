"""How fast this device reads memory: what a decoding step of one row is measured against."""

import statistics
import time
from collections.abc import Callable

import torch

import devices
from errors import KernelError
from ops.cpu import bandwidth as cpu

BYTES = 1 << 30  # more than any processor's cache: of 256 MB, some were read from one of 480 MB
REPEATS = 3
TORCH, OURS = "torch.amax", "quantbench::cpu_read"


class Bandwidth:
    """Reads a block of memory that no cache holds, with all of torch's threads on the CPU.

    `probe` names the op that reads. `caveat` says why its speed is not the memory's, or is None:
    on the CPU torch's own loop is slower than the C++ one, so that what decodes near the memory's
    limit would seem to pass it.
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
                    f"bandwidth was read with {TORCH}, which is slower than the memory: {error}; "
                    "shares of it are left out"
                )

    def measure(self) -> float:
        """Bytes per second, the median of three readings."""
        return statistics.median(self._once() for _ in range(REPEATS))

    def _once(self) -> float:
        devices.synchronize(self.device)
        started = time.perf_counter()
        self.read(self.block)
        devices.synchronize(self.device)
        return BYTES / (time.perf_counter() - started)
