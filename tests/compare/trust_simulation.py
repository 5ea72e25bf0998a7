"""How often the statistics err and find, on thousands of simulated runs whose truth is known.

    python -m tests.compare.trust_simulation --trials 4000 --output docs/data/trust_simulated.json

A simulated run has the parts that docs/LOG.md has measured: processes of one arm that differ for as
long as they live (1.5 %), an effect of the order of loading, samples that scatter, steps that are
late, a machine that drifts; and it is stopped by plan.py with a budget of MOST_BLOCKS processes an
arm. Side by side, samples of all arms alternate; in turn, each process runs alone, the baseline
before and after (with eight arms, after every three). Every share has its Clopper-Pearson bounds.
The command exits with 1 where a requirement is missed.
"""

import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from scipy import stats

from quantbench.compare.figures.contrasts import LEAST_FREEDOM, Contrasts, Fit, fit
from quantbench.compare.figures.families import (
    FALSE_VERDICTS,
    against_baseline,
    against_best,
    critical,
)
from quantbench.compare.figures.plan import Look, Plan, arms_to_drop, shown
from quantbench.log.about import about

Array = np.ndarray
MOST_BLOCKS = 16
SAMPLES, STEPS = 5, 32  # of a process
SAMPLE_NOISE = 0.01  # relative standard deviation of a sample, common to its steps
STEP_NOISE = 0.03
LATE_SHARE, LATE_BY = 0.02, 1.0  # of all arms' steps; mean further time, in steps, exponential
TAIL_SHARE, TAIL_BY, TAIL_INDEX = 0.09, 2.0, 2.5  # of the heavy-tailed arm: Pareto
ORDER = 0.005  # slower, the arm that is loaded first; alternates
LOADING = 2.0  # samples' time that loading an arm takes
ARMS_BETWEEN_BASELINES = 3
FALSE_UPPER, COVERAGE, POWER = 0.05, 0.93, 0.95  # see `failures`


@dataclass(frozen=True)
class Cell:
    """A condition. `effects`: log ratios of the candidates; `heavy`: arms with a heavy tail whose
    mean is nevertheless as given; `drift`: peak to peak, `jump`: a step of the machine's speed;
    `stays`: in turn, the baseline is one process for a whole block."""

    name: str
    effects: tuple[float, ...] = (0.0,)
    in_turn: bool = False
    between: float = 0.015
    heavy: tuple[int, ...] = ()
    drift: float = 0.0
    jump: float = 0.0
    most_blocks: int = MOST_BLOCKS
    stays: bool = False


@dataclass(frozen=True)
class Runs:
    """T simulated runs of P blocks and J arms, the arguments of `Contrasts` for each.

    `values` (T, P, J), `weights` (P, J, K), `noise` (T, P, J + 1) of each process.
    """

    values: Array
    weights: Array
    noise: Array


@dataclass(frozen=True)
class Ended:
    """What one simulated run ended with."""

    looks: list[Look]
    fitted: Fit
    processes: int  # of candidates, in all


def cells(in_turn: bool) -> list[Cell]:
    three, five, thirty = (math.log(1 + share) for share in (0.03, 0.05, 0.30))
    mixed = (0.0, five, -five, three, thirty, -thirty, -math.log(1.35))
    listed = [
        Cell("equal"),
        Cell("3 %", (three,)),
        Cell("5 %", (five,)),
        Cell("30 %", (thirty,)),
        Cell("heavy tail, equal means", heavy=(1,)),
        Cell("heavy tail, 5 %", (five,), heavy=(1,)),
        Cell("heavy tail in the baseline", heavy=(0,)),
        Cell("drift 30 %, equal", drift=0.3),
        Cell("drift 30 %, 5 %", (five,), drift=0.3),
        Cell("speed jumps by 30 %, equal", jump=0.3),
        Cell("scatter 5 %, equal", between=0.05),
        Cell("scatter 5 %, 5 %", (five,), between=0.05),
        Cell("scatter 5 %, 5 %, 64 blocks", (five,), between=0.05, most_blocks=64),
        Cell("scatter 0.5 %, equal", between=0.005),
        Cell("8 arms, equal", (0.0,) * 7),
        Cell("8 arms, equal, scatter 5 %", (0.0,) * 7, between=0.05),
        Cell("8 arms, one with a heavy tail", (0.0,) * 7, heavy=(3,)),
        Cell("8 arms, baseline with a heavy tail", (0.0,) * 7, heavy=(0,)),
        Cell("8 arms, drift 30 %", (0.0,) * 7, drift=0.3),
        Cell("8 arms, mixed", mixed),
    ]
    if in_turn:
        listed += [
            Cell("8 arms, equal, the baseline stays loaded", (0.0,) * 7, stays=True),
            Cell(
                "32 arms, equal, 2 blocks, the baseline stays",
                (0.0,) * 31,
                most_blocks=2,
                stays=True,
            ),
            Cell(
                "32 arms, drift 30 %, 2 blocks", (0.0,) * 31, drift=0.3, most_blocks=2, stays=True
            ),
        ]
    return [dataclasses.replace(cell, in_turn=in_turn) for cell in listed]


def simulate(cell: Cell, trials: int, generator: np.random.Generator) -> Runs:
    """Process means as a run would have measured them."""
    arms = len(cell.effects) + 1
    order = _turns(arms) if cell.in_turn else list(range(arms))
    starts = _starts(order, cell)  # (P, processes of a block, SAMPLES)
    blocks = len(starts)
    machine = _machine(cell, trials, starts, generator)
    logs = np.zeros((trials, blocks, len(order)))
    noise = np.zeros_like(logs)
    staying = generator.standard_normal((trials, blocks)) * cell.between
    for place, arm in enumerate(order):
        means = _samples(cell, arm, (trials, blocks, SAMPLES), generator)
        means = means * np.exp(machine[:, :, place])
        effect = cell.effects[arm - 1] if arm else 0.0
        process = generator.standard_normal((trials, blocks)) * cell.between
        process = (staying if cell.stays and arm == 0 else process) + effect
        if not cell.in_turn:
            process = process + ORDER * (-1) ** np.arange(blocks) * (1 - 2 * place / (arms - 1))
        average = means.mean(-1)
        logs[:, :, place] = np.log(average) + process
        noise[:, :, place] = means.var(-1, ddof=1) / SAMPLES / average**2
    base = [place for place, arm in enumerate(order) if arm == 0]
    own = [order.index(arm) for arm in range(1, arms)]
    weights = _interpolation(starts.mean(-1), base, own)
    values = logs[:, :, own] - np.einsum("pjk,tpk->tpj", weights, logs[:, :, base])
    if cell.stays:  # as contrasts.contrasts has it of turns of one process
        weights = weights.sum(-1, keepdims=True)
    baseline_noise = noise[:, :, base].mean(-1, keepdims=True)
    return Runs(values, weights, np.concatenate([baseline_noise, noise[:, :, own]], -1))


def _turns(arms: int) -> list[int]:
    order = [0]
    for arm in range(1, arms):
        order.append(arm)
        if arm % ARMS_BETWEEN_BASELINES == 0 or arm == arms - 1:
            order.append(0)
    return order


def _starts(order: Sequence[int], cell: Cell) -> Array:
    """When each sample is taken, as a share of MOST_BLOCKS blocks' time."""
    processes, blocks = len(order), cell.most_blocks
    sample = np.arange(SAMPLES)
    if cell.in_turn:
        place = np.arange(processes)[:, None] * (SAMPLES + LOADING) + sample
        length = processes * (SAMPLES + LOADING)
    else:  # in rounds, one way and then the other
        forward = np.arange(processes)[:, None] + processes * sample
        backward = processes - 1 - np.arange(processes)[:, None] + processes * sample
        place = np.where(sample % 2 == 0, forward, backward) + LOADING * processes
        length = processes * (SAMPLES + LOADING)
    times = np.arange(blocks)[:, None, None] * length + place
    result: Array = times / (MOST_BLOCKS * length)
    return result


def _machine(cell: Cell, trials: int, starts: Array, generator: np.random.Generator) -> Array:
    """Logarithm of how slow the machine is, (T, P, processes, SAMPLES): waves of half to two
    periods a run, and a jump at any moment of its first half."""
    shape = (trials, 1, 1, 1)
    periods, phase = generator.uniform(0.5, 2, shape), generator.uniform(0, 2 * np.pi, shape)
    waves = cell.drift / 2 * np.sin(2 * np.pi * periods * starts + phase)
    jump = math.log1p(cell.jump) * (starts > generator.uniform(0, 0.5, shape))
    return np.asarray(waves + jump)


def _samples(cell: Cell, arm: int, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Seconds per token of each sample, expectation 1."""
    noise = 1 + generator.standard_normal(shape) * math.hypot(
        SAMPLE_NOISE, STEP_NOISE / math.sqrt(STEPS)
    )
    if arm not in cell.heavy:
        late = generator.binomial(STEPS, LATE_SHARE, shape)
        further = generator.standard_gamma(np.maximum(late, 1e-300)) * LATE_BY / STEPS
        return np.asarray((noise + further) / (1 + LATE_SHARE * LATE_BY))
    late_steps = generator.random((*shape, STEPS)) < TAIL_SHARE
    lengths = generator.pareto(TAIL_INDEX, late_steps.shape) + 1
    lengths *= TAIL_BY * (TAIL_INDEX - 1) / TAIL_INDEX
    further = (late_steps * lengths).mean(-1)
    return np.asarray((noise + further) / (1 + TAIL_SHARE * TAIL_BY))


def _interpolation(times: Array, base: Sequence[int], own: Sequence[int]) -> Array:
    """Weights (P, J, K) of the baselines around each arm, linear in time."""
    weights = np.zeros((len(times), len(own), len(base)))
    for block, row in enumerate(times):
        for column, place in enumerate(own):
            for number in range(len(base)):
                unit = np.eye(len(base))[number]
                weights[block, column, number] = np.interp(row[place], row[list(base)], unit)
    return weights


def run(cell: Cell, runs: Runs, trial: int) -> Ended:
    """One run, stopped by the plan, its beaten arms dropped."""
    arms = len(cell.effects)
    plan = Plan(arms, cell.most_blocks)
    values = runs.values[trial].copy()
    looks: list[Look] = []
    blocks: int | None = plan.first_blocks
    while blocks is not None:
        fitted = fit(part(runs, values, trial, blocks))
        looks.append(plan.look(looks, fitted))
        if arms > 1:
            for arm in arms_to_drop(looks, against_best(fitted, looks[-1].level), plan.precision):
                values[blocks:, arm - 1] = np.nan
        blocks = plan.next_blocks(looks, fitted)
    measured = values[: looks[-1].blocks]
    return Ended(looks, fitted, int(np.isfinite(measured).sum()))


def part(runs: Runs, values: Array, trial: int, blocks: int) -> Contrasts:
    """The first blocks of a run."""
    arms = tuple(range(1, values.shape[-1] + 1))
    noise = runs.noise[trial, :blocks].mean(0)
    return Contrasts(arms, values[:blocks], runs.weights[:blocks], noise)


def measure(cell: Cell, trials: int, generator: np.random.Generator) -> dict[str, Any]:
    """Counts and bounds of a cell's requirements."""
    counts = dict.fromkeys(("false", "found", "effects", "found_at"), 0)
    arms = len(cell.effects)
    covered = {name: np.zeros(arms, int) for name in ("shown", "95", "95_unspent")}
    best_kept = candidates = 0
    blocks: list[int] = []
    processes = 0
    for runs in _chunks(cell, trials, generator):
        for trial in range(len(runs.values)):
            ended = run(cell, runs, trial)
            _count(cell, ended, counts, covered)
            blocks.append(ended.looks[-1].blocks)
            processes += ended.processes
            if len(cell.effects) > 1:
                best = [b.arm for b in against_best(ended.fitted) if b.can_be_best]
                fastest = int(np.argmin([0.0, *cell.effects]))
                best_kept += fastest in best
                candidates += len(best)
    row: dict[str, Any] = {
        "cell": cell.name,
        "mode": "in turn" if cell.in_turn else "side by side",
        "trials": trials,
        "most_blocks": cell.most_blocks,
        "blocks_mean": round(float(np.mean(blocks)), 1),
        "blocks_90th_percentile": int(np.percentile(blocks, 90)),
        "processes_per_candidate": round(processes / trials / len(cell.effects), 1),
        "samples_per_process": SAMPLES,
        "false_verdicts": bounds(counts["false"], trials),
    }
    for name, count in covered.items():  # of the arm that fares worst
        row[f"coverage_{name}"] = bounds(int(count.min()), trials)
    if counts["effects"]:
        row["found"] = bounds(counts["found"], counts["effects"])
        row["found_after_blocks_mean"] = round(counts["found_at"] / max(1, counts["found"]), 1)
        row["five_percent_needs_blocks"] = blocks_needed(cell, generator)
    if len(cell.effects) > 1:
        row["fastest_among_candidates"] = bounds(best_kept, trials)
        row["candidates_mean"] = round(candidates / trials, 1)
    return row


def _chunks(cell: Cell, trials: int, generator: np.random.Generator) -> Iterable[Runs]:
    size = 250
    for start in range(0, trials, size):
        yield simulate(cell, min(size, trials - start), generator)


def _count(cell: Cell, ended: Ended, counts: dict[str, int], covered: dict[str, Array]) -> None:
    """Add a run. A false verdict is a difference in the wrong direction, or where there is none.

    Coverage of the intervals that are shown; of those at 95 % with the level spent in the same way;
    and, as a warning, of a plain Student's t interval at the end of a run that widths have stopped.
    """
    last, intervals, wrong = ended.looks[-1], shown(ended.looks), False
    share = last.level / FALSE_VERDICTS
    spent = against_baseline(ended.fitted, 0.05 * share, len(cell.effects))
    for place, effect in enumerate(cell.effects):
        interval = intervals[place + 1]
        right = "no difference shown" if effect == 0 else ("faster" if effect < 0 else "slower")
        wrong |= interval.verdict not in (right, "no difference shown")
        covered["shown"][place] += interval.low <= math.exp(effect) <= interval.high
        covered["95"][place] += spent[place].low <= math.exp(effect) <= spent[place].high
        error, freedom = ended.fitted.standard_errors[place], int(ended.fitted.freedom[place])
        reach = critical(0.05, 1, freedom) * error if freedom >= LEAST_FREEDOM else math.inf
        missed = abs(ended.fitted.log_ratios[place] - effect) > reach
        covered["95_unspent"][place] += not missed
        if abs(effect) >= math.log(1.05) * 0.999:
            counts["effects"] += 1
            if interval.verdict == right:
                counts["found"] += 1
                counts["found_at"] += _declared(ended.looks, place + 1)
    counts["false"] += wrong


def _declared(looks: Sequence[Look], arm: int) -> int:
    """Blocks at the first look that declared a difference of this arm."""
    return next(
        look.blocks
        for look in looks
        if any(
            interval.arm == arm and interval.verdict != "no difference shown"
            for interval in look.intervals
        )
    )


def bounds(count: int, trials: int, confidence: float = 0.95) -> dict[str, float]:
    """A share and its two-sided Clopper-Pearson bounds."""
    tail = (1 - confidence) / 2
    low = stats.beta.ppf(tail, count, trials - count + 1) if count else 0.0
    high = stats.beta.isf(tail, count + 1, trials - count) if count < trials else 1.0
    return {
        "share": round(count / trials, 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "count": count,
        "of": trials,
    }


def blocks_needed(cell: Cell, generator: np.random.Generator) -> int:
    """Blocks by which a look with half of the level finds 5 % in 95 of 100 runs, from the true
    scatter of the widest contrast: noncentral t."""
    runs = simulate(dataclasses.replace(cell, most_blocks=8), 400, generator)
    deviation = float(runs.values.std((0, 1)).max())
    arms = len(cell.effects)
    for blocks in range(2, 400, 2):
        freedom = arms * (blocks - 1)
        if freedom < LEAST_FREEDOM:
            continue
        limit = critical(FALSE_VERDICTS / 2, arms, freedom)
        shift = math.log(1.05) * math.sqrt(blocks) / deviation
        if stats.nct.sf(limit, freedom, shift) >= POWER:
            return blocks
    return 400


def somebody_watches(trials: int, generator: np.random.Generator) -> dict[str, Any]:
    """Equal arms: Ctrl-C after any block, then resumed to the plan's end, then extended thrice by
    8 blocks; wrong if any look ever declares a difference."""
    cell = Cell("equal", most_blocks=40)
    wrong = 0
    for runs in _chunks(cell, trials, generator):
        for trial in range(len(runs.values)):
            plan, looks = Plan(1, MOST_BLOCKS), list[Look]()
            values = runs.values[trial]
            blocks: int | None = plan.first_blocks
            while blocks is not None:
                fitted = fit(part(runs, values, trial, blocks))
                looks.append(plan.look(looks, fitted))
                blocks = plan.next_blocks(looks, fitted)
            ended = looks[-1].blocks
            for more in (8, 16, 24):
                looks.append(plan.look(looks, fit(part(runs, values, trial, ended + more))))
            for blocks in range(2, ended + 25):
                looks.append(plan.interrupted(fit(part(runs, values, trial, blocks))))
            verdicts = {one.verdict for look in looks for one in look.intervals}
            wrong += verdicts != {"no difference shown"}
    return {
        "cell": "somebody interrupts at every block and resumes thrice",
        "mode": "side by side",
        "trials": trials,
        "false_verdicts": bounds(wrong, trials),
    }


def failures(row: dict[str, Any]) -> list[str]:
    """Requirements that a cell misses: false verdicts ≤ 2 % with an upper bound ≤ 5 %, coverage of
    95 % intervals ≥ 93 %, 5 % found ≥ 95 % where the plan has enough blocks for it.

    A simulated share scatters, so it is held to its bound: it fails where the whole of its
    Clopper-Pearson interval lies on the wrong side, and, from 150 trials on, where the upper bound
    of false verdicts exceeds 5 %.
    """
    missed, name = [], f"{row['cell']}, {row['mode']}"
    false = row["false_verdicts"]
    if false["low"] > FALSE_VERDICTS or (false["of"] >= 150 and false["high"] > FALSE_UPPER):
        missed.append(f"{name}: false verdicts {false['share']:.1%}")
    for key in ("coverage_95", "coverage_shown"):
        if key in row and row[key]["high"] < COVERAGE:
            missed.append(f"{name}: {key} {row[key]['share']:.1%}")
    enough = row.get("five_percent_needs_blocks", math.inf) <= row.get("most_blocks", 0)
    if enough and row["found"]["high"] < POWER:
        missed.append(f"{name}: found {row['found']['share']:.1%}")
    return missed


@click.command()
@click.option("--trials", default=4000, show_default=True, help="Simulated runs in each cell.")
@click.option("--seed", default=None, type=int, help="Default: drawn, and written to the file.")
@click.option("--output", default="docs/data/trust_simulated.json", show_default=True)
@click.option("--only", default="", help="Only cells whose name contains this.")
def main(trials: int, seed: int | None, output: str, only: str) -> None:
    """Simulate every cell and write shares and bounds as JSON."""
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    generator = np.random.default_rng(seed)
    rows = []
    for cell in [cell for in_turn in (False, True) for cell in cells(in_turn)]:
        if only in cell.name:
            rows.append(measure(cell, trials, generator))
            click.echo(json.dumps(rows[-1]))
    if not only:
        rows.append(somebody_watches(max(1, trials // 8), generator))
        click.echo(json.dumps(rows[-1]))
    missed = [line for row in rows for line in failures(row)]
    words = ["python", "-m", "tests.compare.trust_simulation", "--trials", str(trials)]
    command = shlex.join([*words, "--seed", str(seed)])  # also where the seed was drawn
    document = {
        "about": dataclasses.asdict(dataclasses.replace(about(), command=command)),
        "seed": seed,
        "requirements_missed": missed,
        "cells": rows,
    }
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(json.dumps(document, indent=1) + "\n")
    sys.exit("\n".join(missed) if missed else 0)


if __name__ == "__main__":
    main()
