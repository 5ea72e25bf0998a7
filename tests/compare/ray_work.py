"""What tasks do in the test of a Ray cluster: measure nothing, and wait to be killed."""

import dataclasses
import json
import os
import time
from pathlib import Path

from quantbench.compare.figures.latency import Cell, LatencySample
from quantbench.compare.sampling.latency_plan import LatencyPlan
from quantbench.compare.sampling.latency_ray import node
from quantbench.compare.sampling.latency_results import TableResult
from quantbench.typed_json import from_json, to_json
from tests.compare.latency_folders import CARRIED, MODEL


def work(plan, timeout):
    """Writes the node's name into the folder that the model is named after; then `slow` waits until
    its node is killed, if it is the first attempt, and `lost` at every attempt."""
    import ray

    made = from_json(LatencyPlan, json.loads(plan))
    (load,) = made.loads
    folder = Path(load.model)
    mine = ray.get_runtime_context().get_node_id()
    journal = folder / load.arm.name
    with open(journal, "a") as file:
        file.write(f"{mine} {os.environ['OMP_NUM_THREADS']}\n")
    first = len(journal.read_text().splitlines()) == 1
    if load.arm.name == "lost":
        os._exit(1)
    if load.arm.name == "slow" and first:
        time.sleep(300)
    carried = dataclasses.replace(CARRIED, machine=node())
    sample = LatencySample(0.1, [0.02] * (made.decode_length - 1))
    cells = [Cell(size, [sample] * made.runs) for size in made.batch_sizes]
    tables = [
        TableResult(*load.key, length, MODEL, carried, cells) for length in made.sequence_lengths
    ]
    return json.dumps(to_json(tables))
