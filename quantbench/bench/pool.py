"""The worker processes of a session: each is loaded, scored, made ready, asked for turns, ended.

    session.load(0)                         # raises DoesNotFit where other arms take the memory
    session.turn(0, cycle=3, kind="decode")
    session.close()

What goes wrong with one arm ends that arm; the others go on. bench/session.py decides when each arm
is loaded and takes turns.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from quantbench.bench import ranks
from quantbench.bench.answers import ArmFacts, Reading, TimedSample, TurnTime
from quantbench.bench.process import Process, WorkerFailed
from quantbench.bench.store import ArmResult, ArmSample, Kind, Left, Ready, Scored, Store, Turn
from quantbench.bench.store import Bandwidth as Read
from quantbench.errors import UsageError
from quantbench.log.options import parse
from quantbench.progress import Progress
from quantbench.quality.thresholds import MAX_KL
from quantbench.quality.types import NoQuality, Quality, QualityAnswer, QualityReference

HEADROOM = 500_000_000  # bytes to stay free when several arms are in memory together
TURN = 0.1  # seconds of a turn of decoding, about: states of a machine last longer
WHOLE, MOST_WHOLE = 0.5, 3  # seconds of whole samples of each process, and their number

READING_ON = 0.25  # of the session's time: what looks beyond the first may take, of all arms
REFERENCE = -1  # as an arm's number: the process of a quality's reference that is no arm

T = TypeVar("T")
Command = Sequence[str] | Callable[[int], Sequence[str]]


class DoesNotFit(Exception):
    """There is too little memory for an arm while others are loaded."""


class Pool(ABC):
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
        self.reference: str | None = None  # the file of the baseline's hidden states, once written
        self.scoring = 0.0  # seconds that quality has taken
        self.reading_on = 0.0  # those of looks beyond the first
        self.steps: dict[int, int] = {}  # of a turn of decoding, by arm
        self.prompt_seconds: dict[int, float] = {}

    @abstractmethod
    def leaves_out(self, number: int) -> bool:
        """Whether the arm is not to be loaded, or no more of it measured; then the results say
        why."""

    def load(self, number: int) -> None:
        """Start the arm's worker, score it once, and get it ready. An arm that fails or is left out
        is not loaded afterwards.

        Raises DoesNotFit where other arms take the memory.
        """
        arm = self.results.arms[number]
        self._read_reference()
        try:
            saved = str(self.saved.absolute() / str(number)) if self.saved else None
            worker = self.start(number, arm.argv, saved=saved)
            started = self.clock()
            self._score(number, worker)
            self.scoring += self.clock() - started
            if self.leaves_out(number):
                return
            facts = worker.answer(ArmFacts, "get_ready")
            for note in facts.notes if number == 0 and arm.facts is None else ():
                self.progress.say(note)
            self.store.add(Ready(number, arm.processes, facts))
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
            self.probes[device] = Process(self._command(0))
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
        worker = Process(ranks.of(self._command(number), size))
        others = sum(occupied(self.results.arms[other]) for other in self.loaded)
        room = {"headroom": HEADROOM, "others": others} if self.loaded else {}
        self.loaded[number] = worker
        worker.ask("load", argv=argv, **more, **room)
        return worker

    def _command(self, number: int) -> Sequence[str]:
        return self.command(number) if callable(self.command) else self.command

    def _score(self, number: int, worker: Process) -> None:
        """Measure this arm's quality, once; the baseline's again if its states are missing. The
        baseline reads on for an arm whose KL is not clear of the limit, while READING_ON allows
        another look, which has twice the last one's tokens."""
        arm, is_baseline = self.results.arms[number], number == 0 and self._apart is None
        for_others = is_baseline and self.reference is None and self._unscored()
        if not self.results.settings.tokens or not (arm.quality is None or for_others):
            return
        answer, took = self._quality(worker, is_baseline), 0.0
        most = READING_ON * 60 * self.results.settings.max_minutes
        can_read_on = not is_baseline and (self._apart or 0 in self.loaded)
        while answer.looks and can_read_on and self.reading_on + 2 * took <= most:
            started = self.clock()
            full = self._read_on(answer.looks)
            if isinstance(full, NoQuality):
                break
            if not self._apart:
                self._scored(0, full)
            answer = self._quality(worker, False)
            took = self.clock() - started
            self.reading_on += took
        if is_baseline and isinstance(answer.quality, Quality):
            self.reference = self._states
        self._scored(number, answer.quality)

    @property
    def _apart(self) -> QualityReference | None:
        """What quality is relative to, where that is not the baseline."""
        reference = self.results.settings.reference
        return reference if reference and reference.argv != self.results.baseline.argv else None

    def _unscored(self) -> list[ArmResult]:
        return [arm for arm in self.results.alive if arm.quality is None]

    def _read_reference(self) -> None:
        """Let the reference read the first look before arms take memory, if it is not the baseline;
        where it cannot, no arm has a quality."""
        unscored = self._unscored()
        if self._apart is None or self.reference or not unscored:
            return  # --tokens 0 has no reference
        quality = self._read_on(looks=1)
        if isinstance(quality, Quality):
            self.reference = self._states
            return
        why = NoQuality(f"{self._apart.path}, the reference: {quality.why_not}")
        for arm in unscored:
            self._scored(self.results.arms.index(arm), why)

    def _read_on(self, looks: int) -> Quality | NoQuality:
        """Let the reference read `looks` looks, and return its own quality."""
        if self._apart is None:
            return self._quality(self.loaded[0], True, looks).quality
        try:
            worker = self.start(REFERENCE, self._apart.argv)
            return self._quality(worker, True, looks).quality
        except WorkerFailed as error:
            return NoQuality(str(error))
        finally:
            self.unload(REFERENCE)

    def _quality(self, worker: Process, is_baseline: bool, looks: int = 1) -> QualityAnswer:
        settings = self.results.settings
        try:
            return worker.answer(
                QualityAnswer,
                "quality",
                tokens=settings.tokens,
                text=settings.text,
                reference=None if is_baseline else self.reference,
                keep=self._states if is_baseline else None,
                max_kl=self.results.limits.get("max_kl") or MAX_KL,
                looks=looks,
            )
        except WorkerFailed as error:
            if isinstance(error, UsageError) and is_baseline:
                raise UsageError(str(error)) from None  # the text will not do for any arm
            if error.kind == "dead" and looks == 1:
                raise
            return QualityAnswer(NoQuality(str(error)))

    @property
    def _states(self) -> str:
        """The file of the baseline's hidden states."""
        return str(self.scratch / "reference")

    def _scored(self, number: int, quality: Quality | NoQuality) -> None:
        if isinstance(quality, Quality):
            quality = quality.with_interval()
        self.store.add(Scored(number, quality))


def _of_ours(argv: Sequence[str]) -> bool:
    """Whether these are options of generate.py; another runtime's are one JSON object."""
    return not argv or argv[0].startswith("--")


def occupied(arm: ArmResult) -> int:
    """The most bytes that unloading an arm would free."""
    peaks = arm.facts.peak_memory_bytes if arm.facts else {}
    return max((max(kinds.values()) for kinds in peaks.values()), default=0)
