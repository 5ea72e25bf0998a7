"""How C++ lays packed weights out: as its README draws it, with the numbers that Python repeats.
What cannot be packed, and a header that does not fit, is refused, before it is read past its end.

The header's fields are those of `Header` in ops/cpu/src/linear/layout.h.
"""

import ctypes
import dataclasses
import re
import struct

import pytest
import torch

from quantbench.errors import KernelError
from quantbench.ops.cpu import build, linear
from quantbench.ops.formats import Packed
from quantbench.ops.packing import unpack
from tests.ops.instructions import NEEDS_COMPILER
from tests.ops.packed_weights import FORMATS, name, packed

pytestmark = NEEDS_COMPILER

# Fields of the header → where they lie, and as what.
FIELDS = {
    **{"magic": (0, "Q"), "rows": (8, "q"), "columns": (16, "q"), "coding": (24, "i")},
    **{"bits": (28, "i"), "scales": (32, "i"), "scale_columns": (36, "i"), "zeros": (40, "i")},
    "rounding": (44, "i"),
}
DRAWN = re.compile(r"^ *(\d+) +row +(\d+), column +(\d+) +row +(\d+), column +(\d+)$", re.M)


def test_a_unit_of_4_bits_lies_as_the_readme_draws_it():
    weight = packed(("int", 4, 32), 16, 64)  # two chunks of one unit; the test reads the first
    codes = unpack(weight.planes, 4)
    scales = 16 * 2  # bfloat16, one a row: the group is the unit
    begin = linear.HEADER + scales
    unit = linear.pack(weight, 64)[begin : begin + 256].tolist()
    drawn = [
        [int(x) for x in line] for line in DRAWN.findall((build.SOURCES / "README.md").read_text())
    ]
    assert len(drawn) == 12 and drawn[-1][0] == len(unit) - 1 == 255
    for byte, low_row, low_column, high_row, high_column in drawn:
        low, high = codes[low_row, low_column], codes[high_row, high_column]
        assert unit[byte] == int(low) | int(high) << 4
    for byte in range(256):  # and the sentence above the table
        row, column = byte % 64 // 4, byte // 64 * 8 + byte % 4
        assert unit[byte] == int(codes[row, column]) | int(codes[row, column + 4]) << 4


def test_python_repeats_the_numbers_of_cpp():
    library = build.load()
    library.quantbench_layout.restype = ctypes.POINTER(ctypes.c_int64)
    roundings = list(linear.ROUNDINGS.values())
    wanted = [linear.ROWS, linear.UNIT, linear.LARGEST_CHUNK, linear.HEADER, *roundings]
    assert library.quantbench_layout()[: len(wanted)] == wanted


@pytest.mark.parametrize("form", FORMATS, ids=name)
def test_sizes_on_the_meta_device_are_those_of_cpp(form):
    for N, K in ((1, 128), (33, 256), (16, 512)):
        weight = packed(form, N, K)
        meta = on_meta(weight)
        assert linear.pack(meta, K).shape == linear.pack(weight, K).shape


def on_meta(weight: Packed) -> Packed:
    tensors = {
        field.name: torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to("meta"), getattr(weight, field.name)
        )
        for field in dataclasses.fields(weight)
    }
    return Packed(**tensors)


def changed(packed_bytes: torch.Tensor, **fields: int) -> torch.Tensor:
    data = bytearray(packed_bytes.numpy().tobytes())
    for field, value in fields.items():
        offset, kind = FIELDS[field]
        struct.pack_into(f"<{kind}", data, offset, value)
    return torch.frombuffer(data, dtype=torch.uint8)


BROKEN = {  # message → headers
    "no weight packed": [{"magic": 1}],
    "no such scales": [
        *({"scale_columns": number} for number in (0, -32, 12, 512)),
        *({"scales": 5}, {"scales": 0, "scale_columns": 64}, {"zeros": 3}),
    ],
    "no such format": [  # 1 and 5: floats of 6 bits and of 8, the weight having 4
        *({"bits": number} for number in (0, 9, -4)),
        *({"coding": number} for number in (9, -1, 1, 5)),
    ],
    "no such rounding": [{"rounding": 3}],
    "size": [
        *({"rows": number} for number in (-1, 17, 2**62)),
        *({"columns": number} for number in (-1, 2**62)),
        *({"rows": 2**40, "columns": 2**40}, {"zeros": 1}),
    ],
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_header_that_does_not_fit_is_an_error(message):
    right = linear.pack(packed(("int", 4, 32), 16, 64), 64)
    x = torch.randn(1, 64)
    for fields in BROKEN[message]:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.quantbench.cpu_linear(x, changed(right, **fields), fields.get("rows", 16))
    assert linear.linear(x, changed(right), 16).shape == (1, 16)


ROWS, COLUMNS = 32, 64


WRONG = {
    "a format that nothing knows": {"format": "int4-of-mine"},
    "half of the columns": {"planes": [torch.zeros(ROWS, 16, dtype=torch.uint8)]},
    "a missing plane": {"bits": 6},
    "a plane too many": {"planes": [torch.zeros(ROWS, 32, dtype=torch.uint8)] * 2},
    "fewer rows of scales": {"scale": torch.ones(8, 2, dtype=torch.bfloat16)},
    "fewer scales": {"scale": torch.ones(ROWS, 1, dtype=torch.bfloat16)},
    "fewer zeros": {"zero": torch.ones(ROWS, 1, dtype=torch.bfloat16)},
    "scales of 8 bits alone": {"scale": torch.ones(ROWS, 2, dtype=torch.int8)},
    "what multiplies floats": {"outer": torch.ones(ROWS, 1, 2, dtype=torch.half)},
    "larger groups": {"group_size": 64},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_packed_is_refused(case):
    weight = packed(("int", 4, 32), ROWS, COLUMNS)
    assert linear.pack(weight, COLUMNS).numel() > ROWS * COLUMNS // 2
    with pytest.raises(KernelError, match="takes tensors|knows no format int4-of-mine"):
        linear.pack(dataclasses.replace(weight, **WRONG[case]), COLUMNS)
    with pytest.raises(KernelError, match="takes tensors"):
        linear.pack(weight, 2 * COLUMNS)
