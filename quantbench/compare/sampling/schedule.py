"""When a comparison looks at what it has, what it sees, and when it is over.

    schedule = Schedule(results, say)
    while (blocks := schedule.target()) is not None:
        …                                       # run until there are this many blocks
        schedule.look()
    results.ended = schedule.why_ended()

figures/plan.py has the rules; this applies them to the samples that there are, and to the budget.
"""

from collections.abc import Callable

from quantbench.answer.interval import Ratio
from quantbench.compare.figures import timings
from quantbench.compare.figures.contrasts import Fit, fit
from quantbench.compare.figures.families import Verdict, against_best
from quantbench.compare.figures.plan import Plan, arms_to_drop, settled_arms
from quantbench.compare.sampling.results import MOST_BESIDE, Results

PROCESSES, PROCESSES_OF_MANY = 16, 2  # of each arm, at most
VERDICTS: tuple[Verdict, ...] = ("faster", "slower", "no difference shown")


class Schedule:
    """When to look at what was measured, and when to stop.

    `results` stores all decisions and looks, so that --resume can go on.
    """

    def __init__(self, results: Results, say: Callable[[str], None], extend: bool = False) -> None:
        """extend: go on after the end of the plan, as far as the settings allow by now"""
        self.results, self.settings, self.say = results, results.settings, say
        self.extend = extend

    def target(self) -> int | None:
        """After how many blocks in all to look next; None where the run is over."""
        results = self.results
        if results.plan is None:
            most = self.most_processes()
            return most if self.settings.fixed else min(most, self.first_look())
        if self.settings.fixed:
            return results.plan.most_blocks if results.blocks < results.plan.most_blocks else None
        fitted = self._fitted()
        if fitted is None:
            return None
        target = results.plan.next_blocks(results.looks, fitted)
        if target is None or results.blocks >= results.plan.most_blocks:
            return self._extension(fitted)
        if results.blocks >= self.most_processes():  # fewer than when it was begun
            self.interrupted()
            return None
        return min(target, self.most_processes())

    def first_look(self) -> int:
        """After how many blocks to look first, while it is not known how long a block takes."""
        return Plan(max(1, len(self.results.running) - 1), PROCESSES).first_blocks

    def make_plan(self) -> Plan:
        """The plan, made after the first block: its blocks fill the budget."""
        candidates = max(1, len(self.results.running) - 1)
        return Plan(candidates, self._most_blocks(), self.settings.precision)

    def _most_blocks(self) -> int:
        """How many blocks the time allows."""
        return self.affordable(self.results.measuring_seconds / max(1, self.results.blocks))

    def affordable(self, each: float) -> int:
        """How many blocks of so many seconds of measuring the time allows: an even number from two
        on, since arms are loaded in one order and then in the other."""
        most = self.most_processes()
        allowed = max(1, int(60 * self.settings.max_minutes / each)) if each else most
        return most if allowed >= most else max(1, allowed - allowed % 2)

    def most_processes(self) -> int:
        many = len(self.results.alive) > MOST_BESIDE
        return self.settings.processes or (PROCESSES_OF_MANY if many else PROCESSES)

    def is_over_budget(self) -> bool:
        return self.results.measuring_seconds > 60 * self.settings.max_minutes

    def _extension(self, fitted: Fit) -> int | None:
        """Blocks in all after which an ended run that a person extends is looked at again."""
        results, precision = self.results, self.settings.precision
        if not self.extend or results.plan is None:
            return None
        self.extend = False
        allowed = self._most_blocks()
        settled = settled_arms(results.looks, precision)
        numbers = [number for number in self.results.numbers if number and number in fitted.arms]
        open_arms = [number for number in numbers if number not in settled]
        if not open_arms or allowed <= results.blocks:
            return None
        size = Plan(results.plan.candidates, allowed, precision).size(fitted, open_arms)
        return min(max(size, results.blocks + 2), allowed)

    def _fitted(self) -> Fit | None:
        """The statistics of all blocks; None without a measured arm and baseline."""
        values = timings.of(self.results)
        return fit(values) if values.arms and len(values.values) else None

    def look(self) -> None:
        """Look at all blocks so far, and drop arms that need no more of them."""
        results, fitted = self.results, self._fitted()
        if fitted is None:
            return
        plan = results.plan or self.make_plan()
        results.looks.append(plan.look(results.looks, fitted))
        best = against_best(fitted, results.looks[-1].level)
        for number in arms_to_drop(results.looks, best, plan.precision):
            results.arms[number].dropped = bool(number)
        self.say(self._seen())

    def interrupted(self) -> None:
        """Take the look that a person chose by interrupting, unless no block came since."""
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

    def why_ended(self) -> str:
        results = self.results
        settled = settled_arms(results.looks, self.settings.precision)
        if results.looks and all(number in settled for number in self.results.numbers if number):
            return "precise"
        return "processes" if results.blocks >= self.most_processes() else "max_minutes"
