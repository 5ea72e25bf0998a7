"""The comparison itself: workers loaded and warmed up, then rounds of one sample an arm.

Two processes of the same arm differ by one or two percent for as long as they live, because their
memory lies at other addresses, and the order of loading matters (docs/LOG.md). So all processes are
started anew every ten rounds, up to --processes times, every second time in the opposite order.
Where the arms do not fit into memory together, they are loaded in turn, several times over, and a
round is then a few samples of every arm.
"""

import dataclasses
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from compare.figures import timings
from compare.figures.contrasts import fit
from compare.figures.families import FALSE_VERDICTS, against_baseline
from compare.figures.plan import Look, settled_arms
from compare.figures.statistics import LEAST_ROUNDS, is_look
from compare.sampling import process
from compare.sampling.answers import (
    ArmFacts,
    LogitsFile,
    NoQuality,
    QualityAnswer,
    Reading,
    TimedSample,
)
from compare.sampling.nursery import Nursery
from compare.sampling.process import Process, WorkerFailed
from compare.sampling.results import ArmResult, ArmSample, Results
from errors import UsageError

HEADROOM = 500_000_000  # bytes to stay free when all arms are in memory together
TURNS, SAMPLES_PER_TURN = 6, 5
ROUNDS_EACH, SOME_PROCESSES = 10, 4
SETTLING_ROUNDS = 3  # not counted: arms that were steady alone are not yet steady in turns
SETTLED = 0.02  # seconds: threads of the previous sample spin for a few milliseconds
KEPT = "arms"  # in the folder of results, or a temporary one: quantized models, while it runs
SAVE_EVERY, SPEAK_EVERY = 1.0, 10.0  # seconds


class DoesNotFit(Exception):
    """There is too little memory for the next arm while the others are loaded."""


class Comparison:
    """One run of a comparison, which continues what `results` holds."""

    def __init__(
        self,
        results: Results,
        folder: Path | None,
        say: Callable[[str], None],
        command: Sequence[str] | Callable[[int], Sequence[str]] = process.COMMAND,
        nursery: Nursery | None = None,
        probe_rounds: bool = False,
    ) -> None:
        """
        folder: where the results are saved
        command: starts a worker; or a function that gives the command for an arm's number
        nursery: forks the workers, where it can
        probe_rounds: read the bandwidth before each round, not only before the first and at the end
        """
        self.results, self.settings, self.folder, self.say = results, results.settings, folder, say
        self.command, self.nursery, self.probe_rounds = command, nursery, probe_rounds
        self.workers: dict[int, Process] = {}  # by the arm's number
        self.probes: dict[str, Process] = {}
        self.reference: LogitsFile | None = None
        self.process: int | None = None  # the number that _process gave last
        self.sampling = 0.0  # seconds spent on it
        self.saved = self.spoken = 0.0  # time.monotonic() of the last save and line of progress

    def run(self) -> None:
        results = self.results
        results.ended = self._enough()
        if results.ended:
            return
        self._forget_unfinished()
        with tempfile.TemporaryDirectory(prefix="quantbench-") as scratch:
            self.scratch = scratch
            try:
                results.ended = self._run()
            except KeyboardInterrupt:
                results.ended = "interrupted"
            finally:
                for worker in (*self.workers.values(), *self.probes.values()):
                    worker.close()
                self._look()
                results.save(self.folder)
                if self.folder and results.ended not in (None, "interrupted"):
                    shutil.rmtree(self.folder / KEPT, ignore_errors=True)

    def _run(self) -> str:
        results = self.results
        ended = None
        while ended is None:
            if not results.in_turn and self._process() != self.process:
                self._load_all()
            if not results.alive:
                return "baseline failed"
            if results.in_turn or results.rounds == 0 or self.probe_rounds:
                self._probe(results.rounds)
            started = time.monotonic()
            self._turn() if results.in_turn else self._round()
            self.sampling += time.monotonic() - started
            results.rounds += 1
            ended = self._enough()
            self._keep(at_once=ended is not None)
        if not self.probe_rounds:
            self._probe(None)
        return ended

    def _process(self) -> int:
        """Which of an arm's processes, counted from 0, the next round is for."""
        rounds, count = self.results.rounds, self.settings.processes
        if self.results.in_turn:
            return rounds
        return min(rounds // self._rounds_each(), count - 1)

    def _rounds_each(self) -> int:
        """Rounds of each process but the last, which takes the rest. Few where there are few in
        all, because several processes tell more than many rounds of one."""
        if self.results.in_turn:
            return 1
        some = min(SOME_PROCESSES, self.settings.processes)
        return max(1, min(ROUNDS_EACH, self.settings.max_rounds // some))

    def _load_all(self) -> None:
        """Load all arms, if they fit into memory together, in place of those that were loaded."""
        for number in list(self.workers):
            self._unload(number)
        self.process = self._process()
        order = range(len(self.results.arms))
        if self.process % 2 and not self._wants_logits():
            order = order[::-1]  # only the first time does the baseline have to come first
        try:
            for number in order:
                self._load(number)
        except DoesNotFit as reason:
            self.say(f"{reason}: arms are loaded in turn, {TURNS} times over")
            self.results.in_turn = True
            for number in list(self.workers):
                self._unload(number)
            return
        for _ in range(SETTLING_ROUNDS):
            self._round(counted=False)

    def _forget_unfinished(self) -> None:
        """Drop the samples of a round that was cut short; in a turn, an arm's whole set stays."""
        for number, arm in enumerate(self.results.arms):
            last = arm.in_round(self.results.rounds)
            finished = self.results.in_turn and last == SAMPLES_PER_TURN
            if number == 0 and self._wants_logits():
                finished = False  # it is loaded again anyway, for its logits
            if not finished:
                arm.samples = arm.samples[: len(arm.samples) - last]

    def _load(self, number: int) -> None:
        """Start the arm's worker, and get it ready; where that fails, the arm keeps the reason.

        Raises DoesNotFit where other arms take the memory.
        """
        arm = self.results.arms[number]
        if arm.failed is not None:
            return
        self.say(f"{arm.name}: loading and warming up …")
        worker = self.workers[number] = self._start(number)
        try:
            loaded = [self.results.arms[other] for other in self.workers if other != number]
            others = sum(_occupied(arm) for arm in loaded)
            room = {"headroom": HEADROOM, "others": others} if loaded else {}
            worker.ask("load", argv=arm.argv, saved=self._kept(number), **room)
            self._measure_quality(number, worker)
            facts = worker.answer(ArmFacts, "get_ready")
            if arm.facts:  # the first process was not forked: its peaks are the arm's
                peaks = arm.facts.peak_memory_bytes
                starts = [*arm.facts.start_seconds, *facts.start_seconds]
                facts = dataclasses.replace(facts, peak_memory_bytes=peaks, start_seconds=starts)
            arm.facts = facts
        except WorkerFailed as error:
            self._unload(number)
            if error.kind == "memory" and self.workers and self.results.rounds == 0:
                raise DoesNotFit(f"{arm.name} does not fit into memory with the others") from None
            self._fail(arm, error)
            return
        self._keep(at_once=True)

    def _kept(self, number: int) -> str | None:
        """Where the arm's quantized model is kept from its first process for the later ones."""
        if self.settings.processes == 1 and not self.results.in_turn:
            return None
        return str(Path(self.folder or self.scratch).absolute() / KEPT / str(number))

    def _start(self, number: int) -> Process:
        command = self.command(number) if callable(self.command) else self.command
        return Process(command, self.nursery if self._process() else None)

    def _wants_logits(self) -> bool:
        """Whether an arm is to be compared with the baseline's logits, and has not been yet."""
        missing = any(arm.quality is None for arm in self.results.alive)
        return bool(self.settings.tokens) and missing

    def _measure_quality(self, number: int, worker: Process) -> None:
        """Measure this arm's quality, once; the baseline's again if its logits are missing."""
        arm, is_baseline = self.results.arms[number], number == 0
        again = is_baseline and not self.reference
        if not self._wants_logits() or (arm.quality is not None and not again):
            return
        try:
            answer = worker.answer(
                QualityAnswer,
                "quality",
                tokens=self.settings.tokens,
                text=self.settings.text,
                reference=None if is_baseline else self.reference,
                keep=f"{self.scratch}/logits" if is_baseline else None,
            )
        except WorkerFailed as error:
            if isinstance(error, UsageError) and is_baseline:
                raise UsageError(str(error)) from None  # the text will not do for any arm
            if error.kind == "dead":
                raise
            answer = QualityAnswer(NoQuality(str(error)))
        if is_baseline:
            self.reference = answer.logits
        arm.quality = answer.quality

    def _unload(self, number: int) -> None:
        self.workers.pop(number).close()

    def _fail(self, arm: ArmResult, error: WorkerFailed) -> None:
        arm.failed = str(error)
        self.say(f"{arm.name} failed: {arm.failed}")
        self._keep(at_once=True)

    def _round(self, counted: bool = True) -> None:
        """One sample of every arm, in an order drawn anew."""
        for number in self._order():
            self._sample(number, counted)
            time.sleep(SETTLED)

    def _turn(self) -> None:
        """Load each arm by itself, and take some samples of it."""
        round = self.results.rounds
        for number in self._order():
            if self.results.arms[number].in_round(round) == SAMPLES_PER_TURN:
                continue  # done before the run was interrupted
            self._load(number)
            for _ in range(SAMPLES_PER_TURN):
                self._sample(number)
            if number in self.workers:
                self._unload(number)
            self._keep(at_once=True)

    def _order(self) -> list[int]:
        """The same for the same seed and round, whatever came before."""
        numbers = [n for n, arm in enumerate(self.results.arms) if arm.failed is None]
        random.Random(f"{self.settings.order_seed} {self.results.rounds}").shuffle(numbers)
        if self.results.in_turn and self.settings.tokens and self.results.rounds == 0:
            numbers.sort(key=bool)  # the others are compared with the baseline's logits
        return numbers

    def _sample(self, number: int, counted: bool = True) -> None:
        arm, worker = self.results.arms[number], self.workers.get(number)
        if worker is None:
            return
        round = self.results.rounds
        try:
            index = round * SAMPLES_PER_TURN + arm.in_round(round)
            started = time.monotonic()
            sample = worker.answer(TimedSample, "sample", index=index)
        except WorkerFailed as error:
            self._unload(number)
            self._fail(arm, error)
            return
        if counted:
            process = self._process()
            arm.samples.append(
                ArmSample(
                    **vars(sample), block=process, round=round, process=process, started=started
                )
            )

    def _enough(self) -> str | None:
        """Why to stop, or None; looks at widths only when the statistics allow it."""
        results, settings = self.results, self.settings
        most = min(TURNS, settings.max_rounds) if results.in_turn else settings.max_rounds
        if results.baseline.failed is not None or len(results.alive) < 2:
            why = "baseline failed" if results.baseline.failed else "nothing to compare with"
            return why if not results.alive or results.rounds >= min(LEAST_ROUNDS, most) else None
        processes = TURNS if results.in_turn else settings.processes
        look = is_look(results.rounds, self._rounds_each(), processes)
        look = look and (results.in_turn or results.rounds >= LEAST_ROUNDS)
        if self.sampling and (look or time.monotonic() > self.spoken + SPEAK_EVERY):
            self.say(f"Round {results.rounds}")
            self.spoken = time.monotonic()
        if look and self._look() and self._all_settled():
            return "precise"
        if results.rounds >= most:
            return "max_rounds"
        if self.sampling > 60 * settings.max_minutes:
            return "max_minutes"
        return None

    def _look(self) -> bool:
        """Whether there is anything to see."""
        values = timings.of(self.results)
        if not values.arms or not len(values.values):
            return False
        fitted = fit(values)
        intervals = against_baseline(fitted, FALSE_VERDICTS)
        look = Look("final", int(fitted.blocks.max()), FALSE_VERDICTS, tuple(intervals))
        self.results.looks = [look]
        return True

    def _all_settled(self) -> bool:
        intervals = self.results.looks[-1].intervals
        settled = settled_arms(self.results.looks, self.settings.precision)
        return {interval.arm for interval in intervals} <= settled

    def _probe(self, round: int | None) -> None:
        """Read the bandwidth of every device that an arm is on, before `round`."""
        devices = {arm.facts.device for arm in self.results.alive if arm.facts}
        for device in sorted(devices):
            try:
                if device not in self.probes:
                    self.probes[device] = self._start(0)
                reading = self.probes[device].answer(Reading, "bandwidth", device=device)
            except WorkerFailed as error:
                self.say(f"no bandwidth of {device}: {error}")
                if error.kind == "dead":
                    self.probes.pop(device).close()  # the next round starts another
                continue
            reading = dataclasses.replace(reading, round=round)
            readings = self.results.bandwidth.setdefault(device, [])
            if (
                round is not None
            ):  # replace the reading of a round that was cut short and began again
                readings[:] = [earlier for earlier in readings if earlier.round != round]
            readings.append(reading)

    def _keep(self, at_once: bool = False) -> None:
        if at_once or time.monotonic() > self.saved + SAVE_EVERY:
            self.results.save(self.folder)
            self.saved = time.monotonic()


def _occupied(arm: ArmResult) -> int:
    """The most bytes that unloading an arm would free."""
    peaks = arm.facts.peak_memory_bytes if arm.facts else {}
    return max((max(kinds.values()) for kinds in peaks.values()), default=0)
