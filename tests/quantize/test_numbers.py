"""Each scheme's numbers against an independent source: torchao's own configs, bitsandbytes, brute
force over the code book, examples worked by hand."""

import random

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import nn
from torchao import quantization as ao
from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_and_quantize_affine_hqq,
)

from quantbench.errors import CheckpointError
from quantbench.ops.formats import TABLES, e3m2
from quantbench.ops.packing import unpack
from quantbench.quantize.activation import rounded
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import SHOWN, parse

CPU = torch.device("cpu")


def packed(name, weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return Quantizer(parse(name), CPU, weight.dtype).quantized("layer", layer).weight.data


def theirs(config, weight):
    """What torchao's own config makes of the weight: its product with the identity."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    ao.quantize_(layer, config)
    return layer.weight


KINDS = ("gaussian", "heavy-tailed", "off-centre")
OF_EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def drawn(kind="gaussian", N=64, K=256, dtype=torch.float32):
    if kind == "heavy-tailed":
        return torch.distributions.StudentT(3.0).sample((N, K)).to(dtype)
    return (torch.randn(N, K) + 3 * (kind == "off-centre")).to(dtype)


# ---------------------------------------------------------------------------------- torchao's own


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4wo_is_torchaos(group_size):
    """Its scales and zeros bit for bit. Codes come through its CPU kernel, times the identity,
    since its layout cannot be read back."""
    weight = drawn(dtype=torch.bfloat16)
    config = PrototypeInt4WeightOnlyConfig(group_size=group_size, set_inductor_config=False)
    made, ours = theirs(config, weight), packed(f"int4wo-{group_size}", weight)
    scale, zero = made.scale_and_zero.transpose(0, 1).unbind(-1)
    assert torch.equal(ours.scale, scale) and torch.equal(ours.zero, zero)
    product = torch.nn.functional.linear(torch.eye(256).bfloat16(), made).T
    scale, zero = (x.double().repeat_interleave(group_size, 1) for x in (scale, zero))
    codes = ((product - zero) / scale).round()
    quotient = (weight - zero) / scale
    # torchao takes the difference and the quotient in bfloat16: two roundings of up to 16 steps,
    # and so now and then a neighbouring code. Ours are the nearest: see BOOKS.
    assert ((codes - quotient).abs() <= 0.5 + 2 * 16 * 2**-8).all()
    assert (ours.dequantize().double() - weight).norm() <= (product.double() - weight).norm()


BY_ROW = {
    "int8wo": ao.Int8WeightOnlyConfig(granularity=ao.PerRow(), set_inductor_config=False),
    "float8wo": ao.Float8WeightOnlyConfig(set_inductor_config=False),
}


@pytest.mark.parametrize("name", BY_ROW)
def test_8_bits_a_row_are_torchaos(name):
    weight = drawn(dtype=torch.float32 if name == "float8wo" else torch.bfloat16)
    made, ours = theirs(BY_ROW[name], weight), packed(name, weight)
    assert torch.equal(ours.scale, made.scale)
    assert torch.equal(ours.plane0.float(), made.qdata.float())


def test_int8dq_int4wo_is_torchaos():
    weight = drawn()
    config = ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,
        weight_granularity=ao.PerGroup(32),
        weight_mapping_type=MappingType.SYMMETRIC,
    )
    made, ours = theirs(config, weight), packed("int8dq-int4wo-32", weight)
    assert torch.equal(ours.scale, made.scale.bfloat16())
    codes, scale = unpack([ours.plane0], 4) - 8.0, made.scale.repeat_interleave(32, 1)
    # The scale in 16 bits moves quotients of up to 7.5 by a rounding of bfloat16.
    assert ((codes - weight / scale).abs() <= 0.5 + 7.5 * 2**-8 + 1e-5).all()
    assert ((made.qdata - weight / scale).abs() <= 0.5 + 1e-5).all()


@OF_EVERY_KIND
def test_nvfp4_is_torchaos(kind):
    weight = drawn(kind, dtype=torch.bfloat16)
    made = theirs(NVFP4WeightOnlyConfig(), weight)
    torch.testing.assert_close(packed("nvfp4", weight).dequantize(), made.dequantize())


# ---------------------------------------------------------------------------------- bitsandbytes


@OF_EVERY_KIND
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_bnb_4_bit_is_bitsandbytes(table, kind):
    weight = drawn(kind, dtype=torch.bfloat16)
    codes, state = bnb.quantize_4bit(weight, quant_type=table, blocksize=64)
    expected = bnb.dequantize_4bit(codes, state)
    ours = packed(f"bnb-{table}", weight).dequantize()
    torch.testing.assert_close(ours, expected, rtol=2**-7, atol=1e-6)


@OF_EVERY_KIND
def test_bnb_int8_is_bitsandbytes(kind):
    weight = drawn(kind, dtype=torch.float16)
    codes, largest, _ = bnb.int8_vectorwise_quant(weight)
    ours = packed("bnb-int8", weight)
    assert torch.equal(ours.plane0, codes)
    torch.testing.assert_close(ours.scale[:, 0] * 127, largest)


# ---------------------------------------------------------------------------------- brute force


BOOKS = {
    "uintx-1-32": torch.arange(2.0) - 1,
    "uintx-2-32": torch.arange(4.0) - 2,
    "uintx-3-32": torch.arange(8.0) - 4,
    "uintx-5-32-hqq": torch.arange(32.0) - 16,
    "uintx-7-64": torch.arange(128.0) - 64,
    "int4wo-32": torch.arange(16.0) - 8,
    "int4wo-32-hqq": torch.arange(16.0) - 8,
    "fp6": e3m2(torch.arange(64, dtype=torch.uint8)),
    "float8wo": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0),
    "mxfp4": torch.tensor(TABLES["fp4"]),
}


@OF_EVERY_KIND
@pytest.mark.parametrize("name", BOOKS)
def test_every_weight_is_the_nearest_one_there_is(name, kind):
    """Nearest in the group's own code book: any different code would be farther away."""
    weight = drawn(kind, 16, 128)
    made = packed(name, weight)
    groups = weight.unflatten(-1, (-1, made.group_size))
    scale = made.scale.float()[..., None, None]
    zero = 0 if made.zero is None else made.zero.float()[..., None, None]
    book = BOOKS[name] * scale + zero
    nearest = (groups[..., None] - book).abs().amin(-1)
    error = (made.dequantize() - weight).unflatten(-1, (-1, made.group_size)).abs()
    # ties, and what is almost one, may go either way
    slack = 1e-5 * (groups.abs() + scale.squeeze(-1))
    assert (error <= nearest + slack).all()


HQQ = [name for name in SHOWN if name.endswith("-hqq")]


@pytest.mark.parametrize("name", ["uintx-2-64-hqq", "uintx-3-8-hqq", "int4wo-64-hqq"])
@pytest.mark.parametrize("kind", ["gaussian", "heavy-tailed"])
def test_hqq_errs_less_than_torchaos(name, kind):
    """By squared error, in all; torchao rounds neither scale nor zero."""
    weight = drawn(kind, 64, 512) * (random.choice((0.02, 1.0)) if kind == "gaussian" else 0.02)
    made = packed(name, weight)
    codes, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(
        weight, made.bits, made.group_size, compute_dtype=torch.float32, device="cpu"
    )
    half = 2 ** (made.bits - 1)
    groups = codes.float().view(-1, made.group_size)
    theirs = (groups - half) * scale.view(-1, 1) + zero.view(-1, 1)
    ours, theirs = (
        (x.double() - weight).square().sum() for x in (made.dequantize(), theirs.view(weight.shape))
    )
    assert ours < theirs


@pytest.mark.parametrize("name", [*HQQ, "uintx-3-128-hqq"])
def test_hqq_is_no_worse_than_the_range_in_any_group(name):
    """By squared error; in all it is better."""
    for weight in (drawn(kind, 32) for kind in KINDS):
        hqq, plain = (packed(n, weight) for n in (name, name.removesuffix("-hqq")))
        size = plain.group_size
        better, worse = (
            (made.dequantize().double() - weight).square().view(-1, size).sum(1)
            for made in (hqq, plain)
        )
        assert hqq.group_size == size
        assert (better <= worse * (1 + 1e-5)).all() and better.sum() < 0.99 * worse.sum()


# ---------------------------------------------------------------------------------- by hand


def test_fp6_rounds_ties_to_even_and_scales_by_the_largest():
    """28 is the row's largest, so the scale is 1 and codes are the numbers themselves."""
    row = torch.tensor([[28.0, -28, 1.125, 1.375, 1.3, 0.03125, 0.09375, 26.0, 0, -0.2, 27.9, 25]])
    expected = [28, -28, 1, 1.5, 1.25, 0, 0.125, 24, 0, -0.1875, 28, 24]
    made = packed("fp6", row)
    assert made.scale.item() == 1 and made.dequantize().tolist() == [expected]


def test_two_bits_by_hand():
    """Weights 0 to 3 and then 10 to 13: a group's least is code 0, its most code 3."""
    weight = torch.tensor([[0.0, 1, 2, 3] * 2 + [10.0, 11, 12, 13] * 2])
    made = packed("uintx-2-8", weight)
    assert made.scale.tolist() == [[1, 1]] and made.zero.tolist() == [[2, 12]]
    # four codes a byte, the first in the lowest bits: 0 + 1·4 + 2·16 + 3·64
    assert made.plane0.tolist() == [[228] * 4]
    assert made.dequantize().tolist() == weight.tolist()


def test_two_of_four_by_hand():
    """7.5 is the largest, so the scale is 1: rounding to whole numbers, -8 to 7."""
    row = torch.zeros(1, 64)
    row[0, :8] = torch.tensor([0.1, -7.5, 3.0, 0.2, 5.0, 5.0, 5.0, 1.0])
    made = packed("sparse-marlin", row)
    assert made.scale.tolist() == [[1]]
    expected = torch.zeros(1, 64)
    expected[0, :8] = torch.tensor([0, -8, 3, 0, 5, 5, 0, 0])  # ties keep the first
    assert torch.equal(made.dequantize(), expected)
    # values -8, 3 | 5, 5 as code + 8, the first in the low bits; places 1, 2 | 0, 1
    assert made.plane0[0, :2].tolist() == [0 + 11 * 16, 13 + 13 * 16]
    assert made.plane1[0, 0].item() == 1 + 2 * 4 + 0 * 16 + 1 * 64


@pytest.mark.parametrize(
    "how, x, expected",
    [
        ("int8-asymmetric", [255.0, 0.0, 1.0, 100.4], [255, 0, 1, 100]),
        ("int8-bitsandbytes", [127.0, -127, 0.6, 0], [127, -127, 1, 0]),
    ],
)
def test_activations_by_hand(how, x, expected):
    """Those that compressed-tensors has, too: tests/models/test_activations.py."""
    numbers, scale = rounded(torch.tensor([x]), how)
    assert numbers.tolist() == [expected] and scale.item() == 1


def test_bnb_int8_refuses_weights_that_float16_cannot_hold():
    weight = torch.randn(8, 64).bfloat16()
    weight[3, 5] = 1e5
    with pytest.raises(CheckpointError, match="beyond 65504"):
        packed("bnb-int8", weight)
