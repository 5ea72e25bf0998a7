"""The comparison itself: blocks of one process an arm, looked at when the plan says so.

Two processes of the same arm differ by one or two percent for as long as they live, because their
memory lies at other addresses, and the order of loading matters (docs/LOG.md). So a block starts
every arm anew, every second block in the opposite order, and figures/plan.py says after how many
blocks to look, and when the run is over.

Side by side, all arms of a block are loaded, and sampled in rounds that alternate in direction
(A B B A). In turn, where they do not fit together or are many, each is loaded alone; the baseline
has a turn before and after every BETWEEN_BASELINES arms (A B C D A), and stays loaded if it fits.
"""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from compare.figures import timings
from compare.figures.contrasts import Fit, fit
from compare.figures.families import Verdict, against_best
from compare.figures.interval import Ratio
from compare.figures.plan import Plan, arms_to_drop, settled_arms
from compare.sampling import process
from compare.sampling.nursery import Nursery
from compare.sampling.process import WorkerFailed
from compare.sampling.progress import Progress
from compare.sampling.results import MOST_BESIDE, Results
from compare.sampling.workers import Command, DoesNotFit, Workers

BETWEEN_BASELINES = 3  # arms
PROCESSES, PROCESSES_OF_MANY = 16, 2  # of each arm, at most
SAMPLES, SAMPLES_IN_TURN, LEAST_SAMPLES = 4, 3, 2  # of each process
SETTLING = 1  # samples that do not count: arms that were steady alone are not yet steady in turns
SETTLED = 0.02  # seconds: threads of the previous sample spin for a few milliseconds
SAVE_EVERY = 1.0  # seconds
VERDICTS: tuple[Verdict, ...] = ("faster", "slower", "no difference shown")


class Comparison:
    """One session of a comparison, which continues what `results` holds."""

    def __init__(
        self,
        results: Results,
        folder: Path | None,
        say: Callable[[str], None],
        command: Command = process.COMMAND,
        nursery: Nursery | None = None,
        probe_rounds: bool = False,
        extend: bool = False,
    ) -> None:
        """
        folder: where the results are saved
        command, nursery: as Workers takes them
        probe_rounds: side by side, read the bandwidth before each round, not only at both ends
        extend: go on after the end of the plan, as far as the settings allow by now
        """
        self.results, self.settings, self.folder = results, results.settings, folder
        self.command, self.nursery, self.probe_rounds = command, nursery, probe_rounds
        self.extend = extend
        self.progress = Progress(say)
        self.say = self.progress.say
        self.saved = 0.0  # time.monotonic() of the last save
        self.baseline_stays = True  # in turn, while other arms are loaded
        self.workers: Workers

    def run(self) -> None:
        """Until the end, which `results.ended` names. Ctrl-C and SIGTERM are one, too."""
        results = self.results
        if results.ended is not None:
            return
        results.forget_unfinished()
        with tempfile.TemporaryDirectory(prefix="quantbench-") as scratch:
            arms = self.folder / "arms" if self.folder else Path(scratch, "arms")
            once = self.settings.processes == 1  # then nothing would be read back
            given = (self.command, self.nursery, None if once else arms)
            self.workers = Workers(results, Path(scratch), self.say, *given)
            with self.progress.ticking():
                try:
                    results.ended = self._run()
                except KeyboardInterrupt:
                    results.ended = "interrupted"
                    self._interrupted()
                finally:
                    self.workers.close()
                    results.save(self.folder)
            if results.ended != "interrupted":  # else --resume takes the arms from there
                shutil.rmtree(arms, ignore_errors=True)

    def _run(self) -> str:
        results = self.results
        many = len(results.running) > MOST_BESIDE and not self.settings.fixed
        results.in_turn = results.in_turn or many
        while (target := self._target()) is not None:
            while results.blocks < target:
                if (why := self._nothing_to_compare()) and (results.blocks or not results.alive):
                    self._look()
                    return why
                self._block(target)
                results.blocks += 1
                if results.plan is None:
                    plan = results.plan = self._plan()
                    target = plan.most_blocks if self.settings.fixed else plan.first_blocks
                    self.progress.plan(target, plan.most_blocks)
                    self.say(f"The first block is done; {self.progress.left()}")
                self._keep(at_once=True)
                if self.settings.fixed and self._is_over_budget():
                    break
            self._look()
            if self.settings.fixed:
                break
        if not results.in_turn and not self.probe_rounds:
            self.workers.probe(None, self._numbers())
        return self._why_ended()

    # ------------------------------------------------------------------------------- the plan

    def _target(self) -> int | None:
        """After how many blocks in all to look next; None where the run is over."""
        results = self.results
        if results.plan is None:
            most = self._most_processes()
            return most if self.settings.fixed else min(most, self._first_look())
        if self.settings.fixed:
            return results.plan.most_blocks if results.blocks < results.plan.most_blocks else None
        fitted = self._fitted()
        if fitted is None:
            return None
        target = results.plan.next_blocks(results.looks, fitted)
        if target is None or results.blocks >= results.plan.most_blocks:
            return self._extension(fitted)
        if results.blocks >= self._most_processes():  # fewer than when it was begun
            self._interrupted()
            return None
        return min(target, self._most_processes())

    def _first_look(self) -> int:
        """Before it is known how long a block takes."""
        return Plan(max(1, len(self.results.running) - 1), PROCESSES).first_blocks

    def _plan(self) -> Plan:
        """After the first block: what the budget allows."""
        candidates = max(1, len(self.results.running) - 1)
        return Plan(candidates, self._most_blocks(), self.settings.precision)

    def _most_blocks(self) -> int:
        """By time an even number from two on, as arms are loaded in one order and then in the
        other."""
        each = self.results.measuring_seconds / max(1, self.results.blocks)
        most = self._most_processes()
        allowed = max(1, int(60 * self.settings.max_minutes / each)) if each else most
        return most if allowed >= most else max(1, allowed - allowed % 2)

    def _most_processes(self) -> int:
        many = len(self.results.alive) > MOST_BESIDE
        return self.settings.processes or (PROCESSES_OF_MANY if many else PROCESSES)

    def _is_over_budget(self) -> bool:
        return self.results.measuring_seconds > 60 * self.settings.max_minutes

    def _extension(self, fitted: Fit) -> int | None:
        """Blocks in all after which an ended run that a person extends is looked at again."""
        results, precision = self.results, self.settings.precision
        if not self.extend or results.plan is None:
            return None
        self.extend = False
        allowed = self._most_blocks()
        settled = settled_arms(results.looks, precision)
        numbers = [number for number in self._numbers() if number and number in fitted.arms]
        open_arms = [number for number in numbers if number not in settled]
        if not open_arms or allowed <= results.blocks:
            return None
        size = Plan(results.plan.candidates, allowed, precision).size(fitted, open_arms)
        return min(max(size, results.blocks + 2), allowed)

    def _fitted(self) -> Fit | None:
        """None where no arm has been measured beside the baseline."""
        values = timings.of(self.results)
        return fit(values) if values.arms and len(values.values) else None

    def _look(self) -> None:
        """Look at all blocks so far, and drop arms that need no more of them."""
        results, fitted = self.results, self._fitted()
        if fitted is None:
            return
        plan = results.plan or self._plan()
        results.looks.append(plan.look(results.looks, fitted))
        best = against_best(fitted, results.looks[-1].level)
        for number in arms_to_drop(results.looks, best, plan.precision):
            results.arms[number].dropped = bool(number)
        self._keep(at_once=True)
        self.say(self._seen())

    def _interrupted(self) -> None:
        """A look that the person chose; at what was seen before, there is nothing new to see."""
        results, fitted = self.results, self._fitted()
        if fitted is None:
            return
        blocks = max(1, int(fitted.blocks.max()))
        if blocks == 1 or not results.looks or results.looks[-1].blocks != blocks:
            plan = results.plan or Plan(max(1, len(results.running) - 1), PROCESSES)
            results.looks.append(plan.interrupted(fitted))

    def _seen(self) -> str:
        """The last look: every arm's speed-up, or, of many arms, how many there are of a kind."""
        look = self.results.looks[-1]
        if len(look.intervals) > 4:
            verdicts = [interval.verdict for interval in look.intervals]
            parts = [f"{verdicts.count(kind)} {kind}" for kind in VERDICTS]
        else:
            parts = [
                f"{self.results.arms[interval.arm].name} "
                f"{Ratio.of(interval).inverse.written('.2f')} × the baseline"
                for interval in look.intervals
            ]
        some = "1 process" if look.blocks == 1 else f"{look.blocks} processes"
        return f"After {some} of each arm: {'; '.join(parts)}"

    def _why_ended(self) -> str:
        results = self.results
        settled = settled_arms(results.looks, self.settings.precision)
        if results.looks and all(number in settled for number in self._numbers() if number):
            return "precise"
        return "processes" if results.blocks >= self._most_processes() else "max_minutes"

    def _nothing_to_compare(self) -> str | None:
        if self.results.baseline.failed is not None:
            return "baseline failed"
        return None if len(self.results.alive) > 1 else "nothing to compare with"

    def _numbers(self) -> list[int]:
        """Of the arms that more samples are taken of."""
        arms = enumerate(self.results.arms)
        return [n for n, arm in arms if arm.failed is None and not arm.dropped]

    # ------------------------------------------------------------------------------- a block

    def _block(self, target: int) -> None:
        results = self.results
        measured = self.workers.measuring
        most = results.plan.most_blocks if results.plan else target
        self.progress.plan(target, max(most, target))
        try:
            if not results.in_turn:
                try:
                    self._block_beside()
                except DoesNotFit as reason:
                    self.say(f"{reason}: arms are loaded in turn")
                    results.in_turn = True
            if results.in_turn:
                self._block_in_turn()
            self.progress.end_block()
        finally:
            self.workers.unload_all()
            results.measuring_seconds += self.workers.measuring - measured

    def _block_beside(self) -> None:
        """Raises DoesNotFit in the first block."""
        results, order = self.results, self._order()
        self.progress.begin_block(results.blocks + 1, len(order) * (2 + self._samples()))
        loading = order
        if self.workers.wants_logits():
            loading = sorted(order, key=bool)  # the others are compared with the baseline's
        for place, number in enumerate(loading, 1):
            self._load(number, f"arm {place} of {len(loading)}")
        if results.rounds == 0 and not self.probe_rounds:
            self.workers.probe(0, self._numbers())
        for _ in range(SETTLING):
            self._round(order, counted=False)
        taken = 0
        while taken < self._samples() and self.workers.loaded:
            if self.probe_rounds:
                self.workers.probe(results.rounds, self._numbers())
            self._round(order if taken % 2 == 0 else order[::-1])
            results.rounds += 1
            taken += 1
            self._keep()

    def _round(self, order: Sequence[int], counted: bool = True) -> None:
        """A sample of every arm."""
        for number in order:
            self._sample(number, counted)
            self.progress.unit_done()
            time.sleep(SETTLED)

    def _block_in_turn(self) -> None:
        """The turns that are still to be taken: a block may have been interrupted."""
        results = self.results
        done = {
            number
            for number, arm in enumerate(results.arms)
            if any(sample.block == results.blocks for sample in arm.samples)
        }
        arms = [number for number in self._order() if number and number not in done]
        order = turns(arms)
        self.progress.begin_block(results.blocks + 1, len(order))
        place = 0
        for number in order:
            place += bool(number)
            self._turn(number, f"arm {place} of {len(arms)}" if number else "the baseline's turn")
            self.progress.unit_done()
            self._keep(at_once=True)

    def _turn(self, number: int, where: str) -> None:
        """Load an arm, or go back to the baseline where it stayed, and take its samples."""
        results, workers = self.results, self.workers
        if number in workers.loaded:
            self._sample(number, counted=False)
        else:
            try:
                self._load(number, where)
            except DoesNotFit:  # beside the baseline
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
        """Say so in the first block. Raises DoesNotFit where other arms take the memory and that
        may change."""
        arm = self.results.arms[number]
        self.progress.at(f"{arm.name}: loading and warming up ({where})")
        if self.results.blocks == 0 and arm.facts is None and arm.failed is None:
            self.say(self.progress.line())
        try:
            self.workers.load(number)
        except DoesNotFit as error:
            if self.results.in_turn or self.results.blocks == 0:
                raise
            self.workers.fail(number, WorkerFailed(str(error), "memory"))
        if not self.results.in_turn:
            self.progress.unit_done()

    def _sample(self, number: int, counted: bool = True) -> None:
        """The first sample of a run shows how many the budget allows in each process."""
        results = self.results
        self.progress.at(f"{results.arms[number].name}: measuring")
        before = self.workers.measuring
        self.workers.sample(number, results.rounds, counted)
        if results.samples is None and number in self.workers.loaded:
            results.samples = self._affordable(self.workers.measuring - before)

    def _samples(self) -> int:
        """Of each process."""
        if self.settings.samples:
            return self.settings.samples
        most = SAMPLES_IN_TURN if self.results.in_turn else SAMPLES
        return min(most, self.results.samples or most)

    def _affordable(self, seconds: float) -> int:
        """How many samples of so many seconds in each process let the first look come within
        --max_minutes, at least LEAST_SAMPLES."""
        arms = len(self.results.running)
        a_block = len(turns(range(1, arms))) if self.results.in_turn else arms
        blocks = min(self._first_look(), self._most_processes())
        budget = 60 * self.settings.max_minutes
        fit_in = int(budget / max(1e-9, blocks * a_block * seconds))
        return max(LEAST_SAMPLES, fit_in if self.results.in_turn else fit_in - SETTLING)

    def _order(self) -> list[int]:
        """The arms of this block: as given, then in the opposite order; each further pair of blocks
        in an order drawn anew. The same for the same seed, whatever came before."""
        numbers, pair = self._numbers(), self.results.blocks // 2
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
