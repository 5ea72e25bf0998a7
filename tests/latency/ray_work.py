"""What tasks do in the test of a Ray cluster: measure nothing, and wait to be killed."""

import json
import os
import time
from pathlib import Path

from quantbench.bench.store import Ended, Started, Store, Turn
from quantbench.latency.cell_plan import CellPlan
from quantbench.latency.cells import begin
from quantbench.typed_json import from_json
from tests.bench.facts import arm_facts


def work(task, timeout):
    """Writes the node's name into the folder that the model is named after; then `slow` waits until
    its node is killed, if it is the first attempt, and `lost` at every attempt."""
    import ray

    asked = json.loads(task)
    plan = from_json(CellPlan, asked["plan"])
    folder = Path(plan.cells[asked["cells"][0]].model)
    journal = folder / "journal"
    with open(journal, "a") as file:
        mine = ray.get_runtime_context().get_node_id()
        file.write(f"{mine} {os.environ['OMP_NUM_THREADS']}\n")
    first = len(journal.read_text().splitlines()) == 1
    if folder.name == "lost":
        os._exit(1)
    if folder.name == "slow" and first:
        time.sleep(300)
    kept = Store(begin(plan), None)
    for number in asked["cells"]:
        kept.add(Started(number, 0, arm_facts(), f"Ray node {mine[:8]} on a host"))
        for cycle in range(plan.runs):
            kept.add(Turn(number, 0, cycle, "prompt", 100, 0.1))
            kept.add(Turn(number, 0, cycle, "decode", 2, 0.04, [0.02, 0.02]))
    kept.add(Ended("complete", 1.0))
    kept.file.seek(0)
    return kept.file.read()
