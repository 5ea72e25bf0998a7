"""How fast this device reads memory: what a decoding step of one row is measured against."""

import time
from collections.abc import Callable

import torch

import devices
from errors import KernelError
from kernels.cpu import bandwidth

BYTES = 256 << 20  # more than any cache holds
REPEATS = 5


class Bandwidth:
    """Reads a block of memory that no cache holds. It lives in a process of its own, so that its
    block is not counted as anybody's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.block = torch.ones(BYTES // 4, dtype=torch.int32, device=device)
        self.read: Callable[[torch.Tensor], object] = torch.amax
        if device.type == "cpu":
            try:
                bandwidth.read(self.block)
                self.read = bandwidth.read
            except KernelError:
                pass  # without a C++ compiler torch's own loop has to do

    def measure(self) -> float:
        """Bytes per second, the fastest of some readings: interruptions only slow them."""
        return max(self._once() for _ in range(REPEATS))

    def _once(self) -> float:
        devices.synchronize(self.device)
        started = time.perf_counter()
        self.read(self.block)
        devices.synchronize(self.device)
        return BYTES / (time.perf_counter() - started)
