"""A session of measuring: cycles of short turns, until the rule of the command has its answer.

    Session(store, rule).run()          # results.ended says why it ended

A cycle is one turn of decoding of every loaded arm, A B C, the next one C B A; every few cycles the
prompt is read, too. States of a shared machine last longer than a cycle, so that they hit all arms,
and what is compared are turns of one cycle. Before each cycle the memory's speed is read and
stored. As many arms as fit are loaded at once, always with the baseline; further groups follow. Two
processes of one arm differ by a percent or two for as long as they live, since their memory lies
elsewhere, so each visit to an arm is a new process.

The rule decides what is enough (compare/stop.py); nothing here knows statistics. Arms that have
several workloads measure one after the other with the same processes: cells of `latency`
(latency/cells.py) are this session, too.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from quantbench import unfinished
from quantbench.bench import process
from quantbench.bench.judging import judge
from quantbench.bench.pool import TURN, Command, DoesNotFit, Pool
from quantbench.bench.store import Ended, Kind, Left, Results, Store
from quantbench.errors import QuantbenchError
from quantbench.progress import Progress, duration
from quantbench.text import counted, joined

MOST_BESIDE = 8  # arms next to the baseline: a cycle has to be shorter than the machine's states
LEAST_CYCLES = 12  # of each process: there is no interval of fewer (stats/sequence.py)
MOST_APART = 4  # cycles between two prompts, at most
MOST_NAMED = 70  # characters of the names of arms, in the line that says what is measured
APART = 20  # turns of an arm that is loaded without the baseline, for lack of memory


class Rule:
    """What is enough; by default `settings.cycles` and `settings.processes`, whatever they show."""

    details = True  # whether quality is of each layer, too

    def out(self, results: Results, arm: int) -> str | None:
        """Why this arm needs no turns, before it is judged or afterwards; else None."""
        return None

    def untimed(self, results: Results) -> Mapping[int, str]:
        """Why arms are not to be timed, once all are judged and none of them is out."""
        return {}

    def wanting(self, results: Results, group: Collection[int], taken: int) -> Collection[int]:
        """Those of the loaded arms that need more cycles of this process, which has had `taken`."""
        return group if taken < (results.settings.cycles or 0) else ()

    def open(self, results: Results) -> Collection[int]:
        """Arms of which another process is needed; none: the answer is known."""
        most = results.settings.processes
        return [n for n, arm in enumerate(results.arms) if not arm.failed and arm.processes < most]

    def next(self, results: Results) -> list[int] | str:
        """What is visited next; or why the session has ended."""
        arms, most = results.arms, results.settings.processes
        if results.baseline.failed is not None:
            return "baseline failed"
        if len(results.alive) < min(2, len(arms)):
            return "nothing to compare"
        alone = len(arms) == 1  # else the baseline is loaded with the others
        able = [
            number
            for number, arm in enumerate(arms)
            if (number or alone) and arm.failed is None and arm.dropped is None
        ]
        waiting = [number for number in able if arms[number].processes == 0]
        waiting = waiting or [number for number in self.open(results) if number in able]
        if not waiting:
            return "answered"
        return [number for number in waiting if arms[number].processes < most] or "processes"


def _since(clock: Callable[[], float], started: float) -> float:
    return clock() - started


class Session(Pool):
    kinds: tuple[Kind, Kind] = ("decode", "prompt")
    warmups = 1  # cycles that do not count: arms that were warm alone settle together
    is_paired = True  # turns are compared with the baseline's, and with the memory's speed

    def __init__(
        self,
        store: Store,
        rule: Rule,
        command: Command = process.COMMAND,
        clock: Callable[[], float] = time.monotonic,
        spent: float = 0.0,
    ) -> None:
        """command: as Pool takes it. spent: seconds of --max_minutes that have passed."""
        super().__init__(store, command)
        self.rule, self.clock = rule, clock
        self.arms = len(self.results.arms)  # of each place: arm `a` of place `p` is p * arms + a
        self.started = clock() - spent
        self.results.resumed = self.results.cycles > 0
        self.results.elapsed = partial(_since, clock, self.started)
        self.judging = 0.0  # seconds
        self.loads, self.loading = 0, 0.0  # seconds
        self.before = 0  # processes that each arm of this visit has had

    def run(self) -> None:
        """Measure until the rule, --max_minutes or Ctrl-C ends the session. Raises
        KeyboardInterrupt where it came before any turn."""
        with tempfile.TemporaryDirectory(prefix="quantbench-") as scratch:
            self.scratch = Path(scratch)
            saved = (self.store.folder or self.scratch) / "arms"
            if self.results.settings.processes > 1:  # else nothing would be read back
                self.saved = saved
            with Progress() as self.progress:
                try:
                    why = self._run()
                except KeyboardInterrupt:
                    why = "interrupted"
                finally:
                    self.close()
                spent = self.clock() - self.started
                self.store.add(Ended(why, spent, self.judging + self.loading))
            if why != "interrupted":  # else --resume takes the quantized arms from there
                self._forget(saved)
            elif not any(arm.turns for arm in self.results.arms):
                raise KeyboardInterrupt

    def _forget(self, saved: Path) -> None:
        """Remove the arms as they were quantized, and nothing else."""
        with contextlib.suppress(OSError, QuantbenchError):
            for number in range(len(self.results.arms)):
                unfinished.remove(saved / str(number))
            saved.rmdir()

    def _run(self) -> str:
        judge(self)
        self._leave_out()
        self.judging = self.clock() - self.started
        visit = max(arm.processes for arm in self.results.arms)
        while not isinstance(waiting := self.rule.next(self.results), str):
            if visit and not self._has_time((), loads=2):  # the baseline's, and one more
                return "max_minutes"
            self._visit(waiting if visit % 2 == 0 else waiting[::-1])
            visit += 1
        return waiting

    def _left(self) -> float:
        """Seconds of --max_minutes that are left."""
        return 60 * self.results.settings.max_minutes - (self.clock() - self.started)

    def _a_load(self) -> float:
        """Seconds that loading an arm took, the mean of this session."""
        return self.loading / self.loads if self.loads else 0.0

    def _visit(self, waiting: list[int]) -> None:
        """Start every one of these arms anew, in groups that share the baseline's process."""
        self.unload(0)
        every = self.arms
        places = [every * place for place in sorted({number // every for number in waiting})]
        self.before = min(self.results.arms[number].processes for number in waiting)
        last = self.before + 1 >= self.results.settings.processes
        waiting = [places[0] + arm for arm in dict.fromkeys(number % every for number in waiting)]
        arms, done = len(waiting), 0
        while waiting:
            if not self._load(places[0], "") and isinstance(self.rule.next(self.results), str):
                return
            group: list[int] = []
            while waiting and len(group) < MOST_BESIDE and self._may_load(group):
                done += 1
                try:
                    left = duration(min(self._left(), self._a_load() * (arms - done + 1)))
                    where = f"arm {done} of {arms}" + f"; about {left} to load" * (done > 1)
                    if self._load(waiting[0], where):
                        group.append(waiting[0])
                except DoesNotFit as reason:
                    done -= 1
                    if group:
                        break  # the next group has this arm
                    self._alone(waiting[0], str(reason))
                waiting.pop(0)
            if group:
                seconds = self._left() / (1 + (not last) + len(waiting) / MOST_BESIDE)
                for place in places:
                    numbers = [place + number % every for number in group]
                    self._cycles([place, *numbers], numbers, seconds)
            self.unload_all({0}.difference(group))
            if self._left() <= 0 or not (group or self._may_load(())):
                return

    def _leave_out(self) -> None:
        """Note the arms that are not to be timed, now that all are judged."""
        results = self.results
        for number, arm in enumerate(results.arms):
            is_open = number and arm.failed is None and arm.dropped is None
            if is_open and (why := self.rule.out(results, number)):
                self.store.add(Left(number, why))
        for number, why in self.rule.untimed(results).items():
            self.store.add(Left(number, why))

    def leaves_out(self, number: int) -> bool:
        """Whether the arm is not to be loaded."""
        return self.results.arms[number].failed is not None

    def _may_load(self, group: Sequence[int]) -> bool:
        """Whether to load one more arm: where nothing was measured yet, the first of a group
        whatever time is left."""
        nothing = not group and not any(arm.turns for arm in self.results.arms[1:])
        return nothing or self._has_time(group)

    def _has_time(self, group: Sequence[int], loads: int = 1) -> bool:
        """Whether there is time to load more arms and take the cycles that an interval needs, of
        which some have a prompt."""
        arms = 0, *group
        prompts = -(-LEAST_CYCLES // self._apart_cycles(arms)) * sum(map(self._prompt, arms))
        cycles = LEAST_CYCLES * TURN * len(arms) + prompts
        return self._left() > loads * self._a_load() + cycles

    def _load(self, number: int, where: str) -> bool:
        """Whether the arm is loaded now, and is not ruled out. Raises DoesNotFit."""
        if number in self.loaded or self.leaves_out(number):
            return number in self.loaded
        self._announce(number, where)
        started = self.clock()
        try:
            self.load(number)
        finally:
            self.loads, self.loading = self.loads + 1, self.loading + self.clock() - started
        return number in self.loaded

    def _announce(self, number: int, where: str) -> None:
        name = self.results.arms[number].name
        if self.before:  # one line for all arms: a line each reads as if everything were repeated
            which = "a second" if self.before == 1 else "another"
            what = f"checking with {which} process of each arm: loading"
        else:
            what = f"loading arms{process.building()}"
        self.progress(what, ", ".join(filter(None, (name, where))))

    def _measuring(self, numbers: Sequence[int], cycle: int) -> None:
        listed = joined([self.results.arms[number].name for number in numbers])
        named = listed if len(listed) <= MOST_NAMED else counted(len(numbers), "arm")
        self.progress(f"measuring {named}", f"cycle {cycle}")

    # ----------------------------------------------------------------------------------- cycles

    def _cycles(self, every: Sequence[int], group: Sequence[int], seconds: float) -> None:
        """Cycles of `every` until the rule has enough of `group`, which are all or all but the
        baseline."""
        baseline, every = every[0], self.ready(list(dict.fromkeys(every)))
        wanting: Collection[int] = [number for number in group if number in every]
        if not wanting or (self.is_paired and baseline not in every):
            return
        for _ in range(self.warmups):
            self._measuring(every, 1)
            self._cycle(every, None, self.kinds)
        fixed = self.results.settings.cycles is not None
        ends = self.clock() + (self._left() if fixed else seconds)
        taken, asked, least = 0, 0, 1 if fixed else LEAST_CYCLES
        before = max(len(self.results.turns(n, "decode")) for n in wanting)
        prompts = self._apart_cycles(every)
        while wanting and (baseline in self.loaded or not self.is_paired):
            self._measuring(every, taken + 1)
            order = [n for n in every if n == baseline or n in wanting]
            number = self.results.cycles
            if self.is_paired:
                self.probe(number, order)
            kinds = [k for k in self.kinds if k == "decode" or taken % prompts == 0]
            self._cycle(order, number, kinds)
            taken += 1
            wanting = [n for n in wanting if n in self.loaded]
            if taken >= least and self.clock() > ends:
                break
            # Statistics take the time of turns, so only a tenth more turns ask the rule again.
            if fixed or taken >= max(LEAST_CYCLES, asked + (before + taken) / 10):
                wanting, asked = self.rule.wanting(self.results, wanting, taken), taken

    def _cycle(self, arms: Sequence[int], number: int | None, kinds: Sequence[Kind]) -> None:
        """A turn of each kind of every arm, A B C, and C B A in odd cycles; the next two begin with
        B, so that no arm has a place of its own, as after the memory's reading. Every cycle counts:
        a rule that repeats disturbed cycles keeps those whose disturbance it did not see, which are
        not alike for all places in the order. number: None for a cycle that only warms up."""
        first = (number or 0) // 2 % len(arms)
        order = [*arms[first:], *arms[:first]][:: -1 if (number or 0) % 2 else 1]
        for kind in kinds:
            for arm in order:
                self.turn(arm, number, kind)

    def _apart_cycles(self, arms: Sequence[int]) -> int:
        """Cycles from one prompt to the next: a prompt takes as long as the turns between."""
        prompt = max(map(self._prompt, arms))
        return max(1, min(MOST_APART, round(prompt / TURN)))

    def _prompt(self, number: int) -> float:
        """Seconds of the arm's prompt, where they are known."""
        return self.prompt_seconds.get(number, 0.0)

    def _alone(self, number: int, reason: str) -> None:
        """Turns of an arm that does not fit beside the baseline: the baseline's, its own, and the
        baseline's again are one cycle."""
        self.progress.say(f"{reason}: each is loaded alone")
        cycle = self.results.cycles
        for arm in (0, number, 0):
            self.unload_all({arm})
            if self._load(arm, ""):
                self.probe(cycle, [arm])
                for turn in range(APART):
                    self.turn(arm, cycle, "decode")
                    if turn % MOST_APART == 0:
                        self.turn(arm, cycle, "prompt")
