"""Copies of experts from the slow tier into slots of the fast one, in turn or beside the computing.

    copies = make(slow, device)
    copies.now(slot, key)               # and then compute
    copies.begin([(slot, key)])         # compute something else, and then
    copies.wait(slot)

From a disk that is read past the page cache the system copies, several experts at once (aio.py).
From any other slow tier a CPU copies by threads: reading a file releases Python's lock. A CUDA card
copies from locked pages on a stream of its own, and its computing stream waits for an event.
"""

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantbench.experts import aio
from quantbench.experts.slow import File, Key, SlowTier, cut, pages
from quantbench.experts.stopwatch import OfCard
from quantbench.quantize.kernel import fused_weight

THREADS = 2  # that read at the same time


class Slot:
    """Room for one expert in fast memory, and the module that computes with what lies there."""

    def __init__(self, buffer: Tensor, expert: nn.Module) -> None:
        self.buffer, self.expert = buffer, expert
        self.key: Key | None = None  # of the expert in it
        self.coming: Any = None  # the copy that is under way; None when it is there
        self.used: Any = None  # on a card: when the last product with it is done,
        self.landed: Any = None  # and when the last copy into it is

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Where the matrices w13 and w2 of the expert begin."""
        return addresses(self.expert)


def addresses(expert: nn.Module) -> tuple[int, int]:
    """Where an expert's matrices w13 and w2 begin; 0 where a kernel has them in a form of its own
    that the fused step does not read."""
    weights = [fused_weight(expert.get_submodule(name)) for name in ("w13", "w2")]
    w13, w2 = (0 if weight is None else weight.data_ptr() for weight in weights)
    return w13, w2


class Copies(Protocol):
    """Who copies."""

    def waited(self) -> float:
        """Seconds in which the computing waited for copies, since this was last asked."""

    def cancelled(self) -> int:
        """Copies that were given up before they began, since this was last asked."""

    def now(self, slot: Slot, key: Key) -> None:
        """Fill a slot. What is computed afterwards finds the expert there. Raises TierError."""

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        """Begin to fill slots, in this order as far as there is one."""

    def wait(self, slot: Slot) -> None:
        """Until the slot is filled. Raises TierError."""

    def is_over(self, slot: Slot) -> bool:
        """Whether `wait` would not wait."""

    def abandon(self, slot: Slot) -> bool:
        """Give up a copy that has not begun. Whether the slot is free now."""

    def done(self, slot: Slot) -> None:
        """Note that all products with a slot's expert have been asked for."""


def make(slow: SlowTier, device: torch.device) -> Copies:
    """The quickest that can copy from there: `BySystem` from a disk that is read past the page
    cache, where the system allows it."""
    if device.type == "cuda":
        return OnStream(slow, device)
    if isinstance(slow, File) and slow.direct is not None:
        queue = aio.opened()
        if queue is not None:
            return BySystem(slow, slow.direct, queue)
    return ByThreads(slow)


def buffers(count: int, nbytes: int, device: torch.device) -> list[Tensor]:
    """Room for so many experts of nbytes each."""
    if count == 0:
        return []
    whole = (
        pages(count * nbytes)
        if device.type == "cpu"
        else torch.empty(count * nbytes, dtype=torch.uint8, device=device)
    )
    return cut(whole, nbytes)


class ByThreads:
    """Threads of this process copy."""

    def __init__(self, slow: SlowTier) -> None:
        self.slow, self.seconds, self.given_up = slow, 0.0, 0
        self.pool = ThreadPoolExecutor(THREADS, "experts")

    def waited(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def cancelled(self) -> int:
        count, self.given_up = self.given_up, 0
        return count

    def now(self, slot: Slot, key: Key) -> None:
        started = time.perf_counter()
        slot.key = None  # or what was overwritten in part would be taken for whole
        self.slow.read(key, slot.buffer)
        slot.key = key
        self.seconds += time.perf_counter() - started

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        for slot, key in pairs:
            slot.key = key
            slot.coming = self.pool.submit(self.slow.read, key, slot.buffer)

    def wait(self, slot: Slot) -> None:
        future: Future[None] | None = slot.coming
        if future is None:
            return
        slot.coming, started = None, time.perf_counter()
        try:
            future.result()
        except BaseException:
            slot.key = None
            raise
        self.seconds += time.perf_counter() - started

    def is_over(self, slot: Slot) -> bool:
        future: Future[None] | None = slot.coming
        return future is None or future.done()

    def abandon(self, slot: Slot) -> bool:
        future: Future[None] | None = slot.coming
        if future is None or future.cancel() or future.done():
            self.given_up += future is not None and future.cancelled()
            slot.coming = slot.key = None
            return True
        return False

    def done(self, slot: Slot) -> None:
        pass


class BySystem:
    """The system reads from a disk, several experts at once, while this process computes."""

    def __init__(self, slow: File, file: int, queue: aio.Queue) -> None:
        """file: the disk's file, opened with O_DIRECT."""
        self.slow, self.file, self.queue, self.seconds = slow, file, queue, 0.0
        self.tickets = itertools.count()
        self.under_way: dict[int, Slot] = {}  # by ticket, which is also the slot's `coming`
        self.over: dict[int, int] = {}  # results of reads that nobody has waited for, by ticket

    def waited(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def cancelled(self) -> int:
        return 0  # what the system has accepted is read

    def now(self, slot: Slot, key: Key) -> None:
        self.begin([(slot, key)])
        self.wait(slot)

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        reads = []
        for slot, key in pairs:
            slot.key, slot.coming = key, next(self.tickets)
            self.under_way[slot.coming] = slot
            where = self.file, self.slow.starts[key], slot.buffer.data_ptr()
            reads.append(aio.Read(slot.coming, *where, self.slow.nbytes))
        accepted = self.queue.submit(reads)
        for slot, key in pairs[accepted:]:  # too many, or a file system that cannot do it
            del self.under_way[slot.coming]
            slot.key = slot.coming = None  # in case the read fails
            started = time.perf_counter()
            self.slow.read(key, slot.buffer)
            slot.key, self.seconds = key, self.seconds + time.perf_counter() - started

    def wait(self, slot: Slot) -> None:
        if slot.coming is None:
            return
        started = time.perf_counter()
        while slot.coming in self.under_way:
            self._collect(at_least=1)
        self.seconds += time.perf_counter() - started
        self._check(slot)

    def is_over(self, slot: Slot) -> bool:
        if slot.coming in self.under_way:
            self._collect(at_least=0)
        return slot.coming not in self.under_way

    def abandon(self, slot: Slot) -> bool:
        if not self.is_over(slot):
            return False
        self.over.pop(slot.coming, None)
        slot.coming = slot.key = None
        return True

    def done(self, slot: Slot) -> None:
        pass

    def _collect(self, at_least: int) -> None:
        for ticket, result in self.queue.finished(at_least):
            del self.under_way[ticket]
            self.over[ticket] = result

    def _check(self, slot: Slot) -> None:
        """Raise TierError where a read that is over has failed."""
        result, slot.coming = self.over.pop(slot.coming), None
        if result != self.slow.nbytes:
            slot.key = None
            error = OSError(-result, os.strerror(-result)) if result < 0 else None
            raise self.slow.read_error(error)


class OnStream:
    """A CUDA stream copies."""

    def __init__(self, slow: SlowTier, device: torch.device) -> None:
        self.slow, self.device = slow, device
        cuda: Any = torch.cuda  # whose classes have no types
        self.stream = cuda.Stream(device)
        self.waits = OfCard(device)

    def waited(self) -> float:
        """It waits for the card: what stood still is known when that is over."""
        return self.waits.seconds()

    def cancelled(self) -> int:
        return 0  # a card's queue is not taken back

    def now(self, slot: Slot, key: Key) -> None:
        started = self.waits.start()
        if slot.landed is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.landed)
        self.slow.read(key, slot.buffer)  # on the stream that computes, after what it computes
        slot.key = key
        self.waits.stop(started)

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        for slot, key in pairs:
            slot.key = key
            if slot.used is not None:
                self.stream.wait_event(slot.used)
            with torch.cuda.stream(self.stream):
                self.slow.read(key, slot.buffer)
                slot.coming = slot.landed = self.stream.record_event()

    def wait(self, slot: Slot) -> None:
        if slot.coming is not None:
            started = self.waits.start()
            torch.cuda.current_stream(self.device).wait_event(slot.coming)
            slot.coming = None
            self.waits.stop(started)

    def is_over(self, slot: Slot) -> bool:
        return slot.coming is None or bool(slot.coming.query())

    def abandon(self, slot: Slot) -> bool:
        """A later copy into the slot comes after this one."""
        slot.coming = slot.key = None
        return True

    def done(self, slot: Slot) -> None:
        slot.used = torch.cuda.current_stream(self.device).record_event()
