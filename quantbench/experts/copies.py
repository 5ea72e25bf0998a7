"""Copies of experts from the slow tier into slots of the fast one, while something else computes.

    copies = make(slow, device)
    copies.begin([(slot, key)])         # compute something else, and then
    copies.wait(slot)

From a disk that is read past the page cache the kernel copies, several experts at once (aio.py).
From any other slow tier threads copy: reading a file releases Python's lock. A CUDA device copies
from locked pages on a stream of its own, and its computing stream waits for an event.
"""

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantbench.experts import aio
from quantbench.experts.slow import File, Key, SlowTier, cut, pages
from quantbench.experts.stopwatch import OfCard
from quantbench.quantize.kernel import fused_weight

THREADS = 2  # that read at the same time


class Slot:
    """Room for one expert in fast memory, and the module that computes with its weights."""

    def __init__(self, buffer: Tensor, expert: nn.Module) -> None:
        self.buffer, self.expert = buffer, expert
        self.key: Key | None = None  # of the expert in it
        self.coming: Any = None  # the copy that is under way; None when it has arrived
        self.used: Any = None  # on CUDA: the event after the last product with this slot

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the matrices w13 and w2 of the expert."""
        return addresses(self.expert)


def addresses(expert: nn.Module) -> tuple[int, int]:
    """Where an expert's matrices w13 and w2 begin; 0 where a kernel has them in a form of its own
    that the fused step does not read."""
    weights = [fused_weight(expert.get_submodule(name)) for name in ("w13", "w2")]
    w13, w2 = (0 if weight is None else weight.data_ptr() for weight in weights)
    return w13, w2


class Copies:
    """Who copies: a class for each of the three ways below."""

    seconds = 0.0  # in which the computing waited

    def waited(self) -> float:
        """Seconds in which the computing waited for copies, since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        """Begin to fill slots, in this order as far as there is one. Raises TierError."""
        raise NotImplementedError

    def wait(self, slot: Slot) -> None:
        """Until the slot is filled. Raises TierError."""
        raise NotImplementedError

    def done(self, slot: Slot) -> None:
        """Note that all products with a slot's expert have been launched."""


def make(slow: SlowTier, device: torch.device) -> Copies:
    """The fastest that can copy from there: `BySystem` from a disk that is read past the page
    cache, where the system allows it."""
    if device.type == "cuda":
        return OnStream(slow, device)
    if isinstance(slow, File) and slow.direct is not None:
        queue = aio.opened()
        if queue is not None:
            return BySystem(slow, slow.direct, queue)
    return ByThreads(slow)


def buffers(count: int, nbytes: int, device: torch.device) -> list[Tensor]:
    """Room for `count` experts of nbytes each."""
    if device.type == "cpu" and count:
        return cut(pages(count * nbytes), nbytes)
    return cut(torch.empty(count * nbytes, dtype=torch.uint8, device=device), nbytes)


class ByThreads(Copies):
    """Threads of this process copy."""

    def __init__(self, slow: SlowTier) -> None:
        self.slow = slow
        self.pool = ThreadPoolExecutor(THREADS, "experts")

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        for slot, key in pairs:
            slot.key = key
            slot.coming = self.pool.submit(self.slow.read, key, slot.buffer)

    def wait(self, slot: Slot) -> None:
        future = slot.coming
        if future is None:
            return
        started = time.perf_counter()
        try:
            future.result()
        except BaseException:
            slot.key = None  # or what was overwritten in part would be taken for whole
            raise
        finally:
            if future.done():  # not after Ctrl-C: the copy is still under way then
                slot.coming = None
            self.seconds += time.perf_counter() - started


class BySystem(Copies):
    """The system reads from a disk, several experts at once, while this process computes."""

    def __init__(self, slow: File, file: int, queue: aio.Queue) -> None:
        """file: the disk's file, opened with O_DIRECT."""
        self.slow, self.file, self.queue = slow, file, queue
        self.tickets = itertools.count()
        self.under_way: dict[int, Slot] = {}  # by ticket, which is also the slot's `coming`
        self.over: dict[int, int] = {}  # results of reads that `wait` has not taken, by ticket

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        reads = []
        for slot, key in pairs:
            slot.key, slot.coming = key, next(self.tickets)
            self.under_way[slot.coming] = slot
            where = self.file, self.slow.starts[key], slot.buffer.data_ptr()
            reads.append(aio.Read(slot.coming, *where, self.slow.nbytes))
        refused = pairs[self.queue.submit(reads) :]  # too many, or the file system cannot do it
        for slot, _ in refused:
            del self.under_way[slot.coming]
            slot.key = slot.coming = None
        for slot, key in refused:
            started = time.perf_counter()
            self.slow.read(key, slot.buffer)
            slot.key, self.seconds = key, self.seconds + time.perf_counter() - started

    def wait(self, slot: Slot) -> None:
        if slot.coming is None:
            return
        started = time.perf_counter()
        while slot.coming in self.under_way:
            for ticket, result in self.queue.finished(at_least=1):
                del self.under_way[ticket]
                self.over[ticket] = result
        self.seconds += time.perf_counter() - started
        result, slot.coming = self.over.pop(slot.coming), None
        if result != self.slow.nbytes:
            slot.key = None
            error = OSError(-result, os.strerror(-result)) if result < 0 else None
            raise self.slow.read_error(error)


class OnStream(Copies):
    """A CUDA stream copies."""

    def __init__(self, slow: SlowTier, device: torch.device) -> None:
        self.slow, self.device = slow, device
        cuda: Any = torch.cuda  # whose classes have no types
        self.stream = cuda.Stream(device)
        self.waits = OfCard(device)

    def waited(self) -> float:
        """Synchronizes: how long the computing stream stood still is known only afterwards."""
        return self.waits.seconds()

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        for slot, key in pairs:
            slot.key = key
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
        slot.used = torch.cuda.current_stream(self.device).record_event()
