"""What cpu_pack_linear refuses: unknown formats, and sizes that would be read past their end."""

import pytest
import torch

from quantbench.ops.cpu import build
from quantbench.ops.cpu import linear as linear  # defines the op

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))
ROWS, COLUMNS = 32, 64


def given(**changes):
    """The arguments for a weight of 4 bits with a scale for every 32 columns."""
    usual = {
        "plane0": torch.zeros(ROWS, COLUMNS // 2, dtype=torch.uint8),
        "plane1": None,
        "plane2": None,
        "scale": torch.ones(ROWS, COLUMNS // 32, dtype=torch.bfloat16),
        "zero": None,
        "table": None,
        "format": "int",
        "columns": COLUMNS,
        "bits": 4,
        "scale_columns": 32,
        "factor": 1.0,
        "rounding": 0,
    }
    return usual | changes


WRONG = {
    "a format that nothing knows": ({"format": "int4-of-mine"}, "knows no format int4-of-mine"),
    "no table": ({"format": "nf4"}, "table"),
    "a table too many": ({"table": torch.zeros(16, dtype=torch.int32)}, "table"),
    "a short table": ({"format": "nf4", "table": torch.zeros(8, dtype=torch.int32)}, "table"),
    "half of the columns": ({"plane0": torch.zeros(ROWS, 16, dtype=torch.uint8)}, "plane 0"),
    "a missing plane": ({"bits": 6}, "plane 1 is missing"),
    "a plane too many": ({"plane1": torch.zeros(ROWS, 16, dtype=torch.uint8)}, "one too many"),
    "fewer rows of scales": ({"scale": torch.ones(8, 2, dtype=torch.bfloat16)}, "scales have to"),
    "fewer scales": ({"scale": torch.ones(ROWS, 1, dtype=torch.bfloat16)}, "scales have to"),
    "fewer zeros": ({"zero": torch.ones(ROWS, 1, dtype=torch.bfloat16)}, "zeros"),
    "wider columns": ({"columns": 128}, "plane 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_and_nothing_is_read(case):
    changes, why = WRONG[case]
    build.load()
    with pytest.raises(RuntimeError, match=why):
        torch.ops.quantbench.cpu_pack_linear(*given(**changes).values())


def test_what_fits_is_packed():
    build.load()
    assert torch.ops.quantbench.cpu_pack_linear(*given().values()).numel() > ROWS * COLUMNS // 2
