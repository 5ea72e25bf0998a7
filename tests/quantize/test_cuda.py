"""What runs on a card, as far as can be told without one: the kernels planned there, what their
products are handed, and layouts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from quantbench.ops.formats import dequantize
from quantbench.quantize.registry import SCHEMES, Quantizer, kernels_for
from quantbench.quantize.schemes import int4, int8
from quantbench.quantize.spec import parse
from tests.ops.packed_weights import in_tiles

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TORCHAO = ["torchao", "triton", "reference"]
TRITON = ["triton", "torchao", "reference"]
INDUCTOR = ["inductor", *TRITON]
THEIRS = ["bitsandbytes", "triton", "reference"]


@pytest.fixture
def capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.parametrize(
    "name, order",
    [
        *(
            ("int8wo", INDUCTOR),
            ("float8wo", INDUCTOR),
            ("int4wo-64", TORCHAO),
            ("bnb-nf4", THEIRS),
        ),
        *(("fp6", ["triton", "reference"]), ("int8dq", TRITON)),
    ],
)
def test_the_order_of_kernels(capability, name, order):
    how = parse(name), CUDA, torch.bfloat16
    assert kernels_for(how[0], "auto", *how[1:]) == order
    assert Quantizer(*how).kernels == order


def test_float8_is_tritons_where_the_card_has_no_conversion(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    for name in ("float8wo", "float8dq-row"):
        assert kernels_for(parse(name), "auto", CUDA, torch.bfloat16) == ["triton", "reference"]


@pytest.mark.parametrize("kernel", ["inductor", "triton"])
@pytest.mark.parametrize("name", ["int8wo", "float8wo"])
def test_eight_bits_in_a_compiled_row_and_in_others(name, kernel, monkeypatch):
    """inductor's own product, of one row; the Triton kernel's, of more."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    layer = torch.nn.Linear(64, 48, dtype=torch.bfloat16).requires_grad_(False)
    made = (
        SCHEMES[type(parse(name))]
        .kernels[kernel]
        .build(
            Quantizer.of_shapes(parse(name), CPU, torch.bfloat16).quantized("", layer), parse(name)
        )
    )
    expected = Quantizer(parse(name), CPU, torch.bfloat16, "reference")("", layer)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for shape in ((1, 1, 64), (2, 1, 64), (1, 5, 64)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        torch.testing.assert_close(made(x), expected(x), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("name", ["int8dq", "bnb-int8"])
def test_bytes_are_multiplied_as_bytes_from_seventeen_rows_on(name, monkeypatch):
    """Chosen in the layer: one layer reads prompts, and batches of every size."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    layer = torch.nn.Linear(64, 48, dtype=torch.bfloat16).requires_grad_(False)
    quantizer = Quantizer(parse(name), CPU, torch.bfloat16, "triton")
    expected = Quantizer(parse(name), CPU, torch.bfloat16, "reference")("", copy.deepcopy(layer))
    made, products = quantizer("", layer), []
    multiply = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda x, w: products.append(len(x)) or multiply(x, w))
    for shape in ((1, 16, 64), (17, 64), (2, 20, 64)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        torch.testing.assert_close(made(x), expected(x), rtol=2**-7, atol=1e-3)
    assert products == [17, 40]


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_int8dq_hands_torchaos_product_17_rows_or_more(rows, monkeypatch):
    handed = []

    def product(x, weight, bias):
        handed.append(x.shape)
        return x.new_empty(len(x), len(weight))

    monkeypatch.setattr(F, "linear", product)
    with FakeTensorMode():
        x = torch.empty(1, rows, 64, dtype=torch.bfloat16, device="cuda")
        assert int8.DynamicLinear(64, 32, False, "meta")(x).shape == (1, rows, 32)
    assert handed == [(max(17, rows), 64)]


def quantized(name, N, K, device="cpu"):
    """A layer whose weight is packed, and no kernel's yet."""
    layer = nn.Linear(K, N, dtype=torch.bfloat16, device=device).requires_grad_(False)
    quantizer = Quantizer.of_shapes(parse(name), torch.device(device), torch.bfloat16)
    return quantizer.quantized("layer", layer)


def packed_by_tinygemm(bytes_, inner_tiles):
    """(N, K / 2) uint8, the first of two codes in the high bits, as CUDA packs them."""
    assert inner_tiles == 8 and bytes_.is_contiguous()
    codes = torch.stack((bytes_ >> 4, bytes_ & 15), -1).flatten(1)
    return in_tiles(codes.numpy())


@pytest.mark.parametrize("rows", [64, 70])
def test_a_prompt_of_int4wo_is_no_product_of_tinygemms(rows, monkeypatch):
    """Weights are taken back out of its layout, padding left out, and multiplied by our kernel."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    N, K = 21, 192
    layer = quantized("int4wo-64", N, K)
    weight = layer.weight.data
    with torch.library._scoped_library("aten", "IMPL") as aten:
        aten.impl("_convert_weight_to_int4pack", packed_by_tinygemm, "CPU")
        made = int4.CudaLinear.of(layer, parse("int4wo-64"))
    assert made.weight.qdata.shape == (3, 8, 32, 4)
    assert torch.equal(int4.of_tinygemm(made.weight.qdata)[:N, : K // 2], weight.plane0)
    x = torch.randn(1, rows, K, dtype=torch.bfloat16)
    exact = x.double() @ dequantize(weight.parts).double().T + layer.bias
    # Each weight is rounded to bfloat16 once, sums in float32, the result once.
    allowed = (x.double().abs() @ dequantize(weight.parts).double().abs().T) * 2.0**-7
    assert ((made(x) - exact).abs() <= allowed + exact.abs() * 2.0**-8).all()


@pytest.mark.gpu
@pytest.mark.parametrize("N, K", [(4096, 4096), (1000, 1984)])
def test_tinygemm_and_cublas_multiply_by_the_same_weights(N, K):
    """Rows of a prompt, and the same rows in pieces that tinygemm takes."""
    spec, layer = parse("int4wo-64"), quantized("int4wo-64", N, K, "cuda")
    weight = layer.weight.data
    made = SCHEMES[type(spec)].kernels["torchao"].build(layer, spec)
    x = torch.randn(96, K, dtype=torch.bfloat16, device="cuda")
    by_cublas, by_tinygemm = made(x), torch.cat([made(some) for some in x.split(32)])
    allowed = (x.abs().double() @ dequantize(weight.parts).double().abs().T) * 2.0**-6
    assert ((by_cublas - by_tinygemm).double().abs() <= allowed).all()
