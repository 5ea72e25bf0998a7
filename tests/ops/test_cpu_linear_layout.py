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
from quantbench.ops.packing import unpack
from tests.models.refused import refuses
from tests.ops.instructions import NEEDS_COMPILER
from tests.ops.packed_weights import FORMATS, moved, name, packed

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
        assert linear.pack(moved(weight, "meta"), K).shape == linear.pack(weight, K).shape


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
    "no such rounding": [{"rounding": 3}, {"coding": 3, "rounding": 1}],  # 3: a table
    "size": [
        *({"rows": number} for number in (-1, 17, 2**62)),
        *({"columns": number} for number in (-1, 2**62)),
        *({"rows": 2**40, "columns": 2**40}, {"zeros": 1}),
    ],
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_header_that_does_not_fit_is_an_error(message):
    right = linear.pack(packed(("int", 4, 32), 16, 64), 64)

    def multiply(**fields):
        data, rows = changed(right, **fields), fields.get("rows", 16)
        return torch.ops.quantbench.cpu_linear(torch.randn(1, 64), data, rows)

    refuses(multiply, ((fields, message) for fields in BROKEN[message]))
    assert multiply().shape == (1, 16)


ROWS, COLUMNS = 32, 64


def filled(rows, columns, dtype=torch.bfloat16, last=1):
    """A scale or a zero of 1 for each group, but for the last one."""
    numbers = torch.ones(rows, columns).to(dtype)
    numbers[-1, -1] = last
    return numbers


WRONG = {  # message → changes of a weight of int4 in groups of 32
    "knows no format int4-of-mine": [{"format": "int4-of-mine"}],
    "takes tensors": [
        {"planes": [torch.zeros(ROWS, 16, dtype=torch.uint8)]},  # half of the columns
        {"bits": 6},  # a plane is missing
        {"planes": [torch.zeros(ROWS, 32, dtype=torch.uint8)] * 2},
        *({"scale": filled(*shape)} for shape in ((8, 2), (ROWS, 1))),
        {"zero": filled(ROWS, 1)},
        {"scale": filled(ROWS, 2, torch.int8)},  # nothing multiplies codes
        {"outer": torch.ones(ROWS, 1, 2, dtype=torch.half)},  # multiplies no codes
        {"group_size": 64},
    ],
    "multiples of 8": [{"group_size": 4, "scale": filled(ROWS, 16)}],
    "NaN or infinite": [
        *({"scale": filled(ROWS, 2, last=bad)} for bad in (torch.nan, torch.inf, -torch.inf)),
        *({"zero": filled(ROWS, 2, last=bad)} for bad in (torch.nan, torch.inf, -torch.inf)),
        {"format": "fp8", "bits": 8, "planes": [filled(ROWS, 64, torch.float8_e4m3fn, torch.nan)]},
    ],
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_packed_is_refused(message):
    weight = packed(("int", 4, 32), ROWS, COLUMNS)
    assert linear.pack(weight, COLUMNS).numel() > ROWS * COLUMNS // 2
    for changes in WRONG[message]:
        with pytest.raises(KernelError, match=message):
            linear.pack(dataclasses.replace(weight, **changes), COLUMNS)
    with pytest.raises(KernelError, match="takes tensors"):
        linear.pack(weight, 2 * COLUMNS)
