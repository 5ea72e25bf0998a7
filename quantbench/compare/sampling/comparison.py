"""The comparison itself: blocks of one process an arm, looked at when the plan says so.

Two processes of the same arm differ by one or two percent for as long as they live, because their
memory lies at other addresses, and the order of loading matters (docs/LOG.md). So a block starts
every arm anew, every second block in the opposite order, and figures/plan.py says after how many
blocks to look, and when the run is over.

Side by side, all arms of a block are loaded, and sampled in rounds that alternate in direction
(A B B A). In turn, where they do not fit together or are many, each is loaded alone; the baseline
has a turn before and after every BETWEEN_BASELINES arms (A B C D A), and stays loaded if it fits.
"""

import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from quantbench.bench import process
from quantbench.bench.process import WorkerFailed
from quantbench.compare.progress import Progress, duration
from quantbench.compare.sampling.results import MOST_BESIDE, Results
from quantbench.compare.sampling.schedule import Schedule
from quantbench.compare.sampling.workers import Command, DoesNotFit, Workers

BETWEEN_BASELINES = 3  # arms that are measured between two turns of the baseline
SAMPLES, SAMPLES_IN_TURN, LEAST_SAMPLES, MOST_SAMPLES = 4, 3, 2, 50  # of each process
WORTH_A_START = 0.3  # seconds of samples, at least: starting a process takes longer
SETTLING = 1  # samples that do not count: arms that were steady alone are not yet steady in turns
SETTLED = 0.02  # seconds: threads of the previous sample spin for a few milliseconds
SAVE_EVERY = 1.0  # seconds


class Comparison:
    """One session of a comparison, which continues what `results` holds."""

    def __init__(
        self,
        results: Results,
        folder: Path | None,
        say: Callable[[str], None],
        command: Command = process.COMMAND,
        probe_rounds: bool = False,
        extend: bool = False,
    ) -> None:
        """
        folder: where the results are saved
        command: as Workers takes it
        probe_rounds: side by side, read the bandwidth before each round, not only at both ends
        extend: as Schedule takes it
        """
        self.results, self.settings, self.folder = results, results.settings, folder
        self.command, self.probe_rounds = command, probe_rounds
        self.progress = Progress(say)
        self.say = self.progress.say
        self.schedule = Schedule(results, self.say, extend)
        self.saved = 0.0  # time.monotonic() of the last save
        self.first_block = results.blocks  # of this session
        self.announced: set[int] = set()  # arms whose loading was announced
        self.baseline_stays = True  # when arms are loaded one by one
        self.workers: Workers

    def run(self) -> None:
        """Measure until the comparison is over; `results.ended` says why. Ctrl-C and SIGTERM end it
        as well, and what was measured is kept."""
        results = self.results
        if results.ended is not None:
            return
        results.forget_unfinished()
        with tempfile.TemporaryDirectory(prefix="quantbench-") as scratch:
            arms = self.folder / "arms" if self.folder else Path(scratch, "arms")
            once = self.settings.processes == 1  # then nothing would be read back
            given = (self.command, None if once else arms)
            self.workers = Workers(results, Path(scratch), self.say, *given)
            with self.progress.ticking():
                try:
                    results.ended = self._run()
                except KeyboardInterrupt:
                    results.ended = "interrupted"
                    self.schedule.interrupted()
                finally:
                    self.workers.close()
                    results.save(self.folder)
            if results.ended != "interrupted":  # else --resume takes the arms from there
                shutil.rmtree(arms, ignore_errors=True)

    def _run(self) -> str:
        results = self.results
        many = len(results.running) > MOST_BESIDE and not self.settings.fixed
        results.in_turn = results.in_turn or many
        while (target := self.schedule.target()) is not None:
            while results.blocks < target:
                if (why := self._nothing_to_compare()) and (results.blocks or not results.alive):
                    self.schedule.look()
                    return why
                self._block(target)
                results.blocks += 1
                if results.plan is None:
                    plan = results.plan = self.schedule.make_plan()
                    target = plan.most_blocks if self.settings.fixed else plan.first_blocks
                    if self._nothing_to_compare() is None:
                        self.progress.total = target - self.first_block
                        left = duration(self.progress.left() or 0.0)
                        self.say(f"The first block is done; about {left} left")
                self._keep(at_once=True)
                if self.settings.fixed and self.schedule.is_over_budget():
                    break
            self.schedule.look()
            if self.settings.fixed:
                break
        if not results.in_turn and not self.probe_rounds:
            self.workers.probe(None, self.results.numbers)
        return self.schedule.why_ended()

    def _nothing_to_compare(self) -> str | None:
        if self.results.baseline.failed is not None:
            return "baseline failed"
        return None if len(self.results.alive) > 1 else "nothing to compare with"

    # ------------------------------------------------------------------------------- a block

    def _block(self, target: int) -> None:
        results = self.results
        before = self.workers.measuring
        most = max(target, results.plan.most_blocks if results.plan else target)
        self.progress.where = f"block {results.blocks + 1} of {target}"
        self.progress.where += f", at most {most}" * (most > target)
        self.progress.total = target - self.first_block
        try:
            if not results.in_turn:
                try:
                    self._block_beside()
                except DoesNotFit as reason:
                    self.say(f"{reason}: arms are loaded in turn")
                    results.in_turn = True
            if results.in_turn:
                self._block_in_turn()
            self.progress.done = results.blocks + 1 - self.first_block
        finally:
            self.workers.unload_all()
            results.measuring_seconds += self.workers.measuring - before

    def _block_beside(self) -> None:
        """A block with all arms loaded side by side. Raises DoesNotFit, in the first block only."""
        results, order = self.results, self._order()
        loading = order
        if self.workers.wants_logits():
            loading = sorted(order, key=bool)  # the others are compared with the baseline's
        for place, number in enumerate(loading, 1):
            self._load(number, f"arm {place} of {len(loading)}")
        if results.rounds == 0 and not self.probe_rounds:
            self.workers.probe(0, self.results.numbers)
        for _ in range(SETTLING):
            self._round(order, counted=False)
        taken = 0
        while taken < self._samples() and self.workers.loaded:
            if self.probe_rounds:
                self.workers.probe(results.rounds, self.results.numbers)
            self._round(order if taken % 2 == 0 else order[::-1])
            results.rounds += 1
            taken += 1
            self._keep()

    def _round(self, order: Sequence[int], counted: bool = True) -> None:
        """A sample of every arm."""
        for number in order:
            self._sample(number, counted)
            time.sleep(SETTLED)

    def _block_in_turn(self) -> None:
        """A block with one arm loaded at a time, without the turns that an earlier session took."""
        results = self.results
        done = {
            number
            for number, arm in enumerate(results.arms)
            if any(sample.block == results.blocks for sample in arm.samples)
        }
        arms = [number for number in self._order() if number and number not in done]
        order = turns(arms)
        place = 0
        for number in order:
            place += bool(number)
            self._turn(number, f"arm {place} of {len(arms)}" if number else "the baseline's turn")
            self.progress.done += 1 / len(order)
            self._keep(at_once=True)

    def _turn(self, number: int, where: str) -> None:
        """Load an arm, or go back to the baseline where it stayed, and take its samples."""
        results, workers = self.results, self.workers
        if number in workers.loaded:
            self._sample(number, counted=False)
        else:
            try:
                self._load(number, where)
            except DoesNotFit:  # next to the baseline
                self.baseline_stays = False
                workers.unload_all()
                self._load(number, where)
        if number not in workers.loaded:
            return
        workers.probe(results.rounds, [number])
        taken = 0
        while number in workers.loaded and taken < self._samples():
            self._sample(number)
            taken += 1
        results.rounds += 1
        if number in workers.loaded and not (number == 0 and self.baseline_stays):
            workers.unload(number)

    def _load(self, number: int, where: str) -> None:
        """Load an arm, and say so the first time in a session. Raises DoesNotFit if other arms take
        the memory and could be unloaded."""
        arm = self.results.arms[number]
        self.progress.at(f"{arm.name}: loading and warming up ({where})")
        if number not in self.announced and arm.failed is None:
            self.announced.add(number)
            self.say(self.progress.line())
        try:
            self.workers.load(number)
        except DoesNotFit as error:
            if self.results.in_turn or self.results.blocks == 0:
                raise
            self.workers.fail(number, WorkerFailed(str(error), "memory"))

    def _sample(self, number: int, counted: bool = True) -> None:
        """Take a sample of an arm. How long the first one of a run takes decides how many samples
        each process takes."""
        results = self.results
        self.progress.at(f"{results.arms[number].name}: measuring")
        before = self.workers.measuring
        self.workers.sample(number, results.rounds, counted)
        if results.samples is None and number in self.workers.loaded:
            results.samples = self._worthwhile(self.workers.measuring - before)

    def _samples(self) -> int:
        """How many samples each process takes."""
        usual = SAMPLES_IN_TURN if self.results.in_turn else SAMPLES
        return self.settings.samples or self.results.samples or usual

    def _worthwhile(self, seconds: float) -> int:
        """How many samples of so many seconds each process takes: more than usual where they are
        short, fewer where the first look would else come after --max_minutes."""
        usual = SAMPLES_IN_TURN if self.results.in_turn else SAMPLES
        wanted = min(MOST_SAMPLES, max(usual, math.ceil(WORTH_A_START / max(1e-9, seconds))))
        return min(wanted, self._affordable(seconds))

    def _affordable(self, seconds: float) -> int:
        """How many samples of so many seconds in each process let the first look come within
        --max_minutes, at least LEAST_SAMPLES."""
        arms = len(self.results.running)
        a_block = len(turns(range(1, arms))) if self.results.in_turn else arms
        blocks = min(self.schedule.first_look(), self.schedule.most_processes())
        budget = 60 * self.settings.max_minutes
        fit_in = int(budget / max(1e-9, blocks * a_block * seconds))
        return max(LEAST_SAMPLES, fit_in if self.results.in_turn else fit_in - SETTLING)

    def _order(self) -> list[int]:
        """The arms of this block: as given, then in the opposite order; each further pair of blocks
        in an order drawn anew. The same for the same seed, whatever came before."""
        numbers, pair = self.results.numbers, self.results.blocks // 2
        if pair:
            random.Random(f"{self.settings.order_seed} {pair}").shuffle(numbers)
        return numbers[::-1] if self.results.blocks % 2 else numbers

    def _keep(self, at_once: bool = False) -> None:
        if at_once or time.monotonic() > self.saved + SAVE_EVERY:
            self.results.save(self.folder)
            self.saved = time.monotonic()


def turns(arms: Sequence[int]) -> list[int]:
    """A block's turns, the baseline's before and after every BETWEEN_BASELINES arms; of no arms,
    the baseline's alone."""
    order = [0]
    for start in range(0, len(arms), BETWEEN_BASELINES):
        order += [*arms[start : start + BETWEEN_BASELINES], 0]
    return order
