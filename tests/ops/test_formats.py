"""Every format against other people's tables, and sums and bytes worked by hand."""

import dataclasses

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.custom_fp_utils import _floatx_unpacked_to_f32
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from quantbench.ops.formats import TABLES, Packed, dequantize, expand
from quantbench.ops.packing import columns_per_unit, pack, unpack
from tests.ops.packed_weights import FORMATS, name, packed

ONE = torch.ones(1, 1)


def numbers(codes: list[int], format: str, bits: int) -> list[float]:
    """The numbers of codes, all scales 1; padded with the first to whole bytes."""
    padded = codes + codes[:1] * (-len(codes) % 8)
    planes = pack(torch.tensor([padded], dtype=torch.uint8), bits)
    weight = Packed(planes, ONE, None, None, format, bits, len(padded))
    return dequantize(weight)[0, : len(codes)].tolist()


def test_small_floats_are_torchaos_and_the_specifications():
    """OCP Microscaling Formats 1.0, table 5."""
    for format, bits, exponent, mantissa in (("fp6", 6, 3, 2), ("fp4", 4, 2, 1)):
        codes = torch.arange(2**bits, dtype=torch.uint8)
        expected = _floatx_unpacked_to_f32(codes, exponent, mantissa)
        assert numbers(codes.tolist(), format, bits) == expected.tolist()
    assert numbers(list(range(8)), "fp4", 4) == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("format, theirs", [("nf4", "nf4"), ("bnb-fp4", "fp4")])
def test_four_bit_tables_are_bitsandbytes(format, theirs):
    """Theirs are divided by their largest, in float32: half a unit in the last place of 1."""
    expected = bnb.get_4bit_type(theirs, device="cpu")
    torch.testing.assert_close(torch.tensor(TABLES[format]), expected, rtol=0, atol=2**-24)


def test_float8_is_torchs():
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1)
    codes = codes.view(torch.float8_e4m3fn)
    weight = Packed([codes], ONE, None, None, "fp8", 8, 256)
    torch.testing.assert_close(dequantize(weight), codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", range(1, 8))
def test_integers_count_from_half_their_range_below_zero(bits):
    half = 1 << (bits - 1)
    assert numbers(list(range(2 * half)), "int", bits) == list(range(-half, half))


def test_eight_bits_are_stored_signed():
    plane = torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8)
    weight = Packed([plane], ONE / 2, None, None, "int", 8, 4)
    assert dequantize(weight).tolist() == [[-64.0, -0.5, 0.0, 63.5]]


def test_scale_zero_and_tensor_scale_worked_by_hand():
    """Codes 0, 9, 15, 8 are -8, 1, 7, 0; groups of two: (· 0.5 + 1) · 4 and (· 2 - 3) · 4."""
    weight = Packed(
        pack(torch.tensor([[0, 9, 15, 8]], dtype=torch.uint8), 4),
        torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16),
        torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16),
        torch.tensor(4.0),
        *("int", 4, 2),
    )
    assert dequantize(weight).tolist() == [[-12.0, 6.0, 44.0, -12.0]]


def test_two_of_four_worked_by_hand():
    kept = torch.tensor([[5.0, -2.0, 7.0, 1.0]])
    places = torch.tensor([[1, 3, 0, 2]], dtype=torch.uint8)
    dense = [[0.0, 5.0, 0.0, -2.0, 7.0, 0.0, 1.0, 0.0]]
    assert expand(kept, places).tolist() == dense
    # 13, 6, 15, 9 are 5, -2, 7, 1; places 1, 3, 0, 2 are 0b10_00_11_01.
    planes = [torch.tensor([[0x6D, 0x9F]]), torch.tensor([[0b10_00_11_01]])]
    planes = [plane.to(torch.uint8) for plane in planes]
    assert dequantize(Packed(planes, ONE, None, None, "2:4", 4, 8)).tolist() == dense


def test_mxfp4_is_torchaos():
    """Their packed bytes and their powers of two, taken as they are: the same numbers."""
    theirs = MXTensor.to_mx(torch.randn(6, 64), torch.float4_e2m1fn_x2, block_size=32)
    planes, scale = [theirs.qdata.view(torch.uint8)], theirs.scale.view(torch.float8_e8m0fnu)
    weight = Packed(planes, scale, None, None, "fp4", 4, 32)
    assert torch.equal(dequantize(weight), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("form", FORMATS, ids=name)
def test_a_group_is_scaled_alone(form):
    """Doubling one group's scale doubles that group's numbers and no others."""
    weight = dataclasses.replace(packed(form, 3, 128, torch.float32), zero=None)
    before = dequantize(weight)
    weight.scale[1, -1] *= 2
    after = dequantize(weight)
    changed = torch.zeros(3, 128, dtype=torch.bool)
    changed[1, -weight.group_size :] = True
    assert torch.equal(after, torch.where(changed, 2 * before, before))


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
