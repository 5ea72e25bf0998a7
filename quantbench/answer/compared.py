"""What the statistics say of a session's turns: each arm against the baseline, and the fastest.

    found = Compared(results)
    found.decode[1]         # seconds of a decoding step, arm ÷ baseline, with its interval
    found.whole[1]          # of a run with this prompt and so many new tokens
    found.best({0, 1, 4})   # those that may be the fastest of them

A whole run is what the arms were asked for: P prompt tokens, then N new ones. Each of its
observations is a prompt and the decoding between it and the next one. Verdicts are about it.
"""

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quantbench import stats
from quantbench.bench.store import Results, Turn
from quantbench.stats import Floor, Interval, Turns

CONFIDENCE = 0.95  # of all intervals of one kind together, at any time


@dataclass(frozen=True)
class Compared:
    """Intervals by the arm's number; none of the baseline, 0. Each kind is computed when it is
    first read: the stop rule reads `whole` alone."""

    results: Results

    @cached_property
    def decode(self) -> Mapping[int, Interval]:
        return _intervals(self._turns(lambda number: self.results.turns(number, "decode")))

    @cached_property
    def prompt(self) -> Mapping[int, Interval]:
        return _intervals(self._turns(lambda number: self.results.turns(number, "prompt")))

    @cached_property
    def whole(self) -> Mapping[int, Interval]:
        return _intervals(self.turns)

    @cached_property
    def turns(self) -> Mapping[int, Turns]:
        """Whole runs."""
        return self._turns(lambda number: whole_runs(self.results, number))

    def _turns(self, of_arm: Callable[[int], Collection[Turn]]) -> Mapping[int, Turns]:
        found = {number: turns_of(of_arm(number)) for number in range(len(self.results.arms))}
        return {number: turns for number, turns in found.items() if turns is not None}

    def best(self, among: Collection[int]) -> set[int]:
        """Those that may be the fastest whole run of them; all where nothing was compared."""
        able = {n for n in among if n in self.turns}
        if 0 not in self.turns or len(able) < 2:
            return set(among)
        others = {n: turns for n, turns in self.turns.items() if n}
        return stats.best(self.turns[0], others, Floor(), able, 1 - CONFIDENCE)


def _intervals(turns: Mapping[int, Turns]) -> Mapping[int, Interval]:
    others = {n: one for n, one in turns.items() if n}
    if 0 not in turns or not others:
        return {}
    return stats.intervals(turns[0], others, Floor(), 1 - CONFIDENCE)


def turns_of(turns: Collection[Turn]) -> Turns | None:
    """Seconds per token; of an arm's turns in one cycle, the mean. None without any."""
    by_cycle: dict[int, list[Turn]] = {}
    for turn in turns:
        by_cycle.setdefault(turn.cycle, []).append(turn)
    if not by_cycle:
        return None
    cycles = sorted(by_cycle)
    seconds = [
        statistics.fmean(turn.seconds / turn.tokens for turn in by_cycle[cycle]) for cycle in cycles
    ]
    processes = [by_cycle[cycle][0].process for cycle in cycles]
    return Turns(np.array(cycles), np.array(processes), np.array(seconds))


def whole_runs(results: Results, number: int) -> list[Turn]:
    """For each prompt the seconds of a run: the prompt's, and its new tokens' at the mean speed of
    the turns until the next prompt. As a turn of `max_new_tokens` tokens, like in the log."""
    arm = results.arms[number]
    prompts, steps = results.turns(number, "prompt"), results.turns(number, "decode")
    run = arm.facts.run if arm.facts else None
    new = run.config.max_new_tokens if run else 1 + max((turn.tokens for turn in steps), default=0)
    if not prompts:
        return steps
    runs, place = [], 0
    for prompt, following in zip(prompts, [*prompts[1:], None], strict=True):
        own = []
        while place < len(steps) and (following is None or steps[place].cycle < following.cycle):
            if steps[place].process == prompt.process and steps[place].cycle >= prompt.cycle:
                own.append(steps[place])
            place += 1
        if new > 1 and not own:
            continue
        step = sum(t.seconds for t in own) / sum(t.tokens for t in own) if own else 0.0
        seconds = prompt.seconds + (new - 1) * step
        runs.append(Turn(number, prompt.process, prompt.cycle, "prompt", new, seconds))
    return runs
