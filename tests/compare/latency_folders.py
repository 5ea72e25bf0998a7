"""Results folders of `latency`, made up: seconds that are chosen, or drawn around a speed."""

import random

from quantbench.compare.figures.latency import Cell, LatencySample
from quantbench.compare.sampling.latency_plan import LatencyPlan, PlannedArm
from quantbench.compare.sampling.latency_results import (
    Carried,
    LatencyResults,
    ModelFacts,
    TableResult,
)

MODEL = ModelFacts("made-up-1B", 22, 2048, 32, 4, 5632, 32000)
CARRIED = Carried("2 cores of a CPU", "cpu", "torch.bfloat16", "cpu", "cpu-step", ["decode"], 10**9)


def plan(arms=("none", "int8wo"), **changes):
    planned = [
        PlannedArm(name, f"--quantization {name}", ["--quantization", name]) for name in arms
    ]
    settings = {
        "ranks": [1],
        "sequence_lengths": [100],
        "batch_sizes": [1, 2, 4],
        "decode_length": 3,
    }
    return LatencyPlan(models=["tiny"], arms=planned, **(settings | changes))


def drawn(batch_size, slowness, decode_length, runs, seed):
    """A cell of runs that scatter by a few percent."""
    numbers = random.Random(f"{seed} {batch_size} {slowness}")
    return Cell(
        batch_size,
        [
            LatencySample(
                0.1 * batch_size * slowness * numbers.uniform(0.97, 1.03),
                [0.02 * slowness * numbers.uniform(0.97, 1.03) for _ in range(decode_length - 1)],
            )
            for _ in range(runs)
        ],
    )


def results(slownesses, seed=0, runs=10, carried=CARRIED, model=MODEL, **changes):
    """A table for each arm (its seconds relative to 1), number of ranks and sequence length."""
    made = LatencyResults(plan(tuple(slownesses), runs=runs, **changes), ended="complete")
    for load in made.plan.loads:
        for length in made.plan.sequence_lengths:
            cells = [
                drawn(size, slownesses[load.arm.name], made.plan.decode_length, runs, seed + length)
                for size in made.plan.batch_sizes
            ]
            made.tables.append(
                TableResult(load.model, load.arm.name, load.ranks, length, model, carried, cells)
            )
    return made
