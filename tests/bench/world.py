"""Workers without processes, on a clock that only they move: for tests of what asks them.

world = World.of(Behaviour(seconds=0.1), Behaviour(seconds=0.05))  # by the arm's number
world.install(monkeypatch)
world.session(store, rule).run()
world.journal                       # [(0, "load"), (0, "get_ready"), (0, "turn"), …]
"""

import dataclasses
import itertools
import random
from dataclasses import dataclass, field

from quantbench.bench.answers import TurnTime
from quantbench.bench.process import WorkerFailed
from quantbench.bench.session import Session
from quantbench.log.options import parse
from quantbench.quality.types import Judged, Likeliest, Quality
from quantbench.run.energy import Energy
from quantbench.typed_json import from_json, to_json
from tests.bench.facts import arm_facts


@dataclass
class Behaviour:
    """What a test says of one arm. `seconds` is how long each decoding step and the prompt take."""

    seconds: float = 0.1
    noise: float = 0.0  # of each turn, standard deviation of the logarithm
    between: float = 0.0  # of each process, the same
    loading: float = 0.0  # seconds
    exponent: float = 1.0  # of the machine's slowness: 1 is all of it
    fits_beside: int = 100  # other arms
    dies_at: int | None = None  # the turn, counted over all processes
    kl: float = 0.001
    scoring: float = 0.0  # seconds
    fails_to_load: bool = False
    kills_its_judge: bool = False
    apart: float = 0.0  # divergence of the loaded model from the judged one
    joules: float | None = None  # of a sample, in every process; None: nothing counts them


@dataclass
class World:
    """The machine of a test: its clock, its speed, and its requests."""

    behaviours: list[Behaviour]
    journal: list[tuple[int, str]] = field(default_factory=list)
    now: float = 1000.0
    alive: set = field(default_factory=set)  # processes that have loaded an arm
    taken: dict[int, int] = field(default_factory=dict)  # turns
    slowness: object = lambda now: 1.0  # of the machine at a time
    at_turn: object = None  # called before each turn
    readings: object = lambda number: 1e9  # bytes per second of an idle machine; None fails
    read: list = field(default_factory=list)  # those that were taken
    caveat: str | None = None  # of the readings
    figures: object = lambda config: {}  # of an arm's quality, in the place of the usual ones
    weight_bytes: object = lambda config: 1000
    noise: float = 0.001  # of the reference
    results: object = None  # of the session
    seed: int = 0

    def __post_init__(self):
        self.random = random.Random(self.seed)

    @staticmethod
    def of(*behaviours, **more):
        return World(list(behaviours), **more)

    def install(self, monkeypatch):
        for module in ("pool", "judging"):
            monkeypatch.setattr(f"quantbench.bench.{module}.Process", self.start)
        monkeypatch.setattr("quantbench.compare.comparing.Session", self.session)

    def session(self, store, rule, **more):
        self.results = store.results
        return Session(store, rule, self.command, clock=lambda: self.now, **more)

    def command(self, number):
        return (str(number),)

    def start(self, command):
        return FakeProcess(self, int(command[0]))

    def asked(self, what):
        """The arms, in order, that got this request."""
        return [number for number, did in self.journal if did == what]

    def order(self):
        """The arms in the order of their turns, neighbours once."""
        return [number for number, _ in itertools.groupby(self.asked("turn"))]


class FakeProcess:
    """As bench.process.Process."""

    def __init__(self, world, number):
        self.world, self.number, self.saved = world, number, None
        self.behaviour = world.behaviours[number]

    def answer(self, kind, do, /, **arguments):
        return from_json(kind, self.ask(do, **arguments))

    def ask(self, do, /, **arguments):
        if do != "bandwidth":
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

    def read(self, argv, tokens, text):
        """The judge's process has the number of the arm that it judges."""
        self.tokens = tokens
        argvs = [arm.argv for arm in self.world.results.arms]
        if self.world.behaviours[argvs.index(argv) if argv in argvs else -1].fails_to_load:
            raise WorkerFailed("no such thing", "usage")
        return self._judged(parse(argv), {"kl": None, "kl_standard_error": None})

    def judge(self, argv, max_kl, seconds, details):
        config = parse(argv)
        number = [arm.config for arm in self.world.results.arms].index(config)
        behaviour = self.world.behaviours[number]
        self.world.journal[-1] = number, "judge"
        self.world.now += behaviour.scoring
        if behaviour.kills_its_judge:
            raise WorkerFailed("killed (SIGKILL), as the system does when memory runs out")
        if behaviour.fails_to_load:
            raise WorkerFailed("no such thing", "usage")
        return self._judged(config, {"kl": behaviour.kl, "kl_standard_error": 1e-5})

    def _judged(self, config, figures):
        quality = Quality(self.tokens, 8.0, 0.1, kl_freedom=11, noise=self.world.noise, **figures)
        quality = dataclasses.replace(quality, **self.world.figures(config))
        likeliest = Likeliest([1], [[1]], [[0.0]])
        return Judged(quality, likeliest, self.world.weight_bytes(config), "cpu")

    def divergence(self, judged):
        return self.behaviour.apart

    def get_ready(self):
        own = dataclasses.replace(self.config, device="cpu")
        facts = arm_facts(config=own, scheme=self.config.quantization, kernel="torch")
        if self.behaviour.joules is None:
            return facts
        energy = Energy("a fake", self.behaviour.joules, 1.0, 10.0, 3)
        return dataclasses.replace(facts, energy=[energy])

    def turn(self, kind, tokens):
        world, number = self.world, self.number
        if world.at_turn:
            world.at_turn()
        world.taken[number] = world.taken.get(number, 0) + 1
        if self.behaviour.dies_at is not None and world.taken[number] > self.behaviour.dies_at:
            raise WorkerFailed("killed (SIGKILL), as the system does when memory runs out")
        tokens = 1 if kind == "prompt" else tokens
        return TurnTime(tokens, self._took(tokens))

    def sample(self, index):
        new = self.config.max_new_tokens
        seconds = self._took(new)
        step = seconds / new
        return {
            "prefill_seconds": step,
            "decode_seconds": step * (new - 1),
            "tok_s": 1 / step,
            "prefill_tok_s": 1 / step,
            "decode_tok_s": 1 / step if new > 1 else None,
            "token_seconds": [step] * (new - 2),
            "peak_memory_bytes": {"resident": 3},
        }

    def _took(self, tokens):
        """Seconds of these tokens, which pass on the world's clock."""
        world, behaviour = self.world, self.behaviour
        scale = behaviour.seconds * self.factor * world.random.lognormvariate(0, behaviour.noise)
        seconds = tokens * scale * world.slowness(world.now) ** behaviour.exponent
        world.now += seconds
        return seconds

    def bandwidth(self, device):
        rate = self.world.readings(len(self.world.read))
        self.world.read.append(rate)
        if rate is None:
            raise WorkerFailed("no reading", "other")
        rate = rate / self.world.slowness(self.world.now)
        return {"bytes_per_s": rate, "probe": "fake", "caveat": self.world.caveat}
