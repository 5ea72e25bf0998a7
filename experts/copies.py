"""Copies of experts from the slow tier into slots of the fast one, in turn or beside the computing.

    copies = make(slow, device)
    copies.now(slot, key)               # and then compute
    copies.begin(slot, key)             # compute something else, and then
    copies.wait(slot)

A CPU copies by threads: reading a file releases Python's lock. A CUDA card copies from locked pages
on a stream of its own, and its computing stream waits for an event.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from experts.slow import Key, SlowTier, cut, pages

THREADS = 2  # that read at the same time


class Slot:
    """Room for one expert in fast memory, and the module that computes with what lies there."""

    def __init__(self, buffer: Tensor, expert: nn.Module) -> None:
        self.buffer, self.expert = buffer, expert
        self.key: Key | None = None  # of the expert in it
        self.coming: Any = None  # the copy that is under way; None when it is there
        self.used: Any = None  # on a card: when the last product with it is done,
        self.landed: Any = None  # and when the last copy into it is


class Copies(Protocol):
    """Who copies."""

    def waited(self) -> float:
        """Seconds in which the computing waited for copies, since this was last asked."""

    def cancelled(self) -> int:
        """Copies that were given up before they began, since this was last asked."""

    def now(self, slot: Slot, key: Key) -> None:
        """Fill a slot. What is computed afterwards finds the expert there. Raises TierError."""

    def begin(self, slot: Slot, key: Key) -> None:
        """Begin to fill a slot."""

    def wait(self, slot: Slot) -> None:
        """Until the slot is filled. Raises TierError."""

    def abandon(self, slot: Slot) -> bool:
        """Give up a copy that has not begun. Whether the slot is free now."""

    def done(self, slot: Slot) -> None:
        """Note that all products with a slot's expert have been asked for."""


def make(slow: SlowTier, device: torch.device) -> Copies:
    return OnStream(slow, device) if device.type == "cuda" else ByThreads(slow)


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

    def begin(self, slot: Slot, key: Key) -> None:
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

    def abandon(self, slot: Slot) -> bool:
        future: Future[None] | None = slot.coming
        if future is None or future.cancel() or future.done():
            self.given_up += future is not None and future.cancelled()
            slot.coming = slot.key = None
            return True
        return False

    def done(self, slot: Slot) -> None:
        pass


class OnStream:
    """A CUDA stream copies."""

    def __init__(self, slow: SlowTier, device: torch.device) -> None:
        self.slow, self.device = slow, device
        cuda: Any = torch.cuda  # whose classes have no types
        self.stream, self.event = cuda.Stream(device), cuda.Event
        self.waits: list[tuple[Any, Any]] = []

    def waited(self) -> float:
        """It waits for the card: what stood still is known when that is over."""
        torch.cuda.synchronize(self.device)
        waits, self.waits = self.waits, []
        return sum(float(start.elapsed_time(end)) for start, end in waits) / 1e3

    def cancelled(self) -> int:
        return 0  # a card's queue is not taken back

    def now(self, slot: Slot, key: Key) -> None:
        started = self._moment()
        if slot.landed is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.landed)
        self.slow.read(key, slot.buffer)  # on the stream that computes, after what it computes
        slot.key = key
        self.waits.append((started, self._moment()))

    def begin(self, slot: Slot, key: Key) -> None:
        slot.key = key
        if slot.used is not None:
            self.stream.wait_event(slot.used)
        with torch.cuda.stream(self.stream):
            self.slow.read(key, slot.buffer)
            slot.coming = slot.landed = self.stream.record_event()

    def wait(self, slot: Slot) -> None:
        if slot.coming is not None:
            started = self._moment()
            torch.cuda.current_stream(self.device).wait_event(slot.coming)
            slot.coming = None
            self.waits.append((started, self._moment()))

    def abandon(self, slot: Slot) -> bool:
        """A later copy into the slot comes after this one."""
        slot.coming = slot.key = None
        return True

    def done(self, slot: Slot) -> None:
        slot.used = torch.cuda.current_stream(self.device).record_event()

    def _moment(self) -> Any:
        event = self.event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
