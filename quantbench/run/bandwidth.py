"""How fast this device reads memory: the speed limit of decoding one row."""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from quantbench import devices
from quantbench.errors import KernelError
from quantbench.ops.cpu import bandwidth as cpu

BYTES = 1 << 30  # read in each measurement; with 256 MB, a cache of 480 MB kept a part of them
REPEATS = 3  # readings, of which `measure` returns the median
PARTS = 4  # of the block: a reading before each cycle takes three of them, in rotation
TORCH, OURS = "torch.amax", "quantbench::cpu_read"  # the ops that can read


class BandwidthProbe:
    """Reads a block of memory larger than any cache; on the CPU with all of torch's threads.

    probe: the op that reads. caveat: why it does not reach the memory's speed, or None. On the CPU
    torch's own loop is slower than the C++ one, so that decoding near the limit would seem to
    exceed it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.block = torch.ones(BYTES // 4, dtype=torch.int32, device=device)
        self.next = 0  # part of the block
        # A card reads the block in the time of some launches: one after the other hides theirs.
        self.at_once = 1 if device.type == "cpu" else 10
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

    def measure(self, parts: int = 1) -> float:
        """Bytes per second: the median of REPEATS readings, each of the next of so many parts of
        the block. A part has left the caches when it is read again."""
        rates, blocks = [], self.block.chunk(parts)
        for _ in range(REPEATS):
            self.next += 1
            block = blocks[self.next % parts]
            devices.synchronize(self.device)
            started = time.perf_counter()
            for _ in range(self.at_once):
                self.read(block)
            devices.synchronize(self.device)
            rates.append(self.at_once * block.nbytes / (time.perf_counter() - started))
        return statistics.median(rates)


@functools.cache
def reader(device: str) -> BandwidthProbe:
    """The one of this process for all readings of a device."""
    return BandwidthProbe(devices.resolve(device))
