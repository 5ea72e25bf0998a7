"""Workers without processes, on a clock that only they move: for tests of what asks them.

world = World(Behaviour(seconds=1.0), Behaviour(seconds=0.5))      # by the arm's number
world.install(monkeypatch)
Comparison(results, None, say, world.command).run()
world.journal                       # [(0, "load"), (0, "get_ready"), (0, "sample"), …]
"""

import dataclasses
import itertools
import random
import time as real_time
from dataclasses import dataclass, field

from quantbench.compare.sampling.answers import LogitsFile, Quality, QualityAnswer
from quantbench.compare.sampling.process import WorkerFailed
from quantbench.log.options import parse
from quantbench.run.energy import Energy
from quantbench.typed_json import from_json, to_json
from tests.compare.facts import arm_facts

MODULES = ("sampling.workers", "sampling.comparison", "progress")  # of compare, that read the time


@dataclass
class Behaviour:
    """What a test says of one arm. `seconds` is how long each decoding step and the prompt take."""

    seconds: float = 1.0
    noise: float = 0.0  # of each sample, standard deviation of the logarithm
    between: float = 0.0  # of each process, the same
    loading: float = 0.0  # seconds
    late: int = 0  # steps of each sample that take 10 times as long
    fits_beside: int = 100  # other arms
    dies_at: int | None = None  # the sample, counted over all processes
    fails_to_load: bool = False
    joules: float | None = None  # of a sample, in every process; None: nothing counts them


@dataclass
class World:
    """The machine of a test: its clock, its speed, and what was asked of it."""

    behaviours: list[Behaviour]
    journal: list[tuple[int, str]] = field(default_factory=list)
    now: float = 1000.0
    alive: set = field(default_factory=set)  # processes that have loaded an arm
    expected: list = field(default_factory=list)  # (whether an arm's process, scheme)
    samples: dict[int, int] = field(default_factory=dict)
    drift: float = 0.0  # slower by this share for each second
    at_sample: object = None  # called before each sample
    seed: int = 0

    def __post_init__(self):
        self.random = random.Random(self.seed)

    @staticmethod
    def of(*behaviours, **more):
        return World(list(behaviours), **more)

    def install(self, monkeypatch):
        for module in MODULES:
            monkeypatch.setattr(f"quantbench.compare.{module}.time", Clock(self))
        monkeypatch.setattr("quantbench.compare.sampling.workers.Process", self.start)

    def command(self, number):
        return (str(number),)

    def start(self, command):
        return FakeProcess(self, int(command[0]))

    def asked(self, what):
        """The arms, in order, that were asked for this."""
        return [number for number, did in self.journal if did == what]

    def turns(self):
        """The arms in the order of their samples, each row of samples once."""
        return [number for number, _ in itertools.groupby(self.asked("sample"))]


class Clock:
    """In the place of the module `time`."""

    def __init__(self, world):
        self.world = world

    def monotonic(self):
        return self.world.now

    def sleep(self, seconds):
        real_time.sleep(0)


class FakeProcess:
    """As compare.sampling.process.Process."""

    def __init__(self, world, number):
        self.world, self.number, self.saved = world, number, None
        self.behaviour = world.behaviours[number]

    def answer(self, kind, do, **arguments):
        return from_json(kind, self.ask(do, **arguments))

    def ask(self, do, **arguments):
        if do not in ("bandwidth", "expected"):
            self.world.journal.append((self.number, do))
        return to_json(getattr(self, do)(**arguments))

    def close(self):
        self.world.alive.discard(self)

    def load(self, argv, saved=None, headroom=0, others=0):
        self.saved, self.config = saved, parse(argv)
        self.factor = self.world.random.lognormvariate(0, self.behaviour.between)
        self.world.alive.add(self)
        if self.behaviour.fails_to_load:
            raise WorkerFailed("no such thing", "usage")
        if headroom and len(self.world.alive) - 1 > self.behaviour.fits_beside:
            raise WorkerFailed("out of memory", "memory")
        self.world.now += self.behaviour.loading

    def quality(self, tokens, text, reference, keep):
        scores = Quality(tokens, 8.0, 0.1)
        if reference:
            scores = dataclasses.replace(scores, kl=0.5, kl_standard_error=0.01)
        return QualityAnswer(scores, LogitsFile(keep, 1, 1, "bfloat16") if keep else None)

    def get_ready(self):
        own = dataclasses.replace(self.config, device="cpu")
        facts = arm_facts(config=own, scheme=self.config.quantization, kernel="torch")
        if self.behaviour.joules is None:
            return facts
        energy = Energy("a fake", self.behaviour.joules, 99.0, 1.0, 10.0, 3, 0.01)
        return dataclasses.replace(facts, energy=[energy])

    def sample(self, index):
        world, behaviour = self.world, self.behaviour
        if world.at_sample:
            world.at_sample()
        taken = world.samples[self.number] = world.samples.get(self.number, 0) + 1
        if behaviour.dies_at is not None and taken > behaviour.dies_at:
            raise WorkerFailed("killed (SIGKILL), as the system does when memory runs out")
        scale = behaviour.seconds * self.factor * world.random.lognormvariate(0, behaviour.noise)
        scale *= 1 + world.drift * (world.now - 1000)
        new = self.config.max_new_tokens
        steps = [scale * (10 if n < behaviour.late else 1) for n in range(new - 1)]
        world.now += scale + sum(steps)
        return {
            "prefill_seconds": scale,
            "decode_seconds": sum(steps),
            "tok_s": new / (scale + sum(steps)),
            "prefill_tok_s": 1 / scale,
            "decode_tok_s": (new - 1) / sum(steps) if steps else None,
            "token_seconds": steps,
            "peak_memory_bytes": {"resident": 3},
        }

    def expected(self, run):
        self.world.expected.append((self in self.world.alive, run.config.quantization))
        return {"figures": {"token_seconds": 0.5}}

    def bandwidth(self, device):
        return {"bytes_per_s": 1e9, "probe": "fake", "caveat": None}
