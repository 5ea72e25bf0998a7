"""When each decoding step ended, without making the device wait for it."""

import itertools
import time
from typing import Any

import torch


class Clock:
    """`tick` after each token; `intervals` once the device is done.

    The CPU works in step with us, so its clock is ours. On CUDA a step has only been issued when
    `tick` is called: an event is put behind it, and read when all is over.
    """

    def __init__(self, device: torch.device) -> None:
        self.events = device.type == "cuda"
        self.ticks: list[Any] = []

    def tick(self) -> None:
        if self.events:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.ticks.append(event)
        else:
            self.ticks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Seconds from each tick to the next."""
        pairs = itertools.pairwise(self.ticks)
        if self.events:
            return [earlier.elapsed_time(later) / 1000 for earlier, later in pairs]
        return [later - earlier for earlier, later in pairs]
