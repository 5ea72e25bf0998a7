"""Copies of experts from the slow tier into slots of the fast one, while something else computes.

    copies = make(slow, device)
    copies.begin([(slot, key)])         # compute something else, and then
    copies.wait(slot)                   # until it is filled; both raise TierError
    copies.done(slot)                   # after all products with its expert were launched
    copies.waits.seconds()              # in which the computing waited

From a disk that is read past the page cache the kernel copies, several experts at once
(io_submit.py). From any other slow tier threads copy: reading a file releases Python's lock. A
CUDA device copies from locked pages on a separate stream, and its computing stream waits for an
event.
"""

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantbench.devices import Stopwatch
from quantbench.experts import io_submit
from quantbench.experts.slow import File, Key, SlowTier, pages
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


def make(slow: SlowTier, device: torch.device) -> "ByThreads | BySystem | OnStream":
    """The fastest way that the slow tier, the device and the system allow."""
    if device.type == "cuda":
        return OnStream(slow, device)
    if (
        isinstance(slow, File)
        and slow.direct is not None
        and (queue := io_submit.opened()) is not None
    ):
        return BySystem(slow, slow.direct, queue)
    return ByThreads(slow)


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


class BySystem(ByThreads):
    """The system reads from a disk, several experts at once, while this process computes."""

    slow: File

    def __init__(self, slow: File, file: int, queue: io_submit.Queue) -> None:
        """file: the disk's file, opened with O_DIRECT."""
        super().__init__(slow)
        self.file, self.queue = file, queue
        self.tickets = itertools.count()
        self.over: dict[int, int] = {}  # results of reads that `wait` has not taken, by ticket

    def begin(self, pairs: Pairs) -> None:
        reads = []
        for slot, key in pairs:
            slot.coming = next(self.tickets)
            address, start = slot.buffer.data_ptr(), self.slow.starts[key]
            reads.append((slot.coming, self.file, address, self.slow.nbytes, start))
        # Those that the system refused: they are too many, or its file system is unsupported.
        super().begin(pairs[self.queue.submit(reads) :])

    def wait(self, slot: Slot) -> None:
        if not isinstance(slot.coming, int):
            return super().wait(slot)
        started = self.waits.start()
        while slot.coming not in self.over:
            self.over.update(self.queue.finished(at_least=1))
        self.waits.stop(started)
        result, slot.coming = self.over.pop(slot.coming), None
        if result != self.slow.nbytes:
            error = OSError(-result, os.strerror(-result)) if result < 0 else None
            raise self.slow.read_error(error)


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
