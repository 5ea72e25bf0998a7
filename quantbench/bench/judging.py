"""Quality before speed: one worker process scores every arm, before any is loaded to be timed.

    judge(session)          # results.arms[1].quality, and what the loaded arm is compared with

The reference, which is the baseline unless settings say otherwise, is loaded once in that process;
then arm after arm is loaded as for its turns, read, and freed (quality/judge.py). An arm that
cannot be loaded there has failed. The process ends before arms are loaded to be timed.
"""

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING

from quantbench.bench import ranks
from quantbench.bench.process import Process, WorkerFailed, building
from quantbench.bench.store import Left, Scored
from quantbench.errors import UsageError
from quantbench.log.config import argv
from quantbench.log.options import parse
from quantbench.quality.thresholds import MAX_KL
from quantbench.quality.types import Judged, NoQuality, Quality

if TYPE_CHECKING:
    from quantbench.bench.session import Session

JUDGING = 0.5  # of the session's time: what is not judged by then has no quality
READING_ON = 0.25  # of what is left of it: for one arm's looks beyond the first
JUDGE = -1  # as an arm's number: the judge's process


def judge(session: "Session") -> None:
    """Score every arm that has no quality yet, while the time allows. Raises UsageError for a text
    that will not do."""
    results = session.results
    waiting = [
        number
        for number, arm in enumerate(results.arms)
        if arm.quality is None and arm.failed is None and arm.dropped is None
    ]
    if results.settings.tokens and waiting:
        judging = _Judging(session, waiting)
        while judging.waiting:  # an arm may end the process
            with closing(Process(ranks.of(session.command_of(JUDGE), judging.ranks))) as worker:
                judging.read(worker)
                judging.arms(worker)


class _Judging:
    """The arms that are left, and what the judge's process is asked."""

    def __init__(self, session: "Session", waiting: list[int]) -> None:
        self.session, self.results, self.waiting = session, session.results, waiting
        self.settings = settings = self.results.settings
        reference = settings.reference
        is_baseline = reference is None or reference.argv == self.results.baseline.argv
        self.apart = None if is_baseline else reference
        # Numbers do not depend on the ranks, and the arm of the fewest fits on as many.
        self.ranks = min(arm.config.tp for arm in self.results.alive)
        self.begun, self.judged = session.clock(), 0

    def read(self, worker: Process) -> None:
        """Let the reference read; where it cannot, no arm has a quality, and none is left."""
        self.session.progress(f"measuring quality{building()}", "full precision")
        exact = self._argv(self.apart.argv if self.apart else self.results.baseline.argv)
        texts = {"tokens": self.settings.tokens, "text": self.settings.text}
        try:
            full = worker.answer(Judged, "read", argv=exact, **texts)
        except WorkerFailed as error:
            if self.apart is None:
                self.session.fail(0, error)
                self.waiting = []
                return
            full = Judged(NoQuality(str(error)))
        if full.refused:
            raise UsageError(full.refused)
        if not self.judged:  # an arm takes less time than the reference before it
            self.begun = self.session.clock()
        if isinstance(full.quality, NoQuality):
            if self.apart:
                why = f"{self.apart.path}, the reference: {full.quality.why_not}"
                full = Judged(NoQuality(why))
            while self.waiting:
                self._add(self.waiting.pop(0), full)
        elif 0 in self.waiting and self.apart is None:
            self._add(0, full)
            self.waiting.remove(0)

    def arms(self, worker: Process) -> None:
        """Judge those that are left, until one ends the process."""
        while self.waiting:
            number = self.waiting.pop(0)
            if number and (why := self.session.rule.out(self.results, number)):
                self.session.store.add(Left(number, why))  # a finer one is far beyond the limit
                continue
            now = self.session.clock()
            left = JUDGING * 60 * self.settings.max_minutes - (now - self.session.started)
            if self.judged and left < (now - self.begun) / self.judged:
                self.waiting = []
                return
            self.judged += 1
            arm, arms = self.results.arms[number], len(self.results.arms)
            how_far = f"{arm.name}, arm {arms - len(self.waiting)} of {arms}"
            self.session.progress("measuring quality", how_far)
            try:
                judged = worker.answer(
                    Judged,
                    "judge",
                    argv=self._argv(arm.argv),
                    max_kl=self.results.limits.get("max_kl") or MAX_KL,
                    seconds=max(0.0, READING_ON * left),
                    details=self.session.rule.details,
                )
            except WorkerFailed as error:
                self.session.fail(number, error)
                if error.kind == "dead" or self.ranks > 1:  # ranks end for any failure
                    return
                continue
            self._add(number, judged)

    def _argv(self, words: list[str]) -> list[str]:
        """A run's options, with the judge's number of ranks."""
        return argv(dataclasses.replace(parse(words), tp=self.ranks), said=True)

    def _add(self, number: int, judged: Judged) -> None:
        quality = judged.quality
        if isinstance(quality, Quality):
            quality = quality.with_interval()
        of_model = judged.likeliest, judged.weight_bytes, judged.kernel
        self.session.store.add(Scored(number, quality, *of_model))
