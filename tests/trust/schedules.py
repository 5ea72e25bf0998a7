"""How often `quantbench.stats.ratios` errs, on turns that are drawn as an array: kinds of machine
that would take hours as whole sessions (simulation.py).

    judge(CELLS[0], seed=1)        # a row of docs/data/trust.json

Cycles run A B C, C B A, then B C A and so on, in processes of fixed lengths; nothing stops a
session early. The truth of an arm is its ratio in the long run: over processes, states, sessions.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantbench.stats import Floor, Interval, ratios
from quantbench.stats.sequence import FIRST

TURN = 0.1  # seconds of a turn where nothing slows it
BURST_SECONDS, SLOWER = 0.15, 0.3
LOOKS = 8
STATES = (60.0, 120.0)  # seconds
OF_THE_SESSION = "an effect that all processes of a session share, which no restart draws anew"
LONG = "states as long as the session, which it did not all meet"
FIRST_HERE = "the first session on a machine whose processes differ by more than is assumed"


@dataclass(frozen=True)
class Schedule:
    """A condition. Deviations are of logarithms."""

    name: str
    processes: tuple[int, ...] = (50, 30)  # cycles of each
    effects: tuple[float, ...] = (0.0,) * 3  # log ratios of all arms but the baseline
    turns: float = 0.09 / math.sqrt(2)  # deviation of a turn
    between: float = 0.015  # of processes
    tail: int = 0  # degrees of freedom of Student's t, scaled to `between`; 0: normal
    session: float = 0.0  # deviation of an effect on each arm that a session has
    shift: float = 0.0  # of the last arm, in every other state on the mean
    bursts: tuple[float, str] = (0.0, "")  # a cycle; where: "" anywhere, "ends" or "middle"
    file: float = 0.0  # degrees of freedom of a file of this machine; 0: none
    is_stopped: bool = False  # judged at each of LOOKS looks
    trials: int = 400
    half_width: float = math.inf  # required of the median
    beyond: str | None = None  # which limit of the method lets it err more often


def both(name: str, **more: Any) -> list[Schedule]:
    """With two processes and with three."""
    return [Schedule(f"{name}, {len(cycles)} processes", cycles, **more)
            for cycles in ((50, 30), (50, 20, 10))]  # fmt: skip


CELLS = (
    *both("4 arms, turns 9 %"),
    Schedule("demo: 4 arms, turns 10 %", (40, 40, 29), tuple(map(math.log, (0.6, 0.75, 1.3))),
             0.1 / math.sqrt(2), half_width=0.05),
    *both("4 arms, processes 3 % (t)", between=0.03, tail=4),
    *both("4 arms, processes 3 % (t), turns 1 %", between=0.03, tail=4, turns=0.01),
    *(dataclasses.replace(cell, beyond=FIRST_HERE if len(cell.processes) == 2 else None)
      for cell in both("4 arms, processes 5 %", between=0.05)),
    *both("4 arms, processes 5 %, turns 1 %", between=0.05, turns=0.01),
    *both("4 arms, processes 5 %, turns 1 %, file of 8", between=0.05, turns=0.01, file=8),
    *both("4 arms, processes 0.5 %, turns 1 %, file of 30", between=0.005, turns=0.01, file=30),
    Schedule("4 arms, one process", (80,)),
    Schedule("4 arms, bursts anywhere", bursts=(0.5, ""), between=0.001),
    Schedule("4 arms, bursts at a cycle's ends", bursts=(0.5, "ends"), between=0.001),
    Schedule("4 arms, bursts in a cycle's middle", bursts=(0.5, "middle"), between=0.001),
    *(Schedule(f"4 arms, ten states of 1 to 2 min slow one by {shift:.0%}", (700, 700, 600),
               turns=0.03, shift=shift, trials=300) for shift in (0.04, 0.08)),
    *(Schedule(f"4 arms, one state of 1 to 2 min slows one by {shift:.0%}", turns=0.01,
               between=0.005, shift=shift, beyond=LONG) for shift in (0.04, 0.08)),
    *both("4 arms, effect of the session 2 %", between=0.005, turns=0.01, session=0.02,
          beyond=OF_THE_SESSION),
    Schedule("4 arms, stopped at any of eight looks", (50, 50, 50), is_stopped=True, trials=300),
    Schedule("4 arms, stopped at any of eight looks, processes 3 % (t)", (50, 50, 50),
             between=0.03, tail=4, is_stopped=True, beyond=FIRST_HERE),
)  # fmt: skip


def session(cell: Schedule, draw: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Seconds (cycles, arms) and the process of each cycle."""
    arms, cycles = len(cell.effects) + 1, sum(cell.processes)
    process = np.repeat(np.arange(len(cell.processes)), cell.processes)
    apart = draw.normal(0, 1, (len(cell.processes), arms))
    if cell.tail:
        apart *= np.sqrt((cell.tail - 2) / draw.chisquare(cell.tail, apart.shape))
    logs = np.array([0.0, *cell.effects]) + cell.between * apart[process]
    logs += draw.normal(0, cell.turns, (cycles, arms)) + draw.normal(0, cell.session or 0, arms)
    if cell.shift:
        logs[:, -1] += cell.shift * (states(cycles * arms * TURN, cycles, draw) - 0.5)
    seconds = TURN * np.exp(logs)
    rate, where = cell.bursts
    if rate:  # of the machine: 30 % slower, at a time or at a place in the cycle
        length = arms * TURN
        for cycle, count in enumerate(draw.poisson(rate, cycles)):
            order = np.roll(np.arange(arms), -(cycle // 2 % arms))[:: -1 if cycle % 2 else 1]
            begins = np.arange(arms) * TURN
            for start in draw.uniform(-BURST_SECONDS, length, count):
                start = {"ends": 0.0, "middle": (length - BURST_SECONDS) / 2}.get(where, start)
                met = np.minimum(start + BURST_SECONDS, begins + TURN) - np.maximum(start, begins)
                seconds[cycle, order] += SLOWER * np.clip(met, 0, None)
    return seconds, process


def states(length: float, cycles: int, draw: np.random.Generator) -> NDArray[Any]:
    """0 or 1 for each cycle: whether the machine is in a state that slows the arm. A state that
    one looks into is a long one more often."""
    low, high = STATES
    first = math.sqrt(draw.uniform(low**2, high**2)) * draw.uniform()
    ends = first + np.concatenate([[0], np.cumsum(draw.uniform(low, high, int(length / low) + 2))])
    levels = draw.integers(0, 2, len(ends) + 1)
    return levels[np.searchsorted(ends, np.linspace(0, length, cycles))]


def floor_of(cell: Schedule, draw: np.random.Generator) -> Floor | None:
    """What the file of this machine says, after sessions that had the same processes."""
    if not cell.file:
        return None
    return Floor(cell.between * math.sqrt(draw.chisquare(cell.file) / cell.file), cell.file, 0.0)


Method = Callable[[NDArray[Any], NDArray[Any], Floor | None], list[Interval]]


def judge(cell: Schedule, seed: int, bounds: Callable[[int, int], Any],
          method: Method = ratios) -> dict[str, Any]:  # fmt: skip
    """Counts and bounds of a cell's requirements. Of sessions that are stopped at looks: at the
    look that errs most, and in `ever_false` at any."""
    draw = np.random.default_rng([seed, *cell.name.encode()])
    truths, every = np.array(cell.effects), sum(cell.processes)
    ends = np.linspace(FIRST, every, LOOKS).astype(int) if cell.is_stopped else [every]
    false, covers = np.zeros((2, cell.trials, len(ends)), bool)
    widths: list[float] = []
    means = []
    for trial in range(cell.trials):
        seconds, process = session(cell, draw)
        floor = floor_of(cell, draw)
        for look, end in enumerate(ends):
            found = method(seconds[:end], process[:end], floor)
            low, high = (np.log([max(getattr(one, name), 1e-300) for one in found])
                         for name in ("low", "high"))  # fmt: skip
            signs = np.where(low > 0, 1, np.where(high < 0, -1, 0))
            false[trial, look] = np.any((signs != 0) & (signs != np.sign(truths)))
            covers[trial, look] = np.all((low <= truths) & (truths <= high))
        widths += [one.half_width for one in found]
        means.append([one.ratio for one in found])
    return {
        "cell": cell.name,
        "sessions": cell.trials,
        "false_verdicts": bounds(int(false.sum(axis=0).max()), cell.trials),
        "ever_false": bounds(int(false.any(axis=1).sum()), cell.trials),
        "covers": bounds(int(covers.sum(axis=0).min()), cell.trials),
        "half_width": round(float(np.median(widths)), 4),
        "means": np.exp(np.log(means).mean(axis=0) - truths).round(4).tolist(),
        "beyond": cell.beyond,
    }
