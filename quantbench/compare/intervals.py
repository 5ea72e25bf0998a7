"""What the statistics say of a session's turns: each arm against the baseline, and the fastest.

    found = Compared(results)
    found.decode[1]         # seconds of a decoding step, arm ÷ baseline, with its interval
    found.whole[1]          # of a whole run: a prompt and its new tokens
    found.best({0, 1, 4})   # those that may be the fastest of them

A whole run is what the arms were asked for: P prompt tokens, then N new ones. Each of its
observations is a prompt and the decoding between it and the next one. Verdicts are about it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantbench import stats
from quantbench.bench.store import Results, Turn
from quantbench.stats import Floor, Interval, Turns

CONFIDENCE = 0.95  # of all intervals of one kind together


@dataclass(frozen=True)
class Compared:
    """Intervals by the arm's number; none of the baseline, 0. Each kind is computed when it is
    first read: the stop rule reads `whole` alone."""

    results: Results

    @cached_property
    def decode(self) -> Mapping[int, Interval]:
        return self._intervals(self._turns(lambda n: turns_of(self.results.turns(n, "decode"))))

    @cached_property
    def prompt(self) -> Mapping[int, Interval]:
        return self._intervals(self._turns(lambda n: turns_of(self.results.turns(n, "prompt"))))

    @cached_property
    def whole(self) -> Mapping[int, Interval]:
        return self._intervals(self.turns)

    @cached_property
    def turns(self) -> Mapping[int, Turns]:
        """Whole runs."""
        return self._turns(lambda n: whole_runs(self.results, n))

    def _turns(self, of_arm: Callable[[int], Turns | None]) -> Mapping[int, Turns]:
        found = {number: of_arm(number) for number in range(len(self.results.arms))}
        return {number: turns for number, turns in found.items() if turns is not None}

    def best(self, among: Collection[int]) -> set[int]:
        """Those that may be the fastest whole run of them; all where nothing was compared."""
        able = {n for n in among if n in self.turns}
        if 0 not in self.turns or len(able) < 2:
            return set(among)
        others = {n: turns for n, turns in self.turns.items() if n}
        return stats.best(self.turns[0], others, self.floor, able, 1 - CONFIDENCE, self.spent)

    @property
    def floor(self) -> Floor:
        """What processes differ by, as it was known when the session began."""
        return self.results.settings.floor or Floor()

    @cached_property
    def spent(self) -> float | None:
        """How much of the session is over, up to 1; None for one that goes on after its end."""
        results = self.results
        if results.settings.cycles:  # whatever the figures show
            return 1.0
        running = results.elapsed and results.elapsed()
        seconds = results.end.seconds if results.end else running
        if results.resumed or seconds is None:
            return None
        return min(1.0, seconds / (60 * results.settings.max_minutes))

    def _intervals(self, turns: Mapping[int, Turns]) -> Mapping[int, Interval]:
        others = {n: one for n, one in turns.items() if n}
        if 0 not in turns or not others:
            return {}
        return stats.intervals(turns[0], others, self.floor, 1 - CONFIDENCE, self.spent)


def turns_of(turns: Collection[Turn]) -> Turns | None:
    """Seconds per token; of an arm's turns in one cycle, the mean. None without any."""
    cycle, process, tokens, seconds = _columns(turns)
    return _by_cycle(cycle, process, seconds / tokens)


def whole_runs(results: Results, number: int) -> Turns | None:
    """For each prompt the seconds of a run: the prompt's, and its new tokens' at the mean speed of
    the turns until the next prompt. Per token of `max_new_tokens`, like in the log."""
    arm = results.arms[number]
    prompts, steps = results.turns(number, "prompt"), results.turns(number, "decode")
    run = arm.facts.run if arm.facts else None
    new = run.config.max_new_tokens if run else 1 + max((turn.tokens for turn in steps), default=0)
    if not prompts or new == 1:
        return turns_of(prompts or steps)
    cycle, process, _, prompt = _columns(prompts)
    of_cycle, of_process, tokens, seconds = _columns(steps)
    own = np.searchsorted(cycle, of_cycle, "right") - 1  # the last prompt before each turn
    paired = (own >= 0) & (process[own] == of_process)
    summed, count = (
        np.bincount(own[paired], values[paired], len(prompts)) for values in (seconds, tokens)
    )
    whole = count > 0
    runs = prompt[whole] + (new - 1) * summed[whole] / count[whole]
    return _by_cycle(cycle[whole], process[whole], runs / new)


def _columns(turns: Collection[Turn]) -> tuple[NDArray[Any], ...]:
    """Cycle, process, tokens and seconds of each."""
    numbers = np.array([(turn.cycle, turn.process, turn.tokens) for turn in turns], int)
    seconds = np.array([turn.seconds for turn in turns])
    return *numbers.reshape(-1, 3).T, seconds


def _by_cycle(cycle: NDArray[Any], process: NDArray[Any], seconds: NDArray[Any]) -> Turns | None:
    if not len(cycle):
        return None
    cycles, first, place = np.unique(cycle, return_index=True, return_inverse=True)
    return Turns(cycles, process[first], np.bincount(place, seconds) / np.bincount(place))
