"""A worker of latencies without a model: it answers at once, as its behaviour says. For tests.

world = World(dies_at={(100, 2)})
Sweep(results, keep, progress, world.start).run()
world.journal                       # ["start 1", "describe int8wo", "load", "cell 100 1", …]
"""

import dataclasses
import threading
from dataclasses import dataclass, field

from quantbench.bench.process import WorkerFailed
from quantbench.compare.figures.latency import LatencySample
from quantbench.compare.sampling.latency_answers import CellReady, Described, Refusal, Runs
from tests.compare.latency_folders import CARRIED, MODEL


@dataclass
class World:
    """What happens at which cells (sequence length, batch size)."""

    refused: set = field(default_factory=set)
    out_of_memory: set = field(default_factory=set)
    dies_at: set = field(default_factory=set)
    hangs_at: set = field(default_factory=set)  # until it is killed
    interrupted_at: tuple | None = None  # in its second chunk of runs
    fails_to_load: set = field(default_factory=set)  # names of arms
    chunk: int = 3  # runs in an answer
    compiles: bool = False
    estimate: dict | None = None  # of every cell
    energy: object = None  # of every run
    metered: int = 0  # requests for runs whose energy is counted
    journal: list = field(default_factory=list)
    alive: int = 0
    compiled: set = field(default_factory=set)

    def start(self, ranks):
        self.journal.append(f"start {ranks}")
        self.alive += 1
        return FakeWorker(self)


class FakeWorker:
    def __init__(self, world):
        self.world, self.taken = world, 0
        self.killed = threading.Event()

    def kill(self):
        self.killed.set()

    def close(self):
        self.world.alive -= 1

    def answer(self, kind, do, **arguments):
        answer = getattr(self, do)(**arguments)
        assert isinstance(answer, kind)
        return answer

    def describe(self, argv, cells, decode_length):
        self.arm = argv[argv.index("--quantization") + 1]
        self.decode_length = decode_length
        self.world.journal.append(f"describe {self.arm}")
        refused = [cell for cell in cells if cell in self.world.refused]
        return Described(MODEL, [Refusal(*cell, "past the context") for cell in refused])

    def load(self):
        self.world.journal.append("load")
        if self.arm in self.world.fails_to_load:
            raise WorkerFailed("no such kernel", "refused")
        return dataclasses.replace(CARRIED, decoder=None, compiled=[])

    def cell(self, sequence_length, batch_size):
        self.at, self.taken = (sequence_length, batch_size), 0
        self.world.journal.append(f"cell {sequence_length} {batch_size}")
        if self.at in self.world.out_of_memory:
            raise WorkerFailed("out of memory", "memory")
        new = min(batch_size, 2) not in self.world.compiled
        self.world.compiled.add(min(batch_size, 2))
        decoder = "cpu-step" if batch_size < 4 else "modules"
        if not self.world.compiles:
            return CellReady(decoder, False, 0.0, self.world.estimate)
        return CellReady(decoder, new, 1.0, self.world.estimate)

    def runs(self, count, seconds, metered):
        self.taken += 1
        if self.at in self.world.hangs_at:
            assert self.killed.wait(30)
            raise WorkerFailed("killed (SIGKILL), as the system does when memory runs out")
        if self.at in self.world.dies_at and self.taken > 2:
            raise WorkerFailed("killed (SIGKILL), as the system does when memory runs out")
        if self.at == self.world.interrupted_at and self.taken > 2:
            raise KeyboardInterrupt
        steps = [0.02] * (self.decode_length - 1)
        sample = LatencySample(0.1 * self.at[1], steps)
        energy = self.world.energy if metered else None
        self.world.metered += metered
        return Runs([sample] * min(count, self.world.chunk), energy)
