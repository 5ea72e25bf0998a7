"""The session of `latency`: every cell of a plan (bench/cell_plan.py) that has no figures yet.

    Cells(store, plan, timeout=None).run()      # results.ended says how it ended

All arms of a model and a number of ranks are loaded, as many as fit with the first one. In each
place they take `runs` cycles: a prompt of every arm, A B C, then the decoding steps of every arm;
the next cycle is C B A. So what is compared was measured within seconds. What goes wrong with a
cell is that cell's reason. A cell that does not fit into memory with the others is measured alone,
after them.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from quantbench.bench import process
from quantbench.bench.answers import ArmFacts, TurnTime
from quantbench.bench.arm import Arm
from quantbench.bench.cell_plan import CellPlan, Place, PlannedCell
from quantbench.bench.noise import Noise
from quantbench.bench.pool import Command, Pool
from quantbench.bench.process import WorkerFailed
from quantbench.bench.store import (
    Ended,
    Kind,
    Left,
    Ready,
    Results,
    Settings,
    Store,
    Turn,
)
from quantbench.log.config import argv
from quantbench.progress import Progress, duration
from quantbench.text import counted
from quantbench.typed_json import to_json

STEP_TOKENS = 32  # a decoding step takes about as long as this many tokens of a prompt
SHORT = ("memory", "dead")  # kinds of failures that the other arms' memory may have caused
T = TypeVar("T")


def begin(plan: CellPlan) -> Results:
    """Results without a measurement; the arm of number n is plan.cells[n]."""
    arms = [Arm(cell.name, cell.arm.text, cell.config(plan.decode_length)) for cell in plan.cells]
    settings = Settings(processes=1, cycles=plan.runs, tokens=0)
    results = Results.begin(settings, arms, "none")
    results.plan = to_json(plan)
    return results


def is_left(results: Results, plan: CellPlan, number: int) -> bool:
    """Whether the cell has neither all runs nor a reason."""
    if results.arms[number].failed is not None:
        return False
    return len(results.turns(number, "decode")) < plan.runs


class Cells:
    def __init__(
        self,
        store: Store,
        plan: CellPlan,
        numbers: Collection[int] | None = None,
        timeout: float | None = None,
        command: Command = process.COMMAND,
        machine: str | None = None,
    ) -> None:
        """
        numbers: of the cells to measure; None: all
        timeout: seconds after which a cell is given up
        machine: where it is not the machine of meta.json
        """
        self.store, self.results, self.plan = store, store.results, plan
        self.cells = plan.cells
        self.wanted = set(range(len(self.cells)) if numbers is None else numbers)
        self.timeout, self.machine = timeout, machine
        self.progress = Progress()
        self.pool = Pool(store, Path(), self.progress.say, command)
        self.loaded: dict[int, int] = {}  # the pool's number of each loaded arm
        self.noise = Noise()
        self.seconds: dict[int, float] = {}  # that cells took
        self.total = self._work()

    def run(self) -> None:
        """Measure until every cell has its runs or its reason, or Ctrl-C comes."""
        why, self.started = "complete", time.monotonic()
        try:
            with self.progress:
                places = enumerate(self.plan.places)
                for _, group in groupby(places, lambda one: (one[1].model, one[1].ranks)):
                    self._group(dict(group))
        except KeyboardInterrupt:
            why = "interrupted"
        finally:
            self.pool.close()
        self.store.add(Ended(why, time.monotonic() - self.started))

    # ------------------------------------------------------------------------------- which cells

    def _number(self, place: int, arm: int) -> int:
        return place * len(self.plan.arms) + arm

    def needs(self, number: int) -> bool:
        """Whether this session has to measure the cell."""
        return number in self.wanted and is_left(self.results, self.plan, number)

    def _group(self, places: dict[int, Place]) -> None:
        """All cells of one model and number of ranks. places: by their number."""

        def waiting() -> list[int]:
            every = range(len(self.plan.arms))
            return [arm for arm in every if any(self.needs(self._number(p, arm)) for p in places)]

        group = waiting()
        if group and group[0]:
            group = [0, *group]  # the baseline takes turns in every cycle
        while len(group) > 1:
            later = self._visit(places, group)
            group = [0, *later] if later and later != group[1:] else []
        for arm in waiting():
            self._visit(places, [arm])

    def _visit(self, places: dict[int, Place], group: Sequence[int]) -> list[int]:
        """Measure these arms together. Returns those that did not fit."""
        later: list[int] = []
        full: set[tuple[int, int]] = set()  # (arm, prompt): larger batches do not fit together
        for number, place in places.items():
            out = {*later, *(arm for arm, prompt in full if prompt == place.sequence_length)}
            wanted = [a for a in group if a not in out and self.needs(self._number(number, a))]
            baseline = self.results.arms[self._number(number, 0)]
            together = len(group) > 1 and 0 not in out and baseline.failed is None
            if wanted and together and 0 not in wanted:
                wanted = [0, *wanted]
            for arm in wanted:
                if arm not in self.loaded and not self._load(number, arm, places):
                    later += [arm] * self.needs(self._number(number, arm))
            ready = [arm for arm in wanted if arm in self.loaded and self._ready(number, arm)]
            self._cycles(number, ready)
            full |= {
                (arm, place.sequence_length)
                for arm in wanted
                if self.needs(self._number(number, arm))
            }
        for arm in list(self.loaded):
            self.pool.unload(self.loaded.pop(arm))
        return [arm for arm in later if arm]

    # ----------------------------------------------------------------------------------- one cell

    def _load(self, place: int, arm: int, places: Collection[int]) -> bool:
        """Start the arm's process; whether it is loaded. Where that fails for another reason than
        the other arms' memory, all its cells have it."""
        number = self._number(place, arm)
        self._say(f"{self.plan.arms[arm].name}: loading")
        config = self.cells[number].config(self.plan.decode_length)
        least = dataclasses.replace(config, prefill_size=1, batch_size=1)
        try:
            self.pool.start(number, argv(least, said=True))
        except WorkerFailed as error:
            self.pool.unload(number)
            if not (self.loaded and error.kind in SHORT):
                for own in (self._number(place, arm) for place in places):
                    if self.needs(own):
                        self._give_up(own, str(error))
            return False
        self.loaded[arm] = number
        return True

    def _ready(self, place: int, arm: int) -> bool:
        """Get caches and compiled steps for the cell; whether that went well."""
        number = self._number(place, arm)
        own = self.cells[number].place
        sizes = [
            cell.place.batch_size
            for n, cell in enumerate(self.cells)
            if cell.arm == self.cells[number].arm and self.results.arms[n].failed is None
            if cell.place.sequence_length == own.sequence_length
        ]
        given = {"prompt": own.sequence_length, "rows": own.batch_size, "most_rows": max(sizes)}
        facts = self._asked(number, ArmFacts, "cell", new_tokens=self.plan.decode_length, **given)
        if facts is None:
            return False
        facts = dataclasses.replace(facts, estimate=self.pool.expected(facts).figures)
        self.store.add(Ready(number, self.results.arms[number].processes, facts, self.machine))
        return True

    def _cycles(self, place: int, arms: Sequence[int]) -> None:
        """Warm-ups, then cycles of these arms until each has its runs."""
        at, numbers = self.plan.places[place], [self._number(place, arm) for arm in arms]
        what = f"prompts of {at.sequence_length}, batch size {at.batch_size}: "
        what += ", ".join(self.plan.arms[arm].name for arm in arms)
        warmups = self.plan.warmups
        while arms and (warmups > 0 or any(map(self._lacks_runs, numbers))):
            self._say(what)
            number = None if warmups > 0 else self.results.cycles
            self.noise.cycle(self.store, number, numbers, ("prompt", "decode"), self._turn)
            warmups -= 1

    def _lacks_runs(self, number: int) -> bool:
        return number % len(self.plan.arms) in self.loaded and self.needs(number)

    def _turn(self, number: int, cycle: int | None, kind: Kind) -> None:
        if number % len(self.plan.arms) not in self.loaded:
            return
        steps = self.plan.decode_length - 1
        time = self._asked(number, TurnTime, "turn", kind=kind, tokens=steps, each=True)
        if time and cycle is not None:
            process = self.results.arms[number].processes - 1
            self.store.add(Turn(number, process, cycle, kind, **vars(time)))

    # ---------------------------------------------------------------------------------- failures

    def _asked(self, number: int, kind: type[T], do: str, /, **given: object) -> T | None:
        """The worker's answer, within what is left of --timeout; None if it failed."""
        arm = number % len(self.plan.arms)
        worker, taken = self.pool.loaded[self.loaded[arm]], self.seconds.get(number, 0.0)
        expired = threading.Event()

        def end() -> None:
            expired.set()
            worker.kill()

        timer = threading.Timer(max(0.0, (self.timeout or math.inf) - taken), end)
        started = time.monotonic()
        try:
            if self.timeout:
                timer.start()
            return worker.answer(kind, do, **given)
        except WorkerFailed as error:
            self._failed(number, arm, error, expired.is_set())
            return None
        finally:
            timer.cancel()
            self.seconds[number] = taken + time.monotonic() - started

    def _failed(self, number: int, arm: int, error: WorkerFailed, expired: bool) -> None:
        """Give the cell its reason, unless it may do alone."""
        together, own = len(self.loaded) > 1, self.cells[number]
        if error.kind == "dead" or own.place.ranks > 1:  # ranks end for any failure
            self.pool.unload(self.loaded.pop(arm))
        if expired:
            self._give_up(number, f"timed out: it takes longer than --timeout {self.timeout:g} s")
        elif not (together and error.kind in SHORT):
            self._give_up(number, str(error))
            if error.kind == "memory":
                self._give_up_larger(own)

    def _give_up_larger(self, cell: PlannedCell) -> None:
        """The batch size grows until it does not fit."""
        size = cell.place.batch_size
        for number, other in enumerate(self.cells):
            alike = dataclasses.replace(other.place, batch_size=size) == cell.place
            if alike and other.arm == cell.arm and self.needs(number):
                self._give_up(number, f"not tried: batch size {size} is out of memory")

    def _give_up(self, number: int, reason: str) -> None:
        self.store.add(Left(number, reason, failed=True))

    # ---------------------------------------------------------------------------------- progress

    def _say(self, what: str) -> None:
        left, work = sum(map(self.needs, self.wanted)), self._work()
        how_far = f"{len(self.wanted) - left} of {counted(len(self.wanted), 'cell')}"
        if 0 < work < self.total:
            seconds = (time.monotonic() - self.started) * work / (self.total - work)
            how_far += f"; about {duration(seconds)} left"
        self.progress(what, how_far)

    def _work(self) -> float:
        """What is left, in tokens of a prompt."""
        steps = STEP_TOKENS * (self.plan.decode_length - 1)
        places = (self.cells[number].place for number in self.wanted if self.needs(number))
        return sum(place.batch_size * place.sequence_length + steps for place in places)
