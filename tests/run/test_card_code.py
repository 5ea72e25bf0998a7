"""A compiled step on a card, as inductor writes it: each weight is read once, as it is stored.

Without a card: tests/run/card_code.py. `make gpu-compile` reads every scheme.
"""

import json
import sys

import pytest
import torch

from quantbench.quantize.spec import SHOWN
from tests.programs import python

# A step of LAYERS layers: the embedding, rotations, the last norm with the output, the draw and the
# next position take 5 launches. The others are at most so many a layer, by scheme: of one row.
OUTSIDE, LAYERS = 5, 2
A_LAYER = {"none": 11, "int8wo": 11, "float8wo": 11, "int4wo": 11, "int8dq-int4wo": 20}
ANY = 16  # of every other scheme, and of every number of rows; the parts outside are quantized too
# Calls in place of code that inductor writes, and rightly: kernels of torchao's schemes.
KERNELS = {"aten._weight_int4pack_mm", "aten._scaled_mm", "aten._int_mm"}
CASES = {  # compute capability: scheme, rows, cache, model
    90: [["int8wo", 1], ["int8wo", 8], ["int8dq", 64], ["int4wo-64", 1]],
    80: [["float8wo", 2], ["mxfp4", 1, "fp8"], ["none", 1, "dense", "gemma-2-2b"]],
}
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
        known = [most for name, most in A_LAYER.items() if scheme.startswith(name)]
        a_layer = max(known, default=ANY) if rows == 1 else ANY + 4
        assert step["partitions"] == 1 and not step["waits"], step
        assert not set(step["eager"]) - KERNELS, step
        assert not step["large"] or (scheme, rows) in REPACKED, step
        assert step["launches"] <= OUTSIDE + ANY + LAYERS * a_layer, step


# From 64 rows on our kernel reads tinygemm's tiles in its own order: codes, which are few bytes.
REPACKED = {(scheme, 64) for scheme in SHOWN if scheme.startswith("int4wo")}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="has a card")
@pytest.mark.parametrize("capability", CASES)
def test_a_step_reads_each_weight_once(capability):
    pytest.importorskip("triton")
    checked(capability, CASES[capability])


if __name__ == "__main__":
    for case in ALL:
        checked(int(sys.argv[1]), [case])
