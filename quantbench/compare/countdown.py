"""Progress of work that comes in pieces: how many are done, and about how long the rest takes.

pieces = Countdown(12, say)
for name in names:
    pieces.next(name)                       # "3 of 12: int8wo, about 4 min left"
"""

import time
from collections.abc import Callable


class Countdown:
    """Says a line before each piece; from the second on with the time that is left, as pieces so
    far took in the mean."""

    def __init__(
        self,
        total: int,
        say: Callable[[str], None],
        what: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """what: before the count, as in "line 3 of 12"."""
        self.total, self.say, self.what, self.clock = total, say, what, clock
        self.begun, self.started = 0, clock()

    def next(self, name: str = "") -> None:
        self.begun += 1
        words = f"{self.what} {self.begun} of {self.total}".strip()
        words += f": {name}" if name else ""
        if self.begun > 1:
            each = (self.clock() - self.started) / (self.begun - 1)
            words += f", about {duration(each * (self.total - self.begun + 1))} left"
        self.say(words[:1].upper() + words[1:])


def duration(seconds: float) -> str:
    """A time for people: 8 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
