"""A cycle of turns, and whether the machine changed within it: then the cycle is repeated.

    noise = Noise()
    noise.cycle(store, 7, [0, 1, 2], ("decode", "prompt"), turn)    # False: it does not count

A slice of memory is read before and after each cycle. Other programs slow the memory for seconds at
a time, and slow the arms unequally: those most that read most. The rule sees no arm, so that it
cannot favour one.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from quantbench.bench.store import Kind, Repeated, Store

SLICE = 16 << 20  # bytes: some 2 ms
SLICES = 8  # in rotation, so that a slice has left most caches when it is read again
MOVED = 1.15  # a change of the memory's speed by more is another state of the machine
MOST_REPEATED = 0.25  # of the cycles: a machine that changes all the time is measured as it is


class Noise:
    def __init__(self) -> None:
        self.memory = np.ones(SLICES * SLICE // 8, dtype=np.int64)  # written, so that it is there
        self.next = 0
        self.cycles = self.repeated = 0

    def cycle(
        self,
        store: Store,
        number: int | None,
        arms: Sequence[int],
        kinds: Sequence[Kind],
        turn: Callable[[int, int | None, Kind], object],
    ) -> bool:
        """A turn of each kind of every arm, A B C, and C B A in odd cycles. Returns whether the
        cycle counts. number: None for a cycle that only warms up."""
        before = self.read()
        for kind in kinds:
            for arm in arms if not number or number % 2 == 0 else arms[::-1]:
                turn(arm, number, kind)
        if number is None or not self.moved(before, self.read()):
            return True
        store.add(Repeated(number))
        return False

    def read(self) -> float:
        """Bytes per second of the next slice."""
        count = SLICE // 8
        part = self.memory[self.next * count : (self.next + 1) * count]
        self.next = (self.next + 1) % SLICES
        started = time.perf_counter()
        part.sum()
        return SLICE / (time.perf_counter() - started)

    def moved(self, before: float, after: float) -> bool:
        """Whether the cycle between these two readings has to be repeated."""
        self.cycles += 1
        far = max(before, after) > MOVED * min(before, after)
        repeat = far and self.repeated + 1 <= MOST_REPEATED * self.cycles
        self.repeated += repeat
        return repeat
