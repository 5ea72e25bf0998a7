"""How often the statistics err, on simulated sessions whose truth is known.

    python -m tests.trust.simulation     # minutes; docs/data/trust.json and the table of results.md

A session is bench.session.Session with the rule that ab and recommend have (compare/stop.py):
cycles, groups, restarts and the end are theirs. Its workers have no model. The machine has states
of 0.5 to 30 s (log-uniform) in which memory is faster or slower; an arm's seconds follow memory's
with an exponent from 0, not at all, to 1. Every arm has noise that lasts about a second, noise of
single turns, turns that are late, and processes that differ. Further kinds of machine are drawn as
arrays, without sessions (schedules.py).

The truth of an arm is its ratio in the long run: over all states that the machine has, and all
processes. A session that meets one state alone cannot know of the others, so some cells err more
often than promised: `beyond` says why.

Exits with 1 where a requirement is shown to be missed. The JSON has the digest of the sources.
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
from bisect import bisect, bisect_left
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

from quantbench.bench.answers import TurnTime
from quantbench.bench.session import Rule, Session
from quantbench.bench.store import ArmResult, Results, Settings, Store
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits
from quantbench.compare.stop import Enough
from quantbench.log.origin import Origin, about
from tests.bench.world import Behaviour, FakeProcess, World
from tests.trust import schedules

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "docs/data/trust.json", ROOT / "docs/results.md"
COMMAND = "make trust"
PROVED = ("quantbench/stats/*.py", "quantbench/compare/stop.py", "quantbench/compare/intervals.py",
          "quantbench/bench/session.py", "tests/trust/schedules.py")  # fmt: skip

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
BURST_SECONDS, BURST_SLOWER = 0.15, 1.3  # of the machine, which slow all arms alike
READING = 0.025  # seconds that a reading of the memory's speed takes, before each cycle
# Demanded: of shares of sessions that err, and of its upper bound; coverage; a half-width; by how
# much the place in the order may move equal arms.
ERRS, ERRS_AT_MOST, COVERS, DEMO_WIDTH, MOVED = 0.05, 0.08, 0.93, 0.08, 0.002

# Why a cell may err more often: limits of the method, which the documentation lists.
UNMET = "states as long as the session, which it did not all meet"
UNASSUMED = "processes that differ by more than is assumed"


@dataclass(frozen=True)
class Cell:
    """A condition. `effects`: log ratios of all arms but the baseline."""

    name: str
    effects: tuple[float, ...] = (0.0,)
    minutes: float = 1.0  # --max_minutes
    exponents: tuple[float, ...] = ()  # of every arm, the baseline first; empty: drawn from 0 to 1
    state_seconds: tuple[float, float] = STATE_SECONDS
    state_deviation: float = STATE_DEVIATION
    bursts: float = 0.0  # a second: short ones that hit whatever turn runs
    cycles: int | None = None  # of one process, in the place of the rule
    drift: float = 0.0  # of the logarithm of memory's speed, over the minutes
    heavy: tuple[int, ...] = ()  # arms with a heavy tail, 0 is the baseline
    between: tuple[float, float] = (0.015, 0.015)  # deviation of processes: uniform per machine
    beside: int = 100  # arms that fit into memory together
    answer_only: bool = False  # as recommend
    trials: int = 120
    half_width: float = math.inf  # required of the median
    beyond: str | None = None  # which limit of the method lets it err more often

    def __post_init__(self) -> None:
        """States that do not fit into the session ten times, on the mean, are not all met."""
        low, high = self.state_seconds
        if self.beyond is None and 60 * self.minutes < 10 * (high - low) / math.log(high / low):
            object.__setattr__(self, "beyond", UNMET)


def ratios(*values: float) -> tuple[float, ...]:
    return tuple(math.log(value) for value in values)


MIXED = ratios(1.0, 0.95, 1.05, 0.7, 1.3, 2.0, 0.98)
CELLS = (
    Cell("2 arms, equal, 0.5 min", minutes=0.5, trials=300, beyond=UNMET),
    Cell("2 arms, equal, 1 min", trials=200),
    Cell("2 arms, equal, 5 min", minutes=5, trials=100),
    Cell("2 arms, 5 % slower, 1 min", ratios(1.05)),
    Cell("2 arms, 30 % slower, 0.5 min", ratios(1.3), 0.5),
    Cell(
        "2 arms, exponents 1 and 0, 0.5 min",
        minutes=0.5,
        exponents=(1.0, 0.0),
        trials=300,
        beyond=UNMET,
    ),
    Cell("2 arms, exponents 1 and 0, 5 min", minutes=5, exponents=(1.0, 0.0), trials=100),
    Cell(
        "2 arms, states of 1 to 2 min slow one by 8 %, 2 min",
        minutes=2,
        exponents=(0.0, 1.0),
        state_seconds=(60, 120),
        state_deviation=0.08,
        beyond=UNMET,
    ),
    Cell("2 arms, exponents 1 and 1, 1 min", exponents=(1.0, 1.0)),
    Cell("2 arms, heavy tail, 1 min", heavy=(1,)),
    Cell(
        "2 arms, heavy tail in the baseline, 0.5 min",
        minutes=0.5,
        heavy=(0,),
        trials=200,
        beyond=UNMET,
    ),
    Cell("2 arms, drift 30 %, 1 min", drift=0.3),
    Cell("2 arms, processes alike, 1 min", between=(0.0, 0.0)),
    Cell("2 arms, processes 0 to 5 %, 1 min", between=(0.0, 0.05), trials=200, beyond=UNASSUMED),
    Cell("2 arms, processes 5 %, 1 min", between=(0.05, 0.05), trials=200, beyond=UNASSUMED),
    Cell("demo: 4 arms, 2 min", ratios(0.6, 0.75, 1.3), 2, half_width=DEMO_WIDTH),
    Cell("4 arms, equal, 1 min", (0.0,) * 3),
    Cell("4 arms, equal, 1.5 bursts a second, 1 min", (0.0,) * 3, bursts=1.5),
    Cell(
        "4 arms, processes 0 to 5 %, 2 min",
        (0.0,) * 3,
        2,
        between=(0.0, 0.05),
        trials=80,
        beyond=UNASSUMED,
    ),
    Cell("8 arms, equal, 2 min", (0.0,) * 7, 2, trials=100),
    Cell("8 arms in groups of 3, mixed, 5 min", MIXED, 5, beside=3, trials=60),
    Cell("8 arms, mixed, recommend, 5 min", MIXED, 5, answer_only=True, trials=60),
    Cell("30 arms, equal, 5 min", (0.0,) * 29, 5, trials=60),
    Cell("30 arms, mixed, recommend, 5 min", (*MIXED * 4, 0.1), 5, answer_only=True, trials=60),
)

EVERY: tuple[Cell | schedules.Schedule, ...] = (*CELLS, *schedules.CELLS)


@dataclass
class Machine(World):
    """The machine of a cell, and its workers."""

    cell: Cell = Cell("")

    def __post_init__(self) -> None:
        super().__post_init__()
        draw, cell = self.random, self.cell
        self.start_of_session = self.now
        self.effects = (0.0, *cell.effects)
        count = len(self.effects)
        self.exponents = cell.exponents or tuple(draw.uniform(0, 1) for _ in range(count))
        # The session starts within a state, more likely within a long one.
        low, high = map(math.log, cell.state_seconds)
        lengths = [math.exp(draw.uniform(low, high)) for _ in range(1000)]
        lengths[0] = draw.choices(lengths, lengths)[0] * draw.random()
        self.ends, self.levels, end = [], [], self.now
        while end < self.now + 90 * cell.minutes + 300:
            end += lengths[len(self.ends) % len(lengths)]
            self.ends.append(end)
            self.levels.append(draw.gauss(0, cell.state_deviation))
        self.bursts, at = [], self.now
        while cell.bursts and at < self.ends[-1]:
            at += draw.expovariate(cell.bursts)
            self.bursts.append(at)

    def level(self, now: float) -> float:
        """The logarithm of memory's speed."""
        drifted = (now - self.start_of_session) / (60 * self.cell.minutes) - 0.5
        return self.levels[bisect(self.ends, now)] + self.cell.drift * drifted

    def burst(self, seconds: float) -> float:
        """Seconds that bursts add to a turn that takes `seconds` without them and starts now."""
        first = bisect_left(self.bursts, self.now - BURST_SECONDS)
        met = self.bursts[first : bisect_left(self.bursts, self.now + seconds, first)]
        covered = sum(min(at + BURST_SECONDS, self.now + seconds) - max(at, self.now) for at in met)
        return (BURST_SLOWER - 1) * covered

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
        seconds = tokens * STEP * math.exp(expected + noise) * self.factor
        seconds += world.burst(seconds)
        self.at = world.now = world.now + seconds
        return float(seconds)

    def bandwidth(self, device: str) -> Any:
        self.world.now += READING
        return super().bandwidth(device)


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


def simulate(cell: Cell, seed: int, between: float) -> tuple[Results, float]:
    """A session that has ended, and the seconds it took."""
    count = len(cell.effects) + 1
    arms = [Behaviour(between=between, loading=LOADING, fits_beside=cell.beside)] * count
    machine = Machine(arms, seed=seed, cell=cell)
    argv = ["--max_new_tokens", str(NEW_TOKENS)]
    named = [ArmResult(f"arm {number}", "", argv) for number in range(count)]
    settings = Settings(max_minutes=cell.minutes, tokens=0, cycles=cell.cycles)
    if cell.cycles:
        settings = dataclasses.replace(settings, processes=1)
    results = Results(settings, named)
    rule = Rule() if cell.cycles else Enough(Limits(), cell.answer_only)
    with (
        mock.patch("quantbench.bench.pool.Process", machine.start),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        clock = lambda: machine.now  # noqa: E731
        Session(Unwritten(results, None), rule, machine.command, clock=clock).run()
    return results, machine.now - machine.start_of_session


class Unwritten(Store):
    """A store that keeps no lines."""

    def add(self, event: object) -> None:
        self.results.apply(event)


def measure(cell: Cell | schedules.Schedule, seed: int) -> dict[str, Any]:
    """Counts and bounds of a cell's requirements, at the end of each session."""
    if isinstance(cell, schedules.Schedule):
        return schedules.judge(cell, seed, bounds)
    draw = random.Random(f"{seed} {cell.name}")
    counts = dict.fromkeys(("false", "covers", "best", "found", "plain"), 0)
    widths: list[float] = []
    seconds: list[float] = []
    for _ in range(cell.trials):
        results, spent = simulate(cell, draw.getrandbits(32), draw.uniform(*cell.between))
        found = Compared(results)
        arms = list(found.whole)
        truths = np.array([cell.effects[arm - 1] for arm in arms])
        low = np.log([max(found.whole[arm].low, 1e-300) for arm in arms])
        high = np.log([found.whole[arm].high for arm in arms])
        signs = np.where(low > 0, 1, np.where(high < 0, -1, 0))
        counts["false"] += bool(np.any((signs != 0) & (signs != np.sign(truths))))
        counts["covers"] += bool(np.all((low <= truths) & (truths <= high)))
        fastest = {n for n, t in zip([0, *arms], [0.0, *truths], strict=True)
                   if t == min(0.0, *truths)}  # fmt: skip
        counts["best"] += bool(fastest & found.best([0, *arms]))
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
        "fastest_kept": bounds(counts["best"], cell.trials),
        "five_percent_found": bounds(counts["found"], counts["plain"]),
        "half_width": round(float(np.median(widths)), 4),
        "seconds": round(float(np.median(seconds)), 1),
        "beyond": cell.beyond,
    }


def bounds(count: int, trials: int) -> dict[str, float]:
    """A share and its two-sided Clopper-Pearson bounds at 95 %."""
    if not trials:
        return {"share": 0.0, "low": 0.0, "high": 1.0}
    low, high = binomtest(count, trials).proportion_ci(0.95)
    return {"share": round(count / trials, 4), "low": round(low, 4), "high": round(high, 4)}


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each requirement that is missed. A cell whose `beyond` names a limit of the method
    may err more often; the documentation lists it with that reason."""
    cells = {cell.name: cell for cell in EVERY}
    result = []
    for row in rows:
        cell, wrong = cells[row["cell"]], row["false_verdicts"]
        shares = {
            "false verdicts": (wrong["share"], 0.0, ERRS),
            "false verdicts, upper bound": (wrong["high"], 0.0, ERRS_AT_MOST),
            "coverage": (row["covers"]["share"], COVERS, 1.0),
            "fastest kept": (row.get("fastest_kept", {"share": 1.0})["share"], 1 - ERRS, 1.0),
        }
        moved = max((abs(mean - 1) for mean in row.get("means", ())), default=0.0)
        widths = {"median half-width": (row["half_width"], 0.0, cell.half_width)}
        if getattr(cell, "bursts", 0) and not isinstance(cell, Cell):
            widths["equal arms moved by"] = (moved, 0.0, MOVED)
        for name, (value, least, most) in (({} if cell.beyond else shares) | widths).items():
            if not least <= value <= most:
                result.append(f"{cell.name}: {name} {value:.3f}, {least:g} to {most:g} needed")
    return result


BEGIN, END = "<!-- trust -->\n", "<!-- end of trust -->"


def table(rows: list[dict[str, Any]], origin: Origin) -> str:
    """Every kind of session, in Markdown; those beyond the method's limits last."""
    lines = ["| sessions | false verdicts | coverage | half-width |", "| --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: row["beyond"] or ""):
        why = f"; *{row['beyond']}*" if row["beyond"] else ""
        wrong = "{share:.1%} (at most {high:.1%})".format(**row["false_verdicts"])
        numbers = f"{wrong} | {row['covers']['share']:.1%} | {row['half_width']:.1%}"
        lines.append(f"| {row['sessions']} × {row['cell']}{why} | {numbers} |")
    return "\n" + "\n".join(lines) + f"\n\n{origin.caption()}\n\n"


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
@click.option("--jobs", default=2, show_default=True, help="Processes, a cell each.")
def main(seed: int, only: str, jobs: int) -> None:
    """Simulate every condition; write docs/data/trust.json and its table in docs/results.md."""
    started, proved, origin, rows = time.perf_counter(), digest(), about(), []
    cells = [cell for cell in EVERY if only in cell.name]
    with ProcessPoolExecutor(jobs) as pool:
        for row in pool.map(measure, cells, [seed] * len(cells)):
            rows.append(row)
            click.echo(f"{time.perf_counter() - started:5.1f} s {row}")
    missed = failures(rows)
    if not only:
        result = {"about": dataclasses.asdict(origin), "digest": proved, "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(rows, origin) + END + rest.partition(END)[2])
    for line in missed:
        click.echo(line, err=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
