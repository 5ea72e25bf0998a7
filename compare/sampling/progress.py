"""What a comparison says while it runs: where it is, and how long it will still take.

    progress = Progress(say)
    with progress.ticking():                    # a line at least every EVERY seconds
        progress.begin_block(1, units=40)       # of an arm loaded, or sampled
        progress.at("fp6: loading", blocks_to_look=2, most_blocks=2)
        progress.unit_done()

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
        self.units = self.done = 0
        self.block_started = time.monotonic()
        self.first_seconds = 0.0  # of the block's first step, which may build or read for all
        self.block_seconds: float | None = None  # of the last whole block

    def say(self, line: str) -> None:
        self.spoken = time.monotonic()
        self.speak(line)

    def begin_block(self, block: int, units: int) -> None:
        """block: from 1. units: its steps, of about the same length."""
        self.block, self.units, self.done = block, units, 0
        self.block_started = time.monotonic()

    def end_block(self) -> None:
        self.block_seconds = time.monotonic() - self.block_started

    def at(self, what: str) -> None:
        """What is being done now; said by the next line, if it takes that long."""
        self.what = what

    def unit_done(self) -> None:
        self.done += 1
        if self.done == 1:
            self.first_seconds = time.monotonic() - self.block_started

    def plan(self, to_look: int, most: int) -> None:
        """Blocks in all until the next look, and at most."""
        self.to_look, self.most = to_look, most

    def line(self) -> str:
        """fp6: loading; block 1 of 2; about 4 min left"""
        return "; ".join(part for part in (self.what, self.where(), self.left()) if part)

    def where(self) -> str:
        most = "" if self.to_look == self.most else f", at most {self.most}"
        return f"block {self.block} of {self.to_look}{most}" if self.units else ""

    def left(self) -> str:
        """About how long it takes to the next look, and at most; empty while nobody can say."""
        elapsed = time.monotonic() - self.block_started
        each = self.block_seconds
        if each is None:
            if self.done < 2:
                return ""
            each = (elapsed - self.first_seconds) / (self.done - 1) * self.units
        rest = max(each - elapsed, each * (1 - self.done / max(1, self.units)), 0.0)
        if self.done >= self.units:
            rest = 0.0
        look, most = (rest + each * max(0, n - self.block) for n in (self.to_look, self.most))
        if self.to_look >= self.most:
            return f"about {minutes(look)} left"
        return f"about {minutes(look)} to the next look, {minutes(most)} at most"

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
