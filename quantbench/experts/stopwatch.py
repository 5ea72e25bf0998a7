"""How long pieces of work take on the device that does them.

started = stopwatch.start()
…                               # on CUDA: launch work, which is not done yet
stopwatch.stop(started)
stopwatch.seconds()             # of all pieces since the last call
"""

import time
from typing import Any

import torch


class OfProcess:
    """For a processor that has done the work when a call returns."""

    total = 0.0
    start = staticmethod(time.perf_counter)

    def stop(self, started: float) -> None:
        self.total += time.perf_counter() - started

    def seconds(self) -> float:
        total, self.total = self.total, 0.0
        return total


class OfCard:
    """CUDA events: only `seconds` synchronizes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pairs: list[tuple[Any, Any]] = []

    def start(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stop(self, started: Any) -> None:
        self.pairs.append((started, self.start()))

    def seconds(self) -> float:
        if self.pairs:
            torch.cuda.synchronize(self.device)
        pairs, self.pairs = self.pairs, []
        return sum((start.elapsed_time(end) for start, end in pairs), 0.0) / 1e3


def of(device: torch.device) -> OfProcess | OfCard:
    return OfCard(device) if device.type == "cuda" else OfProcess()
