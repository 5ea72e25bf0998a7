"""The session of `latency`: every cell of a plan (latency/cell_plan.py) that has no figures yet.

    Cells(store, plan, timeout=None).run()      # results.ended says how it ended

It is a Session whose arms have several workloads. All arms of a model and a number of ranks are
loaded, as many as fit with the first one. In each place they take `runs` cycles: a prompt of every
arm, A B C, then the decoding steps of every arm; the next cycle is C B A. So what is compared was
measured within seconds. What goes wrong with a cell is that cell's reason. A cell that does not fit
into memory with the others is measured alone, after them.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Collection, Sequence
from typing import TypeVar

from quantbench.bench import process
from quantbench.bench.answers import ArmFacts
from quantbench.bench.pool import Command, DoesNotFit
from quantbench.bench.process import WorkerFailed
from quantbench.bench.session import Rule, Session
from quantbench.bench.store import ArmResult, Kind, Left, Results, Settings, Started, Store
from quantbench.latency.cell_plan import CellPlan
from quantbench.log.config import argv
from quantbench.progress import duration
from quantbench.text import counted
from quantbench.typed_json import to_json

STEP_TOKENS = 32  # a decoding step takes about as long as this many tokens of a prompt
SHORT = ("memory", "dead")  # kinds of failures that the other arms' memory may have caused
UNLIMITED = 1e9  # minutes
T = TypeVar("T")


def begin(plan: CellPlan) -> Results:
    """Results without a measurement; the arm of number n is plan.cells[n]."""
    arms = [
        ArmResult(cell.name, cell.arm.text, argv(cell.config(plan.decode_length), said=True))
        for cell in plan.cells
    ]
    settings = Settings(processes=1, cycles=plan.runs, tokens=0, max_minutes=UNLIMITED)
    results = Results.begin(settings, arms, "none")
    results.plan = to_json(plan)
    return results


def left(results: Results, numbers: Collection[int] | None = None) -> list[int]:
    """The cells of these that have neither all runs nor a reason; None: of all."""
    runs = results.settings.cycles or 0
    return [
        n
        for n in (range(len(results.arms)) if numbers is None else numbers)
        if results.arms[n].failed is None and len(results.turns(n, "decode")) < runs
    ]


class Runs(Rule):
    """Every cell has its runs, or a reason."""

    def __init__(self, plan: CellPlan) -> None:
        self.models = [(cell.model, cell.ranks) for cell in plan.cells]

    def wanting(self, results: Results, group: Collection[int], taken: int) -> Collection[int]:
        return left(results, group)

    def next(self, results: Results) -> list[int] | str:
        """The cells that are left of the first model and number of ranks."""
        waiting = left(results)
        first = [n for n in waiting if self.models[n] == self.models[waiting[0]]]
        return first or "complete"


class Cells(Session):
    kinds: tuple[Kind, Kind] = ("prompt", "decode")
    is_paired = False
    of_turns = {"each": True}

    def __init__(
        self,
        store: Store,
        plan: CellPlan,
        timeout: float | None = None,
        command: Command = process.COMMAND,
        machine: str | None = None,
    ) -> None:
        """timeout: seconds after which a cell is given up. machine: where it is not meta.json's."""
        super().__init__(store, Runs(plan), command)
        self.plan, self.cells, self.arms = plan, plan.cells, len(plan.arms)
        self.warmups, self.timeout, self.machine = plan.warmups, timeout, machine
        self.total = self._work()
        self.steps = dict.fromkeys(range(len(self.cells)), plan.decode_length - 1)
        self.seconds: dict[int, float] = {}  # that cells took
        self.short: set[int] = set()  # cells that did not fit with other arms

    def _visit(self, waiting: list[int]) -> None:
        super()._visit(sorted(waiting))
        for arm in range(self.arms):  # what did not fit with the others
            self.unload_all()
            for number in left(self.results, [n for n in waiting if n % self.arms == arm]):
                self._cycles([number], [number], math.inf)

    def _alone(self, number: int, reason: str) -> None:
        """An arm for whose model and the baseline memory is too short has no pairs: `_visit`."""

    def _announce(self, number: int, where: str) -> None:
        self._say(f"{self.cells[number].arm.name}: loading")

    def _measuring(self, numbers: Sequence[int], cycle: int) -> None:
        cell = self.cells[numbers[0]]
        names = ", ".join(self.cells[number].arm.name for number in numbers)
        self._say(f"prompts of {cell.sequence_length}, batch size {cell.batch_size}: {names}")

    def _say(self, what: str) -> None:
        cells, work = len(self.cells), self._work()
        how_far = f"{cells - len(left(self.results))} of {counted(cells, 'cell')}"
        if 0 < work < self.total:
            seconds = (self.clock() - self.started) * work / (self.total - work)
            how_far += f"; about {duration(seconds)} left"
        self.progress(what, how_far)

    def _work(self) -> float:
        """What is left, in tokens of a prompt."""
        steps = STEP_TOKENS * (self.plan.decode_length - 1)
        cells = (self.cells[number] for number in left(self.results))
        return sum(cell.batch_size * cell.sequence_length + steps for cell in cells)

    # ------------------------------------------------------------------------------ processes

    def leaves_out(self, number: int) -> bool:
        return all(self.results.arms[other].failed is not None for other in self._alike(number))

    def load(self, number: int) -> None:
        """Start the arm's process. Where that fails for another reason than the other arms' memory,
        all its cells have it."""
        least = dataclasses.replace(self.results.arms[number].config, prefill_size=1, batch_size=1)
        try:
            self.start(number, argv(least, said=True))
        except WorkerFailed as error:
            self.unload(number)
            if self.loaded and error.kind in SHORT:
                raise DoesNotFit(str(error)) from None
            self._give_up(self._alike(number), str(error))

    def ready(self, numbers: list[int]) -> list[int]:
        """The cells that are left, and the baseline's, with caches and compiled steps for them."""
        wanted = left(self.results, numbers)
        if wanted and self.results.arms[numbers[0]].failed is None:
            wanted = [numbers[0], *(number for number in wanted if number != numbers[0])]
        return [number for number in wanted if self._is_ready(number, len(numbers) > 1)]

    def _is_ready(self, number: int, together: bool) -> bool:
        sizes = self._alike(number, "batch_size")
        if together and not self.short.isdisjoint(sizes):
            return False  # a larger batch does not fit with the others, either
        self.short.discard(number)
        try:
            if loaded := self.loaded.keys() & self._alike(number):
                self.loaded[number] = self.loaded.pop(loaded.pop())
            else:
                self.load(number)
        except DoesNotFit:
            self.short.add(number)
        if number not in self.loaded:
            return False
        cell, results = self.cells[number], self.results
        most = max(self.cells[n].batch_size for n in sizes if results.arms[n].failed is None)
        given = {"prompt": cell.sequence_length, "rows": cell.batch_size, "most_rows": most}
        new_tokens = self.plan.decode_length
        facts = self.asked(number, ArmFacts, "cell", new_tokens=new_tokens, **given)
        if facts is None:
            return False
        self.store.add(Started(number, results.arms[number].processes, facts, self.machine))
        return True

    def turn(self, number: int, cycle: int | None, kind: Kind) -> None:
        if self.results.arms[number].failed is None:
            super().turn(number, cycle, kind)
        if number in self.short:  # else it would be asked again
            self.unload(number)

    def asked(self, number: int, kind: type[T], do: str, /, **given: object) -> T | None:
        """The answer, within what is left of --timeout; None if the process failed."""
        started, taken = time.monotonic(), self.seconds.get(number, 0.0)
        rest = max(0.0, (self.timeout or math.inf) - taken)
        timer, self.deadline = threading.Timer(rest, self.loaded[number].kill), started + rest
        try:
            if self.timeout:
                timer.start()
            return super().asked(number, kind, do, **given)
        finally:
            timer.cancel()
            self.seconds[number] = taken + time.monotonic() - started

    def fail(self, number: int, error: WorkerFailed) -> None:
        """Give the cell its reason, unless it may do alone."""
        together, cell = len(self.loaded) > 1, self.cells[number]
        if error.kind == "dead" or cell.ranks > 1:  # ranks end for any failure
            self.unload(number)
        if time.monotonic() >= self.deadline:
            why = f"timed out: it takes longer than --timeout {self.timeout:g} s"
            self._give_up([number], why)
        elif together and error.kind in SHORT:
            self.short.add(number)
        else:
            self._give_up([number], str(error))
            if error.kind == "memory":
                why = f"not tried: batch size {cell.batch_size} is out of memory"
                self._give_up(self._alike(number, "batch_size"), why)

    def _give_up(self, numbers: Collection[int], reason: str) -> None:
        for number in left(self.results, numbers):
            self.store.add(Left(number, reason, failed=True))

    def _alike(self, number: int, *but: str) -> list[int]:
        """Cells of the same arm, model and ranks, which may differ in the batch size and the
        prompt; or if `but` is given in that alone."""
        own = self.cells[number]
        given = {name: getattr(own, name) for name in but or ("batch_size", "sequence_length")}
        cells = enumerate(self.cells)
        return [n for n, cell in cells if dataclasses.replace(cell, **given) == own]
