"""A compiled step on a card, as inductor writes it: each weight is read once, as it is stored.

Without a card: tests/run/card_code.py. `make gpu-compile` reads every scheme.
"""

import json
import sys

import pytest
import torch

from quantbench.quantize.spec import SHOWN
from tests.programs import python

# Launches of a step of two layers by the scheme's first letters, the last that fit: of one row, and
# of more. Our kernels take one more for each product, which puts x's columns into their order.
# A ratchet: lower it where a launch goes.
LAUNCHES = {
    "": (33, 33), "none": (27, 31), "int8wo": (27, 33), "embed-int8": (27, 33),
    "float8wo": (27, 33), "float8dq": (33, 46), "int8dq": (39, 39), "int8dq-int4wo": (44, 44),
    "int4wo": (33, 50), "bnb": (35, 46),
}  # fmt: skip
# Calls in place of code that inductor writes, and rightly: kernels of torchao's schemes.
KERNELS = {"aten._weight_int4pack_mm", "aten._scaled_mm", "aten._int_mm"}
# Scheme, rows, cache, model, each of another kind: inductor's product and an fp8 cache, our kernel
# in its place, torchao's, and attention that caps its scores; on 8.0, which reads E4M3 by its bits.
CASES = [
    ["int8wo", 1, "fp8"], ["float8wo", 2], ["int4wo-64", 1], ["none", 1, "dense", "gemma-2-2b"],
]  # fmt: skip
ROWS = (1, 2, 8, 64)
ALL = [[scheme, rows, "dense"] for scheme in SHOWN for rows in ROWS] + [
    ["none", rows, cache] for rows in ROWS for cache in ("int8", "fp8", "int4")
]


def checked(capability: int, cases: list[list]) -> None:
    """Raises AssertionError for a case that copies, waits or launches too much."""
    ended = python("-m", "tests.run.card_code", capability, json.dumps(cases))
    made = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(made) == len(cases), ended.stderr[-3000:]
    for step in made:
        scheme, rows = step["case"][:2]
        most = [most for name, most in LAUNCHES.items() if scheme.startswith(name)][-1][rows > 1]
        assert step["partitions"] == 1 and not step["waits"], step
        assert not set(step["eager"]) - KERNELS, step
        assert not step["large"] or (scheme, rows) in REPACKED, step
        assert step["launches"] <= most, step


# From 64 rows on our kernel reads tinygemm's tiles in its own order: codes, which are few bytes.
REPACKED = {(scheme, 64) for scheme in SHOWN if scheme.startswith("int4wo")}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="has a card")
def test_a_step_reads_each_weight_once():
    pytest.importorskip("triton")
    checked(80, CASES)


if __name__ == "__main__":
    for case in ALL:
        checked(int(sys.argv[1]), [case])
