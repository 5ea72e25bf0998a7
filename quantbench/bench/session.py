"""A session of measuring: cycles of short turns, until the rule of the command has its answer.

    Session(store, rule).run()          # results.ended says why it ended

A cycle is one turn of decoding of every loaded arm, A B C, the next one C B A; every few cycles the
prompt is read, too. States of a shared machine last longer than a cycle, so that they hit all arms,
and what is compared are turns of one cycle. As many arms as fit are loaded at once, always with the
baseline; further groups follow. Two processes of one arm differ by a percent or two for as long as
they live, since their memory lies elsewhere, so each visit to an arm is a new process.

The rule decides what is enough (answer/stop.py); nothing here knows statistics.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quantbench import files
from quantbench.bench import process
from quantbench.bench.noise import Noise
from quantbench.bench.pool import TURN, Command, DoesNotFit, Pool
from quantbench.bench.store import Ended, Repeated, Results, Store
from quantbench.progress import Progress, duration

MOST_BESIDE = 8  # arms beside the baseline: a cycle has to be shorter than the machine's states
LEAST_CYCLES = 12  # of each process: there is no interval of fewer (stats/sequence.py)
MOST_APART = 4  # cycles between two prompts, at most
APART = 20  # turns of an arm that is loaded without the baseline, which does not fit beside it


class Rule(Protocol):
    """What is enough."""

    def out(self, results: Results, arm: int) -> str | None:
        """Why this arm needs no turns, before it is loaded or once it is scored; else None."""

    def wanting(self, results: Results, group: Collection[int], taken: int) -> Collection[int]:
        """Those of the loaded arms that need more cycles of this process, which has had `taken`."""

    def open(self, results: Results) -> Collection[int]:
        """Arms of which another process is needed; none: the answer is known."""


@dataclass(frozen=True)
class Fixed:
    """So many cycles of each process, and so many processes, whatever they show."""

    cycles: int
    processes: int

    def out(self, results: Results, arm: int) -> str | None:
        return None

    def wanting(self, results: Results, group: Collection[int], taken: int) -> Collection[int]:
        return group if taken < self.cycles else ()

    def open(self, results: Results) -> Collection[int]:
        arms = enumerate(results.arms)
        return [n for n, arm in arms if not arm.failed and arm.processes < self.processes]


class Session:
    def __init__(
        self,
        store: Store,
        rule: Rule,
        command: Command = process.COMMAND,
        probe: bool = False,
        has_turns: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        command: as Pool takes it; has_turns, too
        probe: read the memory's bandwidth before every cycle, not once for each group
        """
        self.store, self.results, self.rule = store, store.results, rule
        self.command, self.probe, self.has_turns, self.clock = command, probe, has_turns, clock
        self.noise = Noise()
        self.started = clock()
        self.loads, self.loading = 0, 0.0  # seconds
        self.before = 0  # processes that each arm of this visit has had
        self.pool: Pool
        self.progress: Progress

    def run(self) -> None:
        """Measure until the rule, --max_minutes or Ctrl-C ends it. What was measured is kept."""
        results = self.results
        with tempfile.TemporaryDirectory(prefix="quantbench-") as scratch:
            saved = self.store.folder / "arms" if self.store.folder else Path(scratch, "arms")
            with Progress() as self.progress:
                say = self.progress.say
                once = results.settings.processes == 1  # then nothing would be read back
                given = (self.command, None if once else saved, self.has_turns, self.rule.out)
                self.pool = Pool(self.store, Path(scratch), say, *given)
                try:
                    why = self._run()
                except KeyboardInterrupt:
                    why = "interrupted"
                finally:
                    self.pool.close()
                self.store.add(Ended(why, self.clock() - self.started))
            if why != "interrupted":  # else --resume takes the quantized arms from there
                shutil.rmtree(saved, ignore_errors=True)

    def _run(self) -> str:
        results, most = self.results, self.results.settings.processes
        visit = max(arm.processes for arm in results.arms)
        while True:
            if results.baseline.failed is not None:
                return "baseline failed"
            if len(results.alive) < min(2, len(results.arms)):
                return "nothing to compare"
            waiting = [n for n in self._measurable() if results.arms[n].processes == 0]
            waiting = waiting or [n for n in self.rule.open(results) if n in self._measurable()]
            if not waiting:
                return "answered"
            waiting = [n for n in waiting if results.arms[n].processes < most]
            if not waiting:
                return "processes"
            if visit and self._left() <= 2 * self._a_load():  # the baseline's, and one more
                return "max_minutes"
            self._visit(waiting if visit % 2 == 0 else waiting[::-1])
            visit += 1

    def _measurable(self) -> list[int]:
        """The arms beside the baseline; without any, the baseline."""
        arms, alone = enumerate(self.results.arms), len(self.results.arms) == 1
        return [n for n, a in arms if (n or alone) and a.failed is None and a.dropped is None]

    def _left(self) -> float:
        """Seconds of --max_minutes that are left."""
        return 60 * self.results.settings.max_minutes - (self.clock() - self.started)

    def _a_load(self) -> float:
        """Seconds that loading an arm took, the mean of this session."""
        return self.loading / self.loads if self.loads else 0.0

    def _visit(self, waiting: list[int]) -> None:
        """Start every one of these arms anew, in groups that share the baseline's process."""
        self.pool.unload(0)
        arms, done = len(waiting), 0
        self.before = min(self.results.arms[number].processes for number in waiting)
        last = self.before + 1 >= self.results.settings.processes
        while waiting and self.results.baseline.failed is None:
            if not self._load(0, ""):
                return
            group: list[int] = []
            while waiting and len(group) < MOST_BESIDE and (not group or self._has_time(group)):
                done += 1
                try:
                    left = duration(min(self._left(), self._a_load() * (arms - done + 1)))
                    where = f"arm {done} of {arms}" + f"; about {left} to load" * (done > 1)
                    if self._load(waiting[0], where):
                        group.append(waiting[0])
                except DoesNotFit as reason:
                    done -= 1
                    if group:
                        break  # it comes with the next ones
                    self._apart(waiting[0], str(reason))
                waiting.pop(0)
            if group:
                self._cycles(group, self._left() / (1 + (not last) + len(waiting) / MOST_BESIDE))
            for number in group:
                self.pool.unload(number)
            if self._left() <= 0:
                return

    def _has_time(self, group: Sequence[int]) -> bool:
        """Whether there is time to load one more arm and take the cycles that an interval needs."""
        cycle = sum(TURN + self.pool.prompt_seconds.get(n, 0.0) for n in (0, *group))
        return self._left() > self._a_load() + LEAST_CYCLES * cycle

    def _load(self, number: int, where: str) -> bool:
        """Whether the arm is loaded now, and is not ruled out. Raises DoesNotFit."""
        if number in self.pool.loaded:
            return True
        if self.pool.leaves_out(number):
            return False
        name = self.results.arms[number].name
        if self.before:  # one line for all arms: a line each reads as if everything were repeated
            process = "a second" if self.before == 1 else "another"
            where = ", ".join(filter(None, (name, where)))
            self.progress(f"checking with {process} process of each arm: loading", where)
        else:
            kernels = ", and building the C++ kernels (once, about a minute)"
            builds = not self.loads and not any(files.cache_folder().glob("kernels-*.so"))
            self.progress(f"{name}: loading{kernels * builds}", where)
        started = self.clock()
        try:
            self.pool.load(number)
        finally:
            self.loads, self.loading = self.loads + 1, self.loading + self.clock() - started
        return number in self.pool.loaded

    # ----------------------------------------------------------------------------------- cycles

    def _cycles(self, group: Sequence[int], seconds: float) -> None:
        """Cycles of the baseline and these arms until the rule has enough of them."""
        every = list(dict.fromkeys([0, *group]))
        if not self.probe:
            self.pool.probe(self.results.cycles, every)
        self._cycle(every, None, prompts=True)  # arms that were warm alone settle together
        fixed = self.results.settings.cycles is not None
        ends = self.clock() + (self._left() if fixed else seconds)
        taken, asked, least = 0, 0, 1 if fixed else LEAST_CYCLES
        before = max(len(self.results.turns(n, "decode")) for n in group)
        wanting: Collection[int] = group
        names = ", ".join(self.results.arms[n].name for n in every)
        while wanting and 0 in self.pool.loaded:
            self.progress(f"measuring {names}", f"cycle {taken + 1}")
            order = [n for n in every if n == 0 or n in wanting]
            number = self.results.cycles
            if self.probe:
                self.pool.probe(number, order)
            if self._cycle(order, number, prompts=taken % self._apart_cycles(group) == 0):
                taken += 1
            wanting = [n for n in wanting if n in self.pool.loaded]
            if taken >= least and self.clock() > ends:
                break
            # Statistics take time that turns could have: the rule is asked after a tenth more.
            if fixed or taken >= max(LEAST_CYCLES, asked + (before + taken) / 10):
                wanting, asked = self.rule.wanting(self.results, wanting, taken), taken

    def _cycle(self, order: Sequence[int], number: int | None, prompts: bool) -> bool:
        """A turn of each; whether it counts."""
        before = self.noise.read()
        turns = order if not number or number % 2 == 0 else order[::-1]
        for arm in turns:
            self.pool.turn(arm, number, "decode")
        if prompts:
            for arm in turns:
                self.pool.turn(arm, number, "prompt")
        if number is not None and self.noise.moved(before, self.noise.read()):
            self.store.add(Repeated(number))
            return False
        return True

    def _apart_cycles(self, group: Sequence[int]) -> int:
        """Cycles from one prompt to the next: a prompt takes as long as the turns between."""
        prompt = max(self.pool.prompt_seconds.get(n, 0.0) for n in (0, *group))
        return max(1, min(MOST_APART, round(prompt / TURN)))

    def _apart(self, number: int, reason: str) -> None:
        """Turns of an arm that does not fit beside the baseline: the baseline's, its own, and the
        baseline's again are one cycle."""
        self.progress.say(f"{reason}: each is loaded alone")
        cycle = self.results.cycles
        for arm in (0, number, 0):
            for other in set(self.pool.loaded) - {arm}:
                self.pool.unload(other)
            if self._load(arm, ""):
                self.pool.probe(cycle, [arm])
                for turn in range(APART):
                    self.pool.turn(arm, cycle, "decode")
                    if turn % MOST_APART == 0:
                        self.pool.turn(arm, cycle, "prompt")
