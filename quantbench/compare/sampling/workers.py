"""The workers of a comparison: an arm's process is loaded, made ready, asked for samples, ended.

    workers = Workers(results, scratch, say)
    workers.load(0)                             # raises DoesNotFit where others take the memory
    workers.sample(0, round=0, counted=True)
    workers.close()

What goes wrong with one arm is that arm's `failed`; the others go on.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from quantbench.compare.sampling import process, ranks
from quantbench.compare.sampling.answers import (
    ArmFacts,
    LogitsFile,
    NoQuality,
    Quality,
    QualityAnswer,
    Reading,
    TimedSample,
)
from quantbench.compare.sampling.process import Process, WorkerFailed
from quantbench.compare.sampling.results import ArmResult, ArmSample, Results
from quantbench.errors import UsageError
from quantbench.log.options import parse
from quantbench.run.why import Expected

HEADROOM = 500_000_000  # bytes to stay free when several arms are in memory together

Command = Sequence[str] | Callable[[int], Sequence[str]]


class DoesNotFit(Exception):
    """There is too little memory for an arm while others are loaded."""


class Workers:
    """The worker processes: those of loaded arms, by the arm's number, and one for each device that
    reads memory."""

    def __init__(
        self,
        results: Results,
        scratch: Path,
        say: Callable[[str], None],
        command: Command = process.COMMAND,
        arms: Path | None = None,
    ) -> None:
        """
        scratch: a folder for this session
        command: starts a worker; or a function that gives the command for an arm's number
        arms: a folder where an arm may be kept as it was quantized, for its later processes
        """
        self.results, self.scratch, self.say = results, scratch, say
        self.command, self.arms = command, arms
        self.loaded: dict[int, Process] = {}
        self.probes: dict[str, Process] = {}
        self.reference: LogitsFile | None = None
        self.process: dict[int, int] = {}  # by the arm's number: which of its processes is loaded
        self.measuring = 0.0  # seconds of samples

    def load(self, number: int) -> None:
        """Start the arm's worker, and get it ready; where that fails, the arm keeps the reason.

        Raises DoesNotFit where other arms take the memory.
        """
        arm = self.results.arms[number]
        if arm.failed is not None:
            return
        worker = self.loaded[number] = self._start(number)
        self.process[number] = 1 + max((sample.process for sample in arm.samples), default=-1)
        try:
            beside = [self.results.arms[other] for other in self.loaded if other != number]
            room = {"headroom": HEADROOM, "others": sum(map(_occupied, beside))} if beside else {}
            saved = str(self.arms.absolute() / str(number)) if self.arms else None
            worker.ask("load", argv=arm.argv, saved=saved, **room)
            self._measure_quality(number, worker)
            facts = worker.answer(ArmFacts, "get_ready")
            if arm.facts:  # the first process read the model as generate.py does: its peaks count
                peaks = arm.facts.peak_memory_bytes
                starts = [*arm.facts.start_seconds, *facts.start_seconds]
                energy = [*arm.facts.energy, *facts.energy]
                facts = dataclasses.replace(
                    facts, peak_memory_bytes=peaks, start_seconds=starts, energy=energy
                )
                before = Expected(arm.facts.estimate, arm.facts.limit, arm.facts.no_estimate)
            else:
                before = self._expected(facts)
            facts = dataclasses.replace(
                facts, estimate=before.figures, limit=before.limit, no_estimate=before.why_not
            )
            arm.facts = facts
        except WorkerFailed as error:
            self.unload(number)
            if error.kind == "memory" and self.loaded:
                raise DoesNotFit(f"{arm.name} does not fit into memory with the others") from None
            self.fail(number, error)

    def sample(self, number: int, round: int, counted: bool = True) -> None:
        """Take a sample of an arm that is loaded; of another, nothing."""
        arm, worker = self.results.arms[number], self.loaded.get(number)
        if worker is None:
            return
        started = time.monotonic()
        try:
            sample = worker.answer(TimedSample, "sample", index=len(arm.samples))
        except WorkerFailed as error:
            self.unload(number)
            self.fail(number, error)
            return
        finally:
            self.measuring += time.monotonic() - started
        if counted:
            arm.samples.append(
                ArmSample(
                    **vars(sample),
                    block=self.results.blocks,
                    round=round,
                    process=self.process[number],
                    started=started,
                )
            )

    def probe(self, round: int | None, numbers: Sequence[int]) -> None:
        """Read the bandwidth of every device that these arms are on, before `round`."""
        arms = [self.results.arms[number] for number in numbers]
        for device in sorted({arm.facts.device for arm in arms if arm.facts and not arm.failed}):
            try:
                reading = self._prober(device).answer(Reading, "bandwidth", device=device)
            except WorkerFailed as error:
                self.say(f"no bandwidth of {device}: {error}")
                if error.kind == "dead":
                    self.probes.pop(device).close()  # the next round starts another
                continue
            readings = self.results.bandwidth.setdefault(device, [])
            readings.append(dataclasses.replace(reading, round=round))

    def _expected(self, facts: ArmFacts) -> Expected:
        """What is estimated of an arm's run. Nothing where no worker tells: those of an older
        commit, which `replay --against` starts, do not."""
        if facts.run is None:
            return Expected()
        try:
            return self._prober(facts.device).answer(Expected, "expected", run=facts.run)
        except WorkerFailed as error:
            if error.kind == "dead":
                self.probes.pop(facts.device).close()
            return Expected()

    def _prober(self, device: str) -> Process:
        """The worker that has no arm: it reads the device's bandwidth and estimates runs on it."""
        if device not in self.probes:
            self.probes[device] = Process(self._command(0))
        return self.probes[device]

    def unload(self, number: int) -> None:
        self.loaded.pop(number).close()

    def unload_all(self) -> None:
        for number in list(self.loaded):
            self.unload(number)

    def fail(self, number: int, error: WorkerFailed) -> None:
        arm = self.results.arms[number]
        arm.failed = str(error)
        self.say(f"{arm.name} failed: {arm.failed}")

    def close(self) -> None:
        self.unload_all()
        for worker in self.probes.values():
            worker.close()

    def wants_logits(self) -> bool:
        """Whether an arm is to be compared with the baseline's logits, and has not been yet."""
        missing = any(arm.quality is None for arm in self.results.alive)
        return bool(self.results.settings.tokens) and missing

    def _start(self, number: int) -> Process:
        argv = self.results.arms[number].argv
        of_ours = not argv or argv[0].startswith("--")  # another runtime's is one JSON object
        size = parse(argv).tp if of_ours else 1
        return Process(ranks.of(self._command(number), size))

    def _command(self, number: int) -> Sequence[str]:
        return self.command(number) if callable(self.command) else self.command

    def _measure_quality(self, number: int, worker: Process) -> None:
        """Measure this arm's quality, once; the baseline's again if its logits are missing."""
        arm, is_baseline = self.results.arms[number], number == 0
        again = is_baseline and not self.reference
        if not self.wants_logits() or (arm.quality is not None and not again):
            return
        try:
            answer = worker.answer(
                QualityAnswer,
                "quality",
                tokens=self.results.settings.tokens,
                text=self.results.settings.text,
                reference=None if is_baseline else self.reference,
                keep=str(self.scratch / "logits") if is_baseline else None,
            )
        except WorkerFailed as error:
            if isinstance(error, UsageError) and is_baseline:
                raise UsageError(str(error)) from None  # the text will not do for any arm
            if error.kind == "dead":
                raise
            answer = QualityAnswer(NoQuality(str(error)))
        if is_baseline:
            self.reference = answer.logits
        measured = answer.quality
        arm.quality = measured.with_interval() if isinstance(measured, Quality) else measured


def _occupied(arm: ArmResult) -> int:
    """The most bytes that unloading an arm would free."""
    peaks = arm.facts.peak_memory_bytes if arm.facts else {}
    return max((max(kinds.values()) for kinds in peaks.values()), default=0)
