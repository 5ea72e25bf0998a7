"""The machine's speed at this moment, read beside every measurement, because machines drift.

    probe = Probe(device, torch.bfloat16)
    speed = probe.reading()                     # some 30 ms: Speed(read, multiply)
    speed, seconds = probe.around(call)         # call() gives seconds; the mean of two readings

Virtual machines are moved about by their host. The one that most figures of docs/LOG.md are of
reads memory at 77 or at 46 GB/s, for half a minute at a time, and multiplies faster meanwhile: both
of its cores then lie on one chip.

What other processes used of the cores meanwhile is counted, too: a call that they disturbed is
repeated when they are done.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantbench import devices
from quantbench.estimate.calibration import Calibration, Speed
from quantbench.kv_cache import CACHES
from quantbench.quantize.spec import COMPARED
from quantbench.run.bandwidth import Bandwidth
from quantbench.run.machine import Counters, MachineUse

PRODUCT = (512, 2048, 2048)  # rows, inner, outer of the product by which arithmetic is read
TIMES = 2  # that it is multiplied; the faster one counts, for the other was interrupted
STILL_HOLDS = 0.05  # seconds for which a reading is as good as a new one
STEADY = 1.15  # readings before and after a call that differ by more had a change between them
LONG = 1.0  # seconds: what takes longer is a mean over such changes, and is not repeated for them
TRIES = 4  # of a call, where there was a change or a disturbance
OTHERS = 0.1  # cores that other processes may use during a call
TICKS = 0.05  # seconds of theirs that are too few to be told from the kernel's rounding
PATIENCE = 60.0  # seconds that all waiting for others may take; after that they are accepted


@dataclass(frozen=True)
class Settings:
    """What is calibrated."""

    device: torch.device
    precision: torch.dtype
    schemes: Sequence[str] = COMPARED
    caches: Sequence[str] = tuple(CACHES)


class Probe:
    """Reads the machine's speed: of memory, and of a product in the calibration's precision."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.bandwidth = device, Bandwidth(device)
        rows, inner, outer = PRODUCT
        self.x = torch.randn(rows, inner, device=device).to(dtype)
        self.weight = torch.randn(outer, inner, device=device).to(dtype)
        self.operations = 2 * rows * inner * outer
        self.last, self.read_at = Speed(0.0, 0.0), -math.inf
        self.patience = PATIENCE
        self.reading()  # warms up

    def reading(self) -> Speed:
        """The speed at this moment."""
        seconds = min(self._seconds() for _ in range(TIMES))
        self.last = Speed(self.bandwidth.once(), self.operations / seconds)
        self.read_at = time.perf_counter()
        return self.last

    def recent(self) -> Speed:
        """The last reading, if it still holds, or a new one."""
        if time.perf_counter() - self.read_at <= STILL_HOLDS:
            return self.last
        return self.reading()

    def around(self, call: Callable[[], float]) -> tuple[Speed, float]:
        """The seconds that call() gives, and the speed before and after it, their mean; again where
        the machine changed meanwhile, or other processes used it."""
        for _ in range(TRIES):
            counters = Counters.read()
            before, seconds, after = self.recent(), call(), self.reading()
            use = Counters.read().since(counters)
            if disturbed(use) and self.patience > 0:
                self.patience -= use.seconds + wait_for_others(self.patience)
                continue
            if max(before.read, after.read) <= STEADY * min(before.read, after.read):
                break
            if seconds > LONG:
                break
        return mean([before, after]), seconds

    def timed(
        self, least: float, call: Callable[..., object], *arguments: Any, each: int = 1
    ) -> tuple[Speed, float]:
        """`median_seconds` of a call, and the speed around it."""
        return self.around(lambda: median_seconds(self.device, least, call, *arguments, each=each))

    def _seconds(self) -> float:
        devices.synchronize(self.device)
        started = time.perf_counter()
        nn.functional.linear(self.x, self.weight)
        devices.synchronize(self.device)
        return time.perf_counter() - started


def disturbed(use: MachineUse) -> bool:
    """Whether other processes used the cores so much that it is in the times measured meanwhile."""
    return use.other_cores is not None and use.other_cores * use.seconds > (
        TICKS + OTHERS * use.seconds
    )


def wait_for_others(patience: float) -> float:
    """Sleep until other processes leave the cores alone; the seconds that it took, about `patience`
    at most."""
    started = time.perf_counter()
    while (waited := time.perf_counter() - started) < patience:
        counters = Counters.read()
        time.sleep(0.2)
        if not disturbed(Counters.read().since(counters)):
            break
    return waited


def speed_now(calibration: Calibration, device: torch.device) -> Speed:
    """How fast the machine is at this moment, read as the calibration's figures were. It takes
    about a second, and BYTES of run/bandwidth.py."""
    return Probe(device, getattr(torch, calibration.precision)).reading()


def mean(speeds: list[Speed]) -> Speed:
    """Geometric, for speeds are compared by their ratios."""
    return Speed(
        statistics.geometric_mean(speed.read for speed in speeds),
        statistics.geometric_mean(speed.multiply for speed in speeds),
    )


def median_seconds(
    device: torch.device, least: float, call: Callable[..., object], *arguments: Any, each: int = 1
) -> float:
    """The median seconds of call(*arguments) ÷ each, of three or more that take `least` seconds
    together, after one that is not counted."""
    call(*arguments)
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < least:
        devices.synchronize(device)
        started = time.perf_counter()
        call(*arguments)
        devices.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) / each
