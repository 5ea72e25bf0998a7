"""By how much loading a saved mixture raises the resident set, at its highest; bytes, as JSON.

    python -m tests.experts.saved_peak FOLDER SMALL

A smaller one is loaded first, for whatever is imported or allocated once.
"""

import json
import sys

import torch

from quantbench.log.config import RunConfig
from quantbench.models.llama import weight_bytes
from quantbench.run import loading
from quantbench.run.plan import make_plan
from tests.run.loading_peak import peak_of


def load(folder: str):
    options = {"checkpoint_path": folder, "device": "cpu", "expert_memory": "4"}
    plan = make_plan(RunConfig(**options, expert_policy="fetch"))
    return loading.load(plan, lambda done, total: None, lambda line: None).model


def main(folder: str, small: str) -> None:
    load(small)
    model, peak = peak_of(lambda: load(folder))
    print(json.dumps({"peak": peak, "weights": weight_bytes(model)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        main(*sys.argv[1:])
