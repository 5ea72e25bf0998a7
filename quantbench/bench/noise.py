"""Whether the machine changed within a cycle: a slice of memory is read before and after it.

    noise = Noise()
    before = noise.read()               # bytes per second, of 2 ms
    …                                   # one turn of every arm
    noise.moved(before, noise.read())   # True: the cycle is repeated

Other programs slow the memory for seconds at a time, and slow the arms unequally: those most that
read most. The rule sees no arm, so that it cannot favour one.
"""

import time

import numpy as np

SLICE = 16 << 20  # bytes: some 2 ms
SLICES = 8  # in rotation, so that a slice has left most caches when it is read again
MOVED = 1.15  # a change of the memory's speed by more is another state of the machine
MOST_REPEATED = 0.25  # of the cycles: a machine that changes all the time is measured as it is


class Noise:
    def __init__(self) -> None:
        self.memory = np.ones(SLICES * SLICE // 8, dtype=np.int64)  # written, so that it is there
        self.next = 0
        self.cycles = self.repeated = 0

    def read(self) -> float:
        """Bytes per second."""
        count = SLICE // 8
        part = self.memory[self.next * count : (self.next + 1) * count]
        self.next = (self.next + 1) % SLICES
        started = time.perf_counter()
        part.sum()
        return SLICE / (time.perf_counter() - started)

    def moved(self, before: float, after: float) -> bool:
        """Whether the cycle between these two readings is to be repeated."""
        self.cycles += 1
        far = max(before, after) > MOVED * min(before, after)
        if far and self.repeated + 1 <= MOST_REPEATED * self.cycles:
            self.repeated += 1
            return True
        return False
