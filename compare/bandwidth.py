"""How fast this device reads memory: what a decoding step of one row is measured against."""

import time

import torch

import devices

BYTES = 256 << 20  # more than any cache holds
REPEATS = 5


class Bandwidth:
    """Reads a block of memory that no cache holds. It lives in a process of its own, so that its
    block is not counted as anybody's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.block = torch.ones(BYTES // 4, dtype=torch.int32, device=device)

    def measure(self) -> float:
        """Bytes per second, the fastest of some readings: interruptions only slow them."""
        return max(self._once() for _ in range(REPEATS))

    def _once(self) -> float:
        devices.synchronize(self.device)
        started = time.perf_counter()
        self.block.amax()
        devices.synchronize(self.device)
        return BYTES / (time.perf_counter() - started)
