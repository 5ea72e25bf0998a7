"""Copies of experts from the slow tier into slots of the fast one, while something else computes.

    copies = make(slow, device)
    copies.begin([(slot, key)])         # compute something else, and then
    copies.wait(slot)                   # until it is filled; both raise TierError
    copies.done(slot)                   # after all products with its expert were launched
    copies.waits.seconds()              # in which the computing waited

To the CPU threads copy: reading a file releases Python's lock. A CUDA device copies from locked
pages on a separate stream, and its computing stream waits for an event.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantbench.devices import Stopwatch
from quantbench.experts.slow import Key, SlowTier, pages
from quantbench.quantize.kernel import fused_weight

THREADS = 2  # that read at the same time
CPU = torch.device("cpu")


class Slot:
    """Room for the bytes of one expert, and the module that computes with them."""

    coming: Any = None  # the copy that is under way; None when it has arrived
    used: Any = None  # on CUDA: the event after the last product with this slot

    def __init__(self, buffer: Tensor, expert: nn.Module) -> None:
        self.buffer, self.expert = buffer, expert

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Where the matrices w13 and w2 start; 0 if a kernel stores them in a form that the fused
        step does not read."""
        weights = [fused_weight(self.expert.get_submodule(name)) for name in ("w13", "w2")]
        w13, w2 = (0 if weight is None else weight.data_ptr() for weight in weights)
        return w13, w2


Pairs = Sequence[tuple[Slot, Key]]


def make(slow: SlowTier, device: torch.device) -> "ByThreads | OnStream":
    """What copies into the memory of this device."""
    return OnStream(slow, device) if device.type == "cuda" else ByThreads(slow)


def buffers(count: int, nbytes: int, device: torch.device) -> list[Tensor]:
    """Room for `count` experts of nbytes each."""
    if device.type == "cpu" and count:
        return list(pages(count * nbytes).view(count, nbytes))
    return list(torch.empty((count, nbytes), dtype=torch.uint8, device=device))


class ByThreads:
    def __init__(self, slow: SlowTier) -> None:
        self.slow, self.waits = slow, Stopwatch(CPU)
        self.pool = ThreadPoolExecutor(THREADS, "experts")

    def begin(self, pairs: Pairs) -> None:
        for slot, key in pairs:
            slot.coming = self.pool.submit(self.slow.read, key, slot.buffer)

    def wait(self, slot: Slot) -> None:
        future = slot.coming
        if future is None:
            return
        started = self.waits.start()
        try:
            future.result()
        finally:
            if future.done():  # after Ctrl-C the copy is still under way
                slot.coming = None
            self.waits.stop(started)

    def done(self, slot: Slot) -> None:
        """Nothing has to be noted: on the CPU a product ends before its slot is used again."""


class OnStream:
    def __init__(self, slow: SlowTier, device: torch.device) -> None:
        self.slow, self.device = slow, device
        cuda: Any = torch.cuda  # whose classes have no types
        self.stream = cuda.Stream(device)
        self.waits = Stopwatch(device)  # in which the computing stream waited

    def begin(self, pairs: Pairs) -> None:
        for slot, key in pairs:
            self.stream.wait_event(slot.used)
            with torch.cuda.stream(self.stream):
                self.slow.read(key, slot.buffer)
                slot.coming = self.stream.record_event()

    def wait(self, slot: Slot) -> None:
        if slot.coming is not None:
            started = self.waits.start()
            torch.cuda.current_stream(self.device).wait_event(slot.coming)
            slot.coming = None
            self.waits.stop(started)

    def done(self, slot: Slot) -> None:
        """Note that all products with a slot's expert have been launched."""
        slot.used = torch.cuda.current_stream(self.device).record_event()
