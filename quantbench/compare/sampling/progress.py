"""What a comparison says while it runs: where it is, and how long it will still take.

    progress = Progress(say)
    with progress.ticking():                    # a line at least every EVERY seconds
        progress.plan(to_look=2, most=16)
        progress.begin_block(1, loads=4, units=20)
        progress.at("fp6: loading")
        progress.load_done()                    # four times
        progress.unit_done(measuring=1.5)       # seconds of measuring so far

A thread speaks where the comparison waits for a worker. It sleeps between its lines, so that it
takes no processor time from what is measured.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

EVERY = 10.0  # seconds


class Progress:
    """How far a comparison has come, and about how long it still takes; said every 10 seconds.

    One object lives as long as the command does: what --resume goes on with begins anew.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.speak = say
        self.spoken = time.monotonic()
        self.what = "starting"
        self.block = self.to_look = self.most = 1
        self.affordable: Callable[[float], int] | None = None
        self.loads = self.units = self.done = 0
        self.block_started = time.monotonic()
        self.begun = 0.0  # seconds of this block before the first unit that counts
        self.unit_seconds: float | None = None  # of this block's units, in the mean
        self.measured_before = self.measured = 0.0  # seconds of measuring: in all blocks, in this
        self.block_seconds: float | None = None  # of the last whole block

    def say(self, line: str) -> None:
        self.spoken = time.monotonic()
        self.speak(line)

    def begin_block(self, block: int, loads: int, units: int, measuring: float = 0.0) -> None:
        """block: from 1. loads: arms that are loaded first. units: its steps after that, of about
        the same length. measuring: seconds of measuring before it."""
        self.block, self.loads, self.units, self.done = block, loads, units, 0
        self.begun, self.unit_seconds = 0.0, None
        self.measured_before, self.measured = measuring, 0.0
        self.block_started = time.monotonic()

    def end_block(self) -> None:
        self.block_seconds = time.monotonic() - self.block_started

    def at(self, what: str) -> None:
        """What is being done now; said by the next line, if it takes that long."""
        self.what = what

    def load_done(self) -> None:
        self.begun = self._elapsed()

    def unit_done(self, measuring: float) -> None:
        """measuring: seconds of measuring so far."""
        self.done += 1
        self.measured = measuring - self.measured_before
        uncounted = 0 if self.loads else 1  # the first of all may build or read for the others
        if self.done == uncounted:
            self.begun = self._elapsed()
        else:
            self.unit_seconds = (self._elapsed() - self.begun) / (self.done - uncounted)

    def _elapsed(self) -> float:
        return time.monotonic() - self.block_started

    def plan(
        self, to_look: int, most: int, affordable: Callable[[float], int] | None = None
    ) -> None:
        """Blocks in all until the next look, and at most. affordable: blocks that the time for
        measuring allows, by the seconds of measuring in each."""
        self.to_look, self.most, self.affordable = to_look, most, affordable

    def line(self) -> str:
        """fp6: loading; block 1 of 2; about 4 min left"""
        return "; ".join(part for part in (self.what, self.where(), self.left()) if part)

    def where(self) -> str:
        if not self.units:
            return ""
        look, most = self._blocks()
        return f"block {self.block} of {look}" + ("" if look == most else f", at most {most}")

    def left(self) -> str:
        """About how long it takes to the next look, and at most; empty while nobody can say."""
        each = self.block_seconds or self._first_block()
        if each is None:
            return ""
        rest = (self.unit_seconds or 0.0) * (self.units - self.done)
        if self.block_seconds and self.done < self.units:
            rest = max(rest, self.block_seconds - self._elapsed())
        blocks = self._blocks()
        look, most = (rest + each * (n - self.block) for n in blocks)
        if look == most:
            return f"about {minutes(look)} left"
        return f"about {minutes(look)} to the next look, {minutes(most)} at most"

    def _first_block(self) -> float | None:
        """Seconds of the first block, as its units so far took; None before there is one."""
        if self.unit_seconds is None:
            return None
        return (self.begun if self.loads else 0.0) + self.unit_seconds * self.units

    def _blocks(self) -> tuple[int, int]:
        """In all until the next look, and at most: in the first block no more than are affordable,
        as the plan that is made after it will say."""
        look, most = self.to_look, self.most
        if self.block_seconds is None and self.affordable and self.measured:
            allowed = self.affordable(self.measured / self.done * self.units)
            look, most = min(look, allowed), min(most, allowed)
        return max(self.block, look), max(self.block, most)

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Say where it is whenever nothing was said for EVERY seconds."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(max(0.1, self.spoken + EVERY - time.monotonic())):
                if time.monotonic() >= self.spoken + EVERY:
                    self.say(self.line())

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def minutes(seconds: float) -> str:
    """A time left, rounded for people: 40 s; 4 min."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
