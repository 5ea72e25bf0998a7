"""How long pieces of work take on the device that does them.

started = stopwatch.start()
…                               # a card is asked for work, and has not done it yet
stopwatch.stop(started)
stopwatch.seconds()             # of all pieces since this was last asked
"""

import time
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """Adds up the seconds between starts and stops."""

    def start(self) -> Any: ...

    def stop(self, started: Any) -> None: ...

    def seconds(self) -> float:
        """Since this was last asked."""


def of(device: torch.device) -> Stopwatch:
    return OfCard(device) if device.type == "cuda" else OfProcess()


class OfProcess:
    """The processor has done the work when a call returns."""

    def __init__(self) -> None:
        self.total = 0.0

    def start(self) -> float:
        return time.perf_counter()

    def stop(self, started: float) -> None:
        self.total += time.perf_counter() - started

    def seconds(self) -> float:
        total, self.total = self.total, 0.0
        return total


class OfCard:
    """Events in a card's queue: nobody waits for the card before the seconds are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda: Any = torch.cuda  # whose classes have no types
        self.event = cuda.Event
        self.pairs: list[tuple[Any, Any]] = []

    def start(self) -> Any:
        event = self.event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stop(self, started: Any) -> None:
        self.pairs.append((started, self.start()))

    def seconds(self) -> float:
        if not self.pairs:
            return 0.0
        torch.cuda.synchronize(self.device)
        pairs, self.pairs = self.pairs, []
        return sum(float(start.elapsed_time(end)) for start, end in pairs) / 1e3
