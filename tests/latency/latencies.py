"""What `latency` measured, made up: turns around a speed, as its folder holds them."""

import dataclasses
import random

from quantbench.bench.store import Ended, Left, Planned, Started, Store, Turn
from quantbench.latency.answer import tables
from quantbench.latency.cell_plan import CellPlan
from quantbench.latency.cells import begin
from quantbench.run.energy import NotCounted
from quantbench.typed_json import from_json
from tests.bench.facts import arm_facts

MODEL, MACHINE = "made-up-1B", "2 cores of a CPU"


def plan(arms=("none", "int8wo"), **changes):
    planned = [Planned(name, f"--quantization {name}", ["--quantization", name]) for name in arms]
    settings = {"ranks": [1], "sequence_lengths": [100], "batch_sizes": [1, 2, 4]}
    settings |= {"models": ["tiny"], "decode_length": 3, "runs": 16}
    return CellPlan(**{"arms": planned, **settings, **changes})


def measured(slownesses, folder=None, seed=0, together=True, model=MODEL, why=None, **changes):
    """A Store of all cells of a plan. slownesses: seconds by arm, relative to 0.1 s a row of a
    prompt and 0.02 s a step. together: whether arms share cycles. why: of the first
    cell, why it failed."""
    made = plan(tuple(slownesses), **changes)
    numbers = random.Random(seed)
    results = begin(made)
    results.about = dataclasses.replace(results.about, machine=MACHINE)
    kept, cycle = Store(results, folder), 0
    for number, cell in enumerate(made.cells):
        config = dataclasses.replace(cell.config(made.decode_length), device="cpu")
        facts = arm_facts(config=config, model=model)
        energy = [NotCounted("no counter; power limit × time is an upper bound")]
        kept.add(Started(number, 0, dataclasses.replace(facts, energy=energy)))
    for first in range(0, len(made.cells), len(made.arms)):
        for _ in range(made.runs):
            state = numbers.uniform(0.7, 1.4)  # of the machine, in this cycle
            for arm, slowness in enumerate(slownesses.values()):
                own, size = first + arm, made.cells[first].batch_size
                at = cycle if together else cycle + 1000 * (arm + 1)

                def drawn(seconds, by=state * slowness):
                    return seconds * by * numbers.uniform(0.99, 1.01)

                steps = [drawn(0.02) for _ in range(made.decode_length - 1)]
                kept.add(Turn(own, 0, at, "prompt", 100, drawn(0.1 * size)))
                kept.add(Turn(own, 0, at, "decode", len(steps), sum(steps), steps))
            cycle += 1
    if why:
        kept.add(Left(0, why, failed=True))
    kept.add(Ended("complete", 1.0))
    return kept


def latencies(slownesses, **given):
    results = measured(slownesses, **given).results
    return tables(results, from_json(CellPlan, results.plan))
