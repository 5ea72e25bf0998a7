"""How often the statistics err, on simulated sessions whose truth is known: the engine's proof.

    python -m tests.trust.simulation     # four minutes; docs/data/trust.json

A session is simulated as the engine runs it: cycles A B C then C B A, turns of 100 ms, restarts,
groups of arms that share the baseline. The machine has states of 0.5 to 30 s (log-uniform) in which
memory is faster or slower; an arm's seconds follow memory's with an exponent from 0, not at all, to
1. Every arm has noise that lasts about a second, noise of single turns, turns that are late, and
processes that differ. A session ends where `enough` says so, or with its budget.

The truth of an arm is its expected log ratio, averaged over the session: over the states that it
met. A session of 15 s may lie in a single state, and no statistic knows of states that it did not
meet. `covers_long_run` counts, for information, the sessions whose intervals also hold over all
states that the machine has.

Exits with 1 where a requirement is missed. The JSON has the digest of the sources that it proves.
"""

import dataclasses
import hashlib
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from scipy import integrate, signal
from scipy.stats import beta

from quantbench.log.about import about
from quantbench.stats import Floor, Turns, best, enough, floor_of, intervals

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs/data/trust.json"
COMMAND = "make trust"

TURN = 0.1  # seconds
STATE_SECONDS = (0.5, 30.0)
STATE_DEVIATION = 0.13  # of the logarithm of memory's speed: 16 to 24 GB/s were seen in one demo
SLOW_NOISE, SLOW_SECONDS = 0.02, 1.0  # of each arm: standard deviation, time constant
TURN_NOISE = 0.025  # standard deviation
# Late turns: a share of all, and how much longer they take, as a part of a turn.
LATE_SHARE, LATE_MEAN = 0.05, 0.15  # of every arm: exponential
HEAVY_SHARE, HEAVY_LEAST, HEAVY_INDEX = 0.09, 0.5, 2.5  # of an arm with a heavy tail: Pareto
LOADING = 3.0  # seconds without turns while arms load; states go on
LOOKS = 1.4  # a look after so many times as many cycles, from 10 on
FALSE_UPPER, COVERAGE, DEMO_WIDTH = 0.05, 0.93, 0.08  # see `failures`
LONG = 300.0  # seconds in which a session meets the machine's states often enough

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """A condition. `effects`: log ratios of all arms but the baseline."""

    name: str
    effects: tuple[float, ...] = (0.0,)
    budget: float = 60.0  # seconds of turns
    exponents: tuple[float, ...] = ()  # of every arm, the baseline first; empty: drawn from 0 to 1
    drift: float = 0.0  # of the logarithm of memory's speed, over the budget
    heavy: tuple[int, ...] = ()  # arms with a heavy tail, 0 is the baseline
    between: tuple[float, float] = (0.015, 0.015)  # deviation of processes: uniform per machine
    history: int = 0  # earlier sessions from which the floor is known; 0: the prior
    processes: int = 2  # of each arm, one after the other, with equal shares of the budget
    group: int = 30  # arms in memory at once beside the baseline
    trials: int = 200
    half_width: float = math.inf  # required of the median


def ratios(*values: float) -> tuple[float, ...]:
    return tuple(math.log(value) for value in values)


MIXED = ratios(1.0, 0.95, 1.05, 0.7, 1.3, 2.0, 0.98)
CELLS = (
    Cell("2 arms, equal, 15 s", budget=15),
    Cell("2 arms, equal, 60 s"),
    Cell("2 arms, equal, 300 s", budget=300),
    Cell("2 arms, 5 % slower, 60 s", ratios(1.05)),
    Cell("2 arms, 5 % slower, 180 s", ratios(1.05), budget=180),
    Cell("2 arms, 5 % slower, 5 processes, 300 s", ratios(1.05), budget=300, processes=5),
    Cell("2 arms, 30 % slower, 15 s", ratios(1.3), budget=15),
    Cell("2 arms, exponents 1 and 0, 15 s", budget=15, exponents=(1.0, 0.0)),
    Cell("2 arms, exponents 1 and 0, 300 s", budget=300, exponents=(1.0, 0.0)),
    Cell("2 arms, exponents 1 and 1, 60 s", exponents=(1.0, 1.0)),
    Cell("2 arms, heavy tail, 60 s", heavy=(1,)),
    Cell("2 arms, heavy tail in the baseline, 15 s", budget=15, heavy=(0,)),
    Cell("2 arms, drift 30 %, 60 s", drift=0.3),
    Cell("2 arms, processes alike, 60 s", between=(0.0, 0.0)),
    Cell("2 arms, processes 0 to 5 %, 60 s", between=(0.0, 0.05), trials=300),
    Cell("2 arms, processes 5 %, known, 60 s", between=(0.05, 0.05), history=8),
    Cell("demo: 4 arms, 25 s", ratios(0.6, 0.75, 1.3), budget=25, half_width=DEMO_WIDTH),
    Cell("4 arms, equal, 15 s", (0.0,) * 3, budget=15),
    Cell("4 arms, processes 0 to 5 %, 60 s", (0.0,) * 3, between=(0.0, 0.05), trials=300),
    Cell("8 arms, equal, 60 s", (0.0,) * 7, trials=150),
    Cell("8 arms, mixed, 300 s", MIXED, budget=300, trials=150),
    Cell("8 arms in groups of 3, mixed, 60 s", MIXED, group=3, trials=150),
    Cell("30 arms, equal, 60 s", (0.0,) * 29, trials=100),
    Cell("30 arms in groups of 6, 300 s", (*MIXED * 4, 0.1), budget=300, group=6, trials=100),
)


@dataclass(frozen=True)
class Session:
    """Every arm's turns, the baseline's first; `expected`: of their logarithms, at each turn."""

    turns: list[Turns]
    expected: list[Floats]
    looks: list[int]  # cycles, ascending; the last is the end of the budget

    def until(self, cycle: int) -> tuple[Turns, dict[int, Turns], Floats]:
        """The baseline, the arms and their true log ratios after so many cycles."""
        ends = [int(np.searchsorted(turns.cycle, cycle)) for turns in self.turns]
        parts = [
            Turns(turns.cycle[:end], turns.process[:end], turns.seconds[:end])
            for turns, end in zip(self.turns, ends, strict=True)
        ]
        truths = []
        for arm, part in list(enumerate(parts))[1:]:
            shared = np.isin(parts[0].cycle, part.cycle)
            baseline = self.expected[0][: ends[0]][shared]
            apart = self.expected[arm][: ends[arm]] - baseline
            truths.append(apart.mean() if len(apart) else math.nan)
        return parts[0], dict(enumerate(parts[1:], start=1)), np.array(truths)


def simulate(cell: Cell, generator: np.random.Generator, between: float) -> Session:
    """A session on a machine whose processes differ by the standard deviation `between`."""
    count = len(cell.effects) + 1
    effects = (0.0, *cell.effects)
    exponents = cell.exponents or tuple(generator.uniform(0, 1, count))
    processes = generator.normal(0, between, (count, cell.processes))
    memory = _memory(cell, generator)
    found: list[list[tuple[Floats, ...]]] = [[] for _ in range(count)]
    looks: list[int] = []
    cycle, now = 0, 0.0
    for process, arms, seconds in _blocks(cell):
        length = TURN * len(arms)
        cycles = max(1, int(seconds / length))
        numbers = np.arange(cycles)
        for place, arm in enumerate(arms):
            order = np.where(numbers % 2 == 0, place, len(arms) - 1 - place)
            starts = now + numbers * length + order * TURN
            level = (memory(starts + TURN) - memory(starts)) / TURN
            expected = effects[arm] - exponents[arm] * level
            logs = expected + processes[arm, process]
            logs = logs + _noise(arm in cell.heavy, cycles, length, generator)
            column = (cycle + numbers, np.full(cycles, process), np.exp(logs), expected)
            found[arm].append(column)
        if len(arms) == count:  # groups: only where one of them has had its turns
            steps = np.unique((LOOKS ** np.arange(7, 30)).astype(int))
            looks += [cycle + int(step) for step in steps if step < cycles]
        looks.append(cycle + cycles)
        cycle, now = cycle + cycles, now + cycles * length + LOADING
    columns = [[np.concatenate(part) for part in zip(*parts, strict=True)] for parts in found]
    turns = [Turns(cycles, process, seconds) for cycles, process, seconds, _ in columns]
    return Session(turns, [expected for *_, expected in columns], looks)


def _blocks(cell: Cell) -> list[tuple[int, list[int], float]]:
    """Process number, arms in memory, and seconds of turns of what lies between two loadings."""
    arms = list(range(1, len(cell.effects) + 1))
    groups = [arms[start : start + cell.group] for start in range(0, len(arms), cell.group)]
    seconds = cell.budget / cell.processes / len(groups)
    return [
        (process, [0, *group], seconds) for process in range(cell.processes) for group in groups
    ]


def _memory(cell: Cell, generator: np.random.Generator) -> Any:
    """The integral over time of the logarithm of memory's speed, as a function of seconds."""
    whole = cell.budget * 1.2 + LOADING * cell.processes * len(cell.effects)
    count = int(whole / STATE_SECONDS[0]) + 1
    durations = np.exp(generator.uniform(*np.log(STATE_SECONDS), count))
    # The session begins within a state, more likely within a long one.
    durations[0] = generator.choice(durations, p=durations / durations.sum()) * generator.random()
    levels = generator.normal(0, STATE_DEVIATION, count)
    times = np.concatenate([[0.0], np.cumsum(durations)])
    integrals = np.concatenate([[0.0], np.cumsum(durations * levels)])
    return lambda seconds: (
        np.interp(seconds, times, integrals)
        + cell.drift * (seconds**2 / (2 * cell.budget) - seconds / 2)
    )


def _noise(heavy: bool, cycles: int, length: float, generator: np.random.Generator) -> Floats:
    """Logarithms of an arm's own noise, expectation 0."""
    share = HEAVY_SHARE if heavy else LATE_SHARE
    late = generator.random(cycles) < share
    longer = (
        HEAVY_LEAST * (1 + generator.pareto(HEAVY_INDEX, cycles))
        if heavy
        else generator.exponential(LATE_MEAN, cycles)
    )
    tail = np.log1p(late * longer) - share * (HEAVY_LOG if heavy else LATE_LOG)
    kept = math.exp(-length / SLOW_SECONDS)
    steps = generator.normal(0, SLOW_NOISE, cycles)
    steps[1:] *= math.sqrt(1 - kept**2)
    slow = signal.lfilter([1], [1, -kept], steps)
    return np.asarray(slow + tail + generator.normal(0, TURN_NOISE, cycles))


# Expected logarithms of how much longer a late turn takes.
LATE_LOG = integrate.quad(lambda x: math.log1p(LATE_MEAN * x) * math.exp(-x), 0, math.inf)[0]
HEAVY_LOG = integrate.quad(
    lambda x: math.log1p(HEAVY_LEAST * x) * HEAVY_INDEX * x ** (-HEAVY_INDEX - 1), 1, math.inf
)[0]


def measure(cell: Cell, generator: np.random.Generator) -> dict[str, Any]:
    """Counts and bounds of a cell's requirements, at the end of each session."""
    counts = dict.fromkeys(("false", "covers", "covers_long_run", "best", "found", "plain"), 0)
    widths: list[float] = []
    seconds: list[float] = []
    long_run = np.array(cell.effects)
    for _ in range(cell.trials):
        between = generator.uniform(*cell.between)
        history = [simulate(cell, generator, between) for _ in range(cell.history)]
        floor = floor_of((past.turns[0], dict(enumerate(past.turns[1:], 1))) for past in history)
        found, fastest, truths, spent = run(simulate(cell, generator, between), floor)
        low = np.log([max(one.low, 1e-300) for one in found.values()])
        high = np.log([one.high for one in found.values()])
        signs = np.where(low > 0, 1, np.where(high < 0, -1, 0))
        counts["false"] += bool(np.any((signs != 0) & (signs != np.sign(truths))))
        counts["covers"] += bool(np.all((low <= truths) & (truths <= high)))
        counts["covers_long_run"] += bool(np.all((low <= long_run) & (long_run <= high)))
        counts["best"] += int(np.argmin([0.0, *truths])) in fastest
        plain = np.abs(truths) >= math.log(1.05) * 0.99
        counts["plain"] += int(plain.sum())
        counts["found"] += int((plain & (signs == np.sign(truths))).sum())
        widths += [one.half_width for one in found.values()]
        seconds.append(spent)
    return {
        "cell": cell.name,
        "sessions": cell.trials,
        "false_verdicts": bounds(counts["false"], cell.trials),
        "covers": bounds(counts["covers"], cell.trials),
        "covers_long_run": bounds(counts["covers_long_run"], cell.trials),
        "fastest_kept": bounds(counts["best"], cell.trials),
        "five_percent_found": bounds(counts["found"], counts["plain"]),
        "half_width": round(float(np.median(widths)), 4),
        "seconds": round(float(np.median(seconds)), 1),
    }


def run(session: Session, floor: Floor) -> tuple[Any, set[int], Floats, float]:
    """Intervals, arms that may be the fastest, truths and seconds of turns, when it has ended."""
    for look in session.looks:
        baseline, arms, truths = session.until(look)
        if any(len(turns.cycle) == 0 for turns in arms.values()):
            continue
        found = intervals(baseline, arms, floor)
        fastest = best(baseline, arms, floor, among={0, *arms})
        if enough(found, fastest)[0]:
            break
    turns = len(baseline.cycle) + sum(len(turns.cycle) for turns in arms.values())
    return found, fastest, truths, turns * TURN


def bounds(count: int, trials: int) -> dict[str, float]:
    """A share and its two-sided Clopper-Pearson bounds at 95 %."""
    low = beta.ppf(0.025, count, trials - count + 1) if count else 0.0
    high = beta.isf(0.025, count + 1, trials - count) if count < trials else 1.0
    share = count / trials if trials else 0.0
    return {"share": round(share, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each requirement that is missed."""
    cells = {cell.name: cell for cell in CELLS}
    result = []
    for row in rows:
        for name, value, least, most in (
            ("false verdicts, upper bound", row["false_verdicts"]["high"], 0.0, FALSE_UPPER),
            ("coverage", row["covers"]["share"], COVERAGE, 1.0),
            ("fastest kept", row["fastest_kept"]["share"], COVERAGE, 1.0),
            ("median half-width", row["half_width"], 0.0, cells[row["cell"]].half_width),
            (
                "coverage of all states",
                row["covers_long_run"]["share"],
                COVERAGE if cells[row["cell"]].budget >= LONG else 0.0,
                1.0,
            ),
        ):
            if not least <= value <= most:
                result.append(f"{row['cell']}: {name} {value:.3f}, {least:g} to {most:g} needed")
    return result


def digest() -> str:
    """Of the sources that the result proves."""
    sources = [*sorted((ROOT / "quantbench/stats").glob("*.py")), Path(__file__)]
    parts = (f"{source.name}\0".encode() + source.read_bytes() for source in sources)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@click.command()
@click.option("--seed", default=20261125, show_default=True)
@click.option("--only", default="", help="Cells whose name has this text; nothing is written.")
def main(seed: int, only: str) -> None:
    """Simulate every condition and write docs/data/trust.json."""
    rows, proved = [], digest()
    for number, cell in enumerate(CELLS):
        if only in cell.name:
            started = time.perf_counter()
            rows.append(measure(cell, np.random.default_rng([seed, number])))
            click.echo(f"{time.perf_counter() - started:5.1f} s {rows[-1]}")
    missed = failures(rows)
    if not only:
        result = {"about": dataclasses.asdict(about()), "digest": proved, "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for line in missed:
        click.echo(line, err=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
