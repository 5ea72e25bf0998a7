"""The worker processes of a session: each is loaded, made ready, asked for turns, and ended.

    session.load(0)                         # raises DoesNotFit where other arms take the memory
    session.turn(0, cycle=3, kind="decode")
    session.close()

What goes wrong with one arm ends that arm; the others go on. bench/session.py decides when each arm
is loaded and takes turns.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from quantbench.bench import ranks
from quantbench.bench.answers import ArmFacts, Reading, TimedSample, TurnTime
from quantbench.bench.process import Process, WorkerFailed
from quantbench.bench.store import ArmResult, ArmSample, Kind, Left, Started, Store, Turn
from quantbench.bench.store import Bandwidth as Read
from quantbench.log.options import parse
from quantbench.progress import Progress
from quantbench.quality.thresholds import of_rounding
from quantbench.quality.types import Quality

HEADROOM = 500_000_000  # bytes to stay free when several arms are in memory together
TURN = 0.1  # seconds of a turn of decoding, about: states of a machine last longer
WHOLE, MOST_WHOLE = 0.5, 3  # seconds of whole samples of each process, and their number

T = TypeVar("T")
Command = Sequence[str] | Callable[[int], Sequence[str]]


class DoesNotFit(Exception):
    """There is too little memory for an arm while others are loaded."""


class Pool:
    """Loaded arms by their number, and for each device a worker without an arm, which reads
    memory."""

    of_turns: Mapping[str, object] = {}  # the arguments of every request for a turn
    clock: Callable[[], float]  # seconds
    progress: Progress
    scratch: Path  # a folder for this session
    saved: Path | None = None  # a folder for arms as they were quantized, for later processes

    def __init__(self, store: Store, command: Command) -> None:
        """command: starts a worker; or a function that gives the command for an arm's number."""
        self.store, self.results, self.command = store, store.results, command
        self.loaded: dict[int, Process] = {}
        self.probes: dict[str, Process] = {}
        self.steps: dict[int, int] = {}  # of a turn of decoding, by arm
        self.prompt_seconds: dict[int, float] = {}

    def load(self, number: int) -> None:
        """Start the arm's worker, and get it ready. An arm that fails is not loaded afterwards.

        Raises DoesNotFit where other arms take the memory.
        """
        arm = self.results.arms[number]
        try:
            saved = str(self.saved.absolute() / str(number)) if self.saved else None
            worker = self.start(number, arm.argv, saved=saved)
            _check(arm, worker)
            facts = worker.answer(ArmFacts, "get_ready")
            for note in facts.notes if number == 0 and arm.facts is None else ():
                self.progress.say(note)
            self.store.add(Started(number, arm.processes, facts))
            self._samples(number, worker)
        except WorkerFailed as error:
            self.unload(number)
            if error.kind == "memory" and self.loaded:
                raise DoesNotFit(f"{arm.name} does not fit into memory with the others") from None
            self.fail(number, error)

    def ready(self, numbers: list[int]) -> list[int]:
        """Those, of one place and the baseline first, that can take turns now."""
        return [number for number in numbers if number in self.loaded]

    def _samples(self, number: int, worker: Process) -> None:
        """Whole samples, which also tell how long a turn is."""
        arm, taken = self.results.arms[number], 0.0
        for _ in range(MOST_WHOLE):
            sample = worker.answer(TimedSample, "sample", index=len(arm.samples))
            self.store.add(ArmSample(**vars(sample), arm=number, process=arm.processes - 1))
            taken += sample.prefill_seconds + sample.decode_seconds
            if taken > WHOLE:
                break
        self.prompt_seconds[number] = sample.prefill_seconds
        self.steps[number] = 0
        if speed := sample.decode_tok_s:
            most = len(sample.token_seconds) + 1
            self.steps[number] = max(1, min(most, round(TURN * speed)))

    def turn(self, number: int, cycle: int | None, kind: Kind) -> None:
        """Take a turn of an arm; of one that is not loaded, nothing. cycle: None for a turn that
        does not count."""
        steps = self.steps.get(number, 0)
        if number not in self.loaded or (kind == "decode" and not steps):
            return
        time = self.asked(number, TurnTime, "turn", kind=kind, tokens=steps, **self.of_turns)
        if time and cycle is not None:
            process = self.results.arms[number].processes - 1
            self.store.add(Turn(number, process, cycle, kind, **vars(time)))

    def asked(self, number: int, kind: type[T], do: str, /, **given: object) -> T | None:
        """The answer of the arm's process; None if it failed."""
        try:
            return self.loaded[number].answer(kind, do, **given)
        except WorkerFailed as error:
            self.fail(number, error)
            return None

    def probe(self, cycle: int | None, numbers: Collection[int]) -> None:
        """Read the bandwidth of every device that these arms are on, before this cycle."""
        arms = [self.results.arms[number] for number in numbers]
        for device in sorted({arm.facts.device for arm in arms if arm.facts and not arm.failed}):
            try:
                reading = self._probed(device, Reading, "bandwidth", device=device)
                self.store.add(Read(device, dataclasses.replace(reading, cycle=cycle)))
            except WorkerFailed as error:
                self.progress.say(f"no bandwidth of {device}: {error}")

    def unload(self, number: int) -> None:
        if number in self.loaded:
            self.loaded.pop(number).close()

    def unload_all(self, but: Collection[int] = ()) -> None:
        for number in set(self.loaded).difference(but):
            self.unload(number)

    def fail(self, number: int, error: WorkerFailed) -> None:
        """End an arm whose process failed."""
        self.unload(number)
        self.store.add(Left(number, str(error), failed=True))
        self.progress.say(f"{self.results.arms[number].name} failed: {error}")

    def close(self) -> None:
        self.unload_all()
        for worker in self.probes.values():
            worker.close()

    def _probed(self, device: str, kind: type[T], do: str, /, **given: object) -> T:
        """An answer of the worker without an arm; after one has ended, the next call starts
        another."""
        if device not in self.probes:
            self.probes[device] = Process(self.command_of(0))
        try:
            return self.probes[device].answer(kind, do, **given)
        except WorkerFailed as error:
            if error.kind == "dead":
                self.probes.pop(device).close()
            raise

    def start(self, number: int, argv: list[str], **more: object) -> Process:
        """Start the arm's worker and load the model, in the memory that the others leave. Raises
        WorkerFailed; the worker is in `loaded` even so."""
        size = parse(argv).tp if _of_ours(argv) else 1
        worker = Process(ranks.of(self.command_of(number), size))
        others = sum(occupied(self.results.arms[other]) for other in self.loaded)
        room = {"headroom": HEADROOM, "others": others} if self.loaded else {}
        self.loaded[number] = worker
        worker.ask("load", argv=argv, **more, **room)
        return worker

    def command_of(self, number: int) -> Sequence[str]:
        """What starts the arm's worker."""
        return self.command(number) if callable(self.command) else self.command


def _of_ours(argv: Sequence[str]) -> bool:
    """Whether these are options of generate.py; another runtime's are one JSON object."""
    return not argv or argv[0].startswith("--")


def _check(arm: ArmResult, worker: Process) -> None:
    """Raise WorkerFailed where the worker has loaded another model than the one that was judged."""
    if arm.judged is None or arm.judged.likeliest is None:
        return
    judged, quality = arm.judged.likeliest, arm.quality
    kl = worker.answer(float, "divergence", judged=judged)
    most = of_rounding(quality.noise if isinstance(quality, Quality) else None)
    if not kl <= most:
        raise WorkerFailed(
            f"it predicts otherwise than when its quality was measured: KL {kl:.2g} nats on "
            f"{len(judged.ids)} tokens, of which rounding explains {most:.2g}; please report it",
            "other",
        )


def occupied(arm: ArmResult) -> int:
    """The most bytes that unloading an arm would free."""
    peaks = arm.facts.peak_memory_bytes if arm.facts else {}
    return max((max(kinds.values()) for kinds in peaks.values()), default=0)
