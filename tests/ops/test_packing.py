"""Bytes worked by hand, and that nothing is lost on the way there and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantbench.ops.packing import PLANES, columns_per_unit, pack, unpack


@pytest.mark.parametrize(
    "bits, codes, planes",
    [
        # The first column is in the lowest bits: read from the right.
        (1, [1, 0, 1, 1, 0, 0, 1, 0], [[0b01001101]]),
        (2, [3, 0, 1, 2], [[0b10_01_00_11]]),
        (4, [0xA, 0x5, 0x0, 0xF], [[0x5A, 0xF0]]),
        # 5 = 0b101: the low two bits in one plane, the high bit in the other.
        (3, [5, 2, 7, 0, 1, 4, 3, 6], [[0b00_11_10_01, 0b10_11_00_01], [0b10100101]]),
        (5, [0x1F, 0, 0x10, 0x0F, 1, 2, 3, 0x14], [[0x0F, 0xF0, 0x21, 0x43], [0b10000101]]),
        (6, [0x3F, 0x12, 0x21, 0x04], [[0x2F, 0x41], [0b00_10_01_11]]),
        (
            7,
            [0x7F, 0x40, 0x20, 0x10, 0x08, 0x04, 0x02, 0x01],
            [[0x0F, 0x00, 0x48, 0x12], [0b01_10_00_11, 0], [0b00000011]],
        ),
        (8, [0, 255, 128], [[0, 255, 128]]),
    ],
)
def test_bytes_worked_by_hand(bits, codes, planes):
    made = pack(torch.tensor([codes], dtype=torch.uint8), bits)
    assert [plane.tolist() for plane in made] == [[plane] for plane in planes]
    assert unpack(made, bits).tolist() == [codes]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_unpack_undoes_pack(data):
    bits = data.draw(st.integers(1, 8))
    rows = data.draw(st.integers(1, 3))
    columns = data.draw(st.integers(1, 6)) * columns_per_unit(bits)
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
    planes = pack(codes, bits)
    assert torch.equal(unpack(planes, bits), codes)
    assert sum(plane.numel() for plane in planes) * 8 == codes.numel() * bits
    assert all(plane.is_contiguous() and plane.dtype == torch.uint8 for plane in planes)


@pytest.mark.parametrize("bits", PLANES)
def test_widths_add_up_and_rows_can_be_cut_apart(bits):
    assert sum(PLANES[bits]) == bits
    assert all(columns_per_unit(bits) * width % 8 == 0 for width in PLANES[bits])
    codes = torch.randint(0, 1 << bits, (4, 16), dtype=torch.uint8)
    cut = [plane[1:3] for plane in pack(codes, bits)]
    assert torch.equal(unpack(cut, bits), codes[1:3])
