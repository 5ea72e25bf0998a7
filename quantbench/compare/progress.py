"""How far a command has come, and about how long the rest takes: a line at least every 10 seconds.

progress = Progress(say, total=12)
for name in names:
    progress.next(name)                 # "3 of 12: int8wo; about 4 min left"

with progress.ticking():                # where the command waits for a worker
    progress.at("fp6: loading")
    progress.done += 0.5                # of 12
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

EVERY = 10.0  # seconds between two lines


class Progress:
    def __init__(
        self,
        say: Callable[[str], None],
        total: float = 0.0,
        what: str = "",
        clock: Callable[[], float] | None = None,
    ) -> None:
        """total: the work to do, in any unit. what: before the count, as in "line 3 of 12"."""
        self.speak, self.total, self.noun = say, total, what
        self.clock = clock or time.monotonic
        self.done = 0.0  # of `total`, in this session
        self.pieces = 0
        self.where, self.what = "", "starting"
        self.started = self.spoken = self.clock()

    def say(self, line: str) -> None:
        self.spoken = self.clock()
        self.speak(line)

    def at(self, what: str, now: bool = False) -> None:
        """Set the current activity; print a line if the last one is EVERY seconds old, or `now`."""
        self.what = what
        if now or self.clock() >= self.spoken + EVERY:
            self.say(self.line())

    def next(self, name: str = "") -> None:
        """Start the next one of `total` pieces."""
        self.done, self.pieces = self.pieces, self.pieces + 1
        self.where = f"{self.noun} {self.pieces} of {self.total:g}".strip()
        self.at(name, now=True)

    def line(self) -> str:
        """block 1 of 2: fp6: loading; about 4 min left"""
        left = self.left()
        time_left = "" if left is None else f"about {duration(left)} left"
        place = ": ".join(filter(None, (self.where, self.what)))
        return "; ".join(filter(None, (place, time_left)))

    def left(self) -> float | None:
        """Seconds, at the speed so far; None before any work is done."""
        if self.done <= 0:
            return None
        return (self.clock() - self.started) * (self.total - self.done) / self.done

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Say a line whenever there was none for EVERY seconds. The thread sleeps in between, so
        it takes no processor time from what is measured."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(max(0.1, self.spoken + EVERY - self.clock())):
                self.at(self.what)

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def duration(seconds: float) -> str:
    """A time for people: 8 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
