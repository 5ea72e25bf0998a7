"""How often the statistics err, on simulated sessions whose truth is known: the engine's proof.

    python -m tests.trust.simulation     # minutes; docs/data/trust.json

A session is bench.session.Session with the rule that ab and recommend have (answer/stop.py):
cycles, groups, restarts, repeated cycles and the end are theirs. Its workers have no model. The
machine has states of 0.5 to 30 s (log-uniform) in which memory is faster or slower; an arm's
seconds follow memory's with an exponent from 0, not at all, to 1. Every arm has noise that lasts
about a second, noise of single turns, turns that are late, and processes that differ.

The truth of an arm is its expected log ratio, averaged over the session: over the states that it
met. A session of half a minute may lie in a single state, and no statistic knows of states that it
did not meet. `covers_long_run` counts, for information, the sessions whose intervals also hold over
all states that the machine has.

Exits with 1 where a requirement is missed. The JSON has the digest of the sources that it proves.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import random
import sys
import time
import tokenize
from bisect import bisect
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
from scipy import integrate
from scipy.stats import binomtest

from quantbench.answer.compared import Compared
from quantbench.answer.limits import Limits
from quantbench.answer.stop import Enough
from quantbench.bench.answers import TurnTime
from quantbench.bench.noise import Noise
from quantbench.bench.session import Session
from quantbench.bench.store import ArmResult, Ready, Repeated, Results, Settings, Store, Turn
from quantbench.log.about import about
from quantbench.stats.paired import contrast
from tests.bench.world import Behaviour, FakeProcess, World

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs/data/trust.json"
COMMAND = "make trust"
PROVED = ("quantbench/stats/*.py", "quantbench/answer/stop.py", "quantbench/answer/compared.py",
          "quantbench/bench/session.py", "quantbench/bench/noise.py")  # fmt: skip

NEW_TOKENS = 33  # of a whole run; a step is as long as the prompt of one token
STEP = 0.1 / (NEW_TOKENS - 1)  # seconds: a turn takes 0.1
STATE_SECONDS = (0.5, 30.0)
STATE_DEVIATION = 0.13  # of the logarithm of memory's speed: 16 to 24 GB/s were seen in one demo
SLOW_NOISE, SLOW_SECONDS = 0.02, 1.0  # of each arm: standard deviation, time constant
TURN_NOISE = 0.025  # standard deviation
# Late turns: a share of all, and how much longer they take, as a part of a turn.
LATE_SHARE, LATE_MEAN = 0.05, 0.15  # of every arm: exponential
HEAVY_SHARE, HEAVY_LEAST, HEAVY_INDEX = 0.09, 0.5, 2.5  # of an arm with a heavy tail: Pareto
LOADING = 3.0  # seconds in which an arm loads; states go on
FALSE_UPPER, COVERAGE, DEMO_WIDTH = 0.05, 0.93, 0.08  # see `failures`
LONG = 5.0  # minutes in which a session meets the machine's states often enough


@dataclass(frozen=True)
class Cell:
    """A condition. `effects`: log ratios of all arms but the baseline."""

    name: str
    effects: tuple[float, ...] = (0.0,)
    minutes: float = 1.0  # --max_minutes
    exponents: tuple[float, ...] = ()  # of every arm, the baseline first; empty: drawn from 0 to 1
    drift: float = 0.0  # of the logarithm of memory's speed, over the minutes
    heavy: tuple[int, ...] = ()  # arms with a heavy tail, 0 is the baseline
    between: tuple[float, float] = (0.015, 0.015)  # deviation of processes: uniform per machine
    beside: int = 100  # arms that fit into memory together
    answer_only: bool = False  # as recommend
    trials: int = 150
    half_width: float = math.inf  # required of the median


def ratios(*values: float) -> tuple[float, ...]:
    return tuple(math.log(value) for value in values)


MIXED = ratios(1.0, 0.95, 1.05, 0.7, 1.3, 2.0, 0.98)
CELLS = (
    Cell("2 arms, equal, 0.5 min", minutes=0.5),
    Cell("2 arms, equal, 1 min"),
    Cell("2 arms, equal, 5 min", minutes=5),
    Cell("2 arms, 5 % slower, 1 min", ratios(1.05)),
    Cell("2 arms, 5 % slower, 5 min", ratios(1.05), 5),
    Cell("2 arms, 30 % slower, 0.5 min", ratios(1.3), 0.5),
    Cell("2 arms, exponents 1 and 0, 0.5 min", minutes=0.5, exponents=(1.0, 0.0)),
    Cell("2 arms, exponents 1 and 0, 5 min", minutes=5, exponents=(1.0, 0.0)),
    Cell("2 arms, exponents 1 and 1, 1 min", exponents=(1.0, 1.0)),
    Cell("2 arms, heavy tail, 1 min", heavy=(1,)),
    Cell("2 arms, heavy tail in the baseline, 0.5 min", minutes=0.5, heavy=(0,)),
    Cell("2 arms, drift 30 %, 1 min", drift=0.3),
    Cell("2 arms, processes alike, 1 min", between=(0.0, 0.0)),
    Cell("2 arms, processes 0 to 5 %, 1 min", between=(0.0, 0.05), trials=300),
    Cell("demo: 4 arms, 2 min", ratios(0.6, 0.75, 1.3), 2, half_width=DEMO_WIDTH),
    Cell("4 arms, equal, 1 min", (0.0,) * 3),
    Cell("4 arms, processes 0 to 5 %, 2 min", (0.0,) * 3, 2, between=(0.0, 0.05), trials=300),
    Cell("8 arms, equal, 2 min", (0.0,) * 7, 2),
    Cell("8 arms, mixed, 5 min", MIXED, 5),
    Cell("8 arms in groups of 3, mixed, 5 min", MIXED, 5, beside=3),
    Cell("8 arms, mixed, recommend, 5 min", MIXED, 5, answer_only=True),
    Cell("30 arms, equal, 10 min", (0.0,) * 29, 10, trials=100),
    Cell("30 arms, mixed, recommend, 5 min", (*MIXED * 4, 0.1), 5, answer_only=True, trials=100),
)


@dataclass
class Machine(World):
    """The machine of a cell, and its workers."""

    cell: Cell = Cell("")
    clean: float = 0.0  # seconds of the last turn without noise

    def __post_init__(self) -> None:
        super().__post_init__()
        draw, cell = self.random, self.cell
        self.start_of_session = self.now
        self.effects = (0.0, *cell.effects)
        count = len(self.effects)
        self.exponents = cell.exponents or tuple(draw.uniform(0, 1) for _ in range(count))
        # The session starts within a state, more likely within a long one.
        low, high = map(math.log, STATE_SECONDS)
        lengths = [math.exp(draw.uniform(low, high)) for _ in range(1000)]
        lengths[0] = draw.choices(lengths, lengths)[0] * draw.random()
        self.ends, self.levels, end = [], [], self.now
        while end < self.now + 90 * cell.minutes + 300:
            end += lengths[len(self.ends) % len(lengths)]
            self.ends.append(end)
            self.levels.append(draw.gauss(0, STATE_DEVIATION))

    def level(self, now: float) -> float:
        """The logarithm of memory's speed."""
        drifted = (now - self.start_of_session) / (60 * self.cell.minutes) - 0.5
        return self.levels[bisect(self.ends, now)] + self.cell.drift * drifted

    def start(self, command: Sequence[str]) -> FakeProcess:
        return Worker(self, int(command[0]))


class Worker(FakeProcess):
    """A process of an arm; turns take as long as the machine's state and the noise say."""

    slow, at = 0.0, -math.inf  # the noise that lasts, and when it was drawn

    def answer(self, kind: type, do: str, /, **arguments: Any) -> Any:
        return self.turn(**arguments) if kind is TurnTime else super().answer(kind, do, **arguments)

    def _took(self, tokens: int) -> float:
        world, draw, number = self.world, self.world.random, self.number
        level = (world.level(world.now) + world.level(world.now + tokens * STEP)) / 2
        expected = world.effects[number] - world.exponents[number] * level
        kept = math.exp((self.at - world.now) / SLOW_SECONDS)
        self.slow = kept * self.slow + draw.gauss(0, SLOW_NOISE) * math.sqrt(1 - kept**2)
        noise = self.slow + draw.gauss(0, TURN_NOISE) + _late(number in world.cell.heavy, draw)
        world.clean = tokens * STEP * math.exp(expected)
        seconds = world.clean * self.factor * math.exp(noise)
        self.at = world.now = world.now + seconds
        return float(seconds)


def _late(heavy: bool, draw: random.Random) -> float:
    """By how much a turn is late, as a logarithm of expectation 0."""
    longer, share = 0.0, HEAVY_SHARE if heavy else LATE_SHARE
    if draw.random() < share:
        longer = draw.expovariate(1 / LATE_MEAN)
        if heavy:
            longer = HEAVY_LEAST * (1 + draw.paretovariate(HEAVY_INDEX))
    return math.log1p(longer) - share * (HEAVY_LOG if heavy else LATE_LOG)


# Expected logarithms of how much longer a late turn takes.
LATE_LOG = integrate.quad(lambda x: math.log1p(LATE_MEAN * x) * math.exp(-x), 0, math.inf)[0]
HEAVY_LOG = integrate.quad(
    lambda x: math.log1p(HEAVY_LEAST * (1 + x)) * HEAVY_INDEX * x ** (-HEAVY_INDEX - 1), 1, math.inf
)[0]


class Memory(Noise):
    """As bench.noise.Noise, reading the simulated memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.cycles, self.repeated = machine, 0, 0

    def read(self) -> float:
        return math.exp(self.machine.level(self.machine.now))


class Truth(Store):
    """A store that also keeps what was measured without its noise."""

    def __init__(self, results: Results, machine: Machine) -> None:
        super().__init__(results, None)
        arms = [ArmResult(arm.name, "", arm.argv) for arm in results.arms]
        self.machine, self.clean = machine, Results(results.settings, arms)

    def add(self, event: object) -> None:
        super().add(event)
        if isinstance(event, Turn):
            seconds = self.machine.clean
            event = Turn(event.arm, event.process, event.cycle, event.kind, event.tokens, seconds)
        if isinstance(event, Turn | Repeated | Ready):
            self.clean.apply(event)

    def ratios(self, arms: Sequence[int]) -> np.ndarray:
        """The arms' true log ratios: means over the cycles that were compared."""
        turns = Compared(self.clean).turns
        found = [contrast(turns[arm], turns[0]).segments for arm in arms]
        return np.array([np.concatenate([s.logs for s in segments]).mean() for segments in found])


def simulate(cell: Cell, seed: int, between: float) -> tuple[Truth, float]:
    """A session that has ended, and the seconds it took."""
    count = len(cell.effects) + 1
    arms = [Behaviour(between=between, loading=LOADING, fits_beside=cell.beside)] * count
    machine = Machine(arms, seed=seed, cell=cell)
    argv = ["--max_new_tokens", str(NEW_TOKENS)]
    named = [ArmResult(f"arm {number}", "", argv) for number in range(count)]
    store = Truth(Results(Settings(max_minutes=cell.minutes, tokens=0), named), machine)
    with (
        mock.patch("quantbench.bench.pool.Process", machine.start),
        mock.patch("quantbench.bench.session.Noise", lambda: Memory(machine)),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        rule = Enough(Limits(), cell.answer_only)
        Session(store, rule, machine.command, clock=lambda: machine.now).run()
    return store, machine.now - machine.start_of_session


def measure(cell: Cell, seed: int) -> dict[str, Any]:
    """Counts and bounds of a cell's requirements, at the end of each session."""
    draw = random.Random(f"{seed} {cell.name}")
    counts = dict.fromkeys(("false", "covers", "covers_long_run", "best", "found", "plain"), 0)
    widths: list[float] = []
    seconds: list[float] = []
    for _ in range(cell.trials):
        store, spent = simulate(cell, draw.getrandbits(32), draw.uniform(*cell.between))
        found = Compared(store.results)
        arms = list(found.whole)
        truths, long_run = store.ratios(arms), np.array([cell.effects[arm - 1] for arm in arms])
        low = np.log([max(found.whole[arm].low, 1e-300) for arm in arms])
        high = np.log([found.whole[arm].high for arm in arms])
        signs = np.where(low > 0, 1, np.where(high < 0, -1, 0))
        counts["false"] += bool(np.any((signs != 0) & (signs != np.sign(truths))))
        counts["covers"] += bool(np.all((low <= truths) & (truths <= high)))
        counts["covers_long_run"] += bool(np.all((low <= long_run) & (long_run <= high)))
        counts["best"] += [0, *arms][int(np.argmin([0.0, *truths]))] in found.best([0, *arms])
        plain = np.abs(truths) >= math.log(1.05) * 0.99
        counts["plain"] += int(plain.sum())
        counts["found"] += int((plain & (signs == np.sign(truths))).sum())
        widths += [one.half_width for one in found.whole.values()]
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


def bounds(count: int, trials: int) -> dict[str, float]:
    """A share and its two-sided Clopper-Pearson bounds at 95 %."""
    if not trials:
        return {"share": 0.0, "low": 0.0, "high": 1.0}
    low, high = binomtest(count, trials).proportion_ci(0.95)
    return {"share": round(count / trials, 4), "low": round(low, 4), "high": round(high, 4)}


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each requirement that is missed."""
    cells = {cell.name: cell for cell in CELLS}
    result = []
    for row in rows:
        cell = cells[row["cell"]]
        of_all_states = COVERAGE if cell.minutes >= LONG else 0.0
        for name, value, least, most in (
            ("false verdicts, upper bound", row["false_verdicts"]["high"], 0.0, FALSE_UPPER),
            ("coverage", row["covers"]["share"], COVERAGE, 1.0),
            ("fastest kept", row["fastest_kept"]["share"], COVERAGE, 1.0),
            ("median half-width", row["half_width"], 0.0, cell.half_width),
            ("coverage of all states", row["covers_long_run"]["share"], of_all_states, 1.0),
        ):
            if not least <= value <= most:
                result.append(f"{cell.name}: {name} {value:.3f}, {least:g} to {most:g} needed")
    return result


def without_comments(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    for token in tokenize.generate_tokens(iter([f"{line}\n" for line in lines]).__next__):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return lines


def digest() -> str:
    """Digest of the sources that the result proves, without their comments."""
    files = [path for name in PROVED for path in sorted(ROOT.glob(name))]
    parts = (path.name + "".join(without_comments(path)) for path in (*files, Path(__file__)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@click.command()
@click.option("--seed", default=20261125, show_default=True)
@click.option("--only", default="", help="Cells whose name has this text; nothing is written.")
def main(seed: int, only: str) -> None:
    """Simulate every condition and write docs/data/trust.json."""
    started, proved, rows = time.perf_counter(), digest(), []
    chosen = [cell for cell in CELLS if only in cell.name]
    with ProcessPoolExecutor() as pool:
        for row in pool.map(measure, chosen, [seed] * len(chosen)):
            rows.append(row)
            click.echo(f"{time.perf_counter() - started:5.1f} s {row}")
    missed = failures(rows)
    if not only:
        result = {"about": dataclasses.asdict(about()), "digest": proved, "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for line in missed:
        click.echo(line, err=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
