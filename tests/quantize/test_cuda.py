"""What runs on a card, as far as can be told without one: the kernels planned there, what their
products are handed, and layouts."""

import copy
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.prototype.custom_fp_utils import _floatx_unpacked_to_f32

from quantbench.errors import KernelError
from quantbench.ops.formats import dequantize
from quantbench.quantize.activation import rounded
from quantbench.quantize.registry import SCHEMES, Quantizer, kernels_for
from quantbench.quantize.schemes import int4, int8
from quantbench.quantize.spec import parse
from tests.ops.packed_weights import in_tiles

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TORCHAO = ["torchao", "triton", "reference"]
TRITON = ["triton", "torchao", "reference"]
THEIRS = ["bitsandbytes", "triton", "reference"]


@pytest.fixture
def capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.parametrize(
    "name, order",
    [
        *(("int8wo", TORCHAO), ("int4wo-64", TORCHAO), ("bnb-nf4", THEIRS)),
        *(("fp6", ["triton", "reference"]), ("int8dq", TRITON)),
    ],
)
def test_the_order_of_kernels(capability, name, order):
    how = parse(name), CUDA, torch.bfloat16
    assert kernels_for(how[0], "auto", *how[1:]) == order
    assert Quantizer(*how).kernels == order


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


class Theirs(nn.Module):
    """What the packages' documents say of their layers, in plain torch."""

    def __init__(self, rows, columns, config, torch_dtype):
        super().__init__()
        self.config, self.dtype = config, torch_dtype

    def load_from_tensors(self, tensors):
        self.tensors = tensors

    def transform(self):
        codes, kind = self.tensors["weight"], self.config["dtype"]
        if kind.startswith("uint"):
            numbers = codes.float() - (1 << int(kind[4:]) - 1)
        else:  # such as float6e3m2
            numbers = _floatx_unpacked_to_f32(codes.byte(), int(kind[-3]), int(kind[-1]))
        self.set(numbers, self.tensors["weight_scale"].float())

    def pack(self, codes, scale, zeros):
        zeros = 0 if zeros is None else zeros.repeat_interleave(codes.shape[1] // zeros.shape[1], 1)
        self.set(codes.float() - zeros, scale)

    def set(self, numbers, scale):
        self.weight = numbers * scale.repeat_interleave(numbers.shape[1] // scale.shape[1], 1)

    def forward(self, x):
        assert x.ndim == 2
        return x @ self.weight.T.to(x.dtype)


class TheirTriton(Theirs):
    def __init__(self, bits, group_size, columns, rows, *dtypes, scaled_activations, bias):
        super().__init__(rows, columns, None, None)


@pytest.fixture
def packages(monkeypatch):
    """Both are there, as far as a layer is concerned."""

    def module(name, **contents):
        made = types.ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    ops = types.SimpleNamespace(pack_weight=lambda codes, bits: codes)
    module("humming", ops=ops)
    module("humming.layer", HummingLayer=Theirs)
    module("gemlite")
    module("gemlite.core", GemLiteLinearTriton=TheirTriton, TORCH_TO_DTYPE={torch.bfloat16: 1})


OF_BOTH = ["int8wo", "int4wo-64", "uintx-2-64", "int8dq", "int8dq-int4wo-64"]


@pytest.mark.parametrize(
    "kernel, name",
    [
        *(("gemlite", name) for name in OF_BOTH),
        *(("humming", name) for name in (*OF_BOTH, "fp6", "mxfp4", "nvfp4", "uintx-5-64")),
        ("humming", "float8wo"),
    ],
)
def test_packages_are_handed_the_stored_weights(packages, kernel, name):
    N, K, spec = 64, 192, parse(name)
    layer = quantized(name, N, K)
    weight, bias = layer.weight.data, layer.bias.double()
    row = SCHEMES[type(spec)].kernels[kernel]
    assert row.refuses(spec, CUDA, K, N) is None
    made, x = row.build(layer, spec), torch.randn(2, 3, K, dtype=torch.bfloat16)
    numbers = x.double()
    if weight.activation:
        codes, scale = rounded(x, weight.activation)
        numbers = codes.double() * scale
    stored = dequantize(weight.parts).double()
    # Weights and sums are rounded to bfloat16, once each.
    allowed = numbers.abs() @ stored.abs().T * 2.0**-7 + 2.0**-7
    assert ((made(x) - (numbers @ stored.T + bias)).abs() <= allowed).all()


@pytest.mark.parametrize(
    "kernel, name, shape, reason",
    [
        ("humming", "bnb-nf4", (64, 64), "weights of the format nf4, which humming has not"),
        ("humming", "fp6", (96, 64), "is 96 by 64; humming takes multiples of 64"),
        ("gemlite", "uintx-3-64", (64, 64), "3-bit int; gemlite takes int of 1, 2, 4 and 8 bits"),
        ("gemlite", "uintx-2-8", (64, 64), "groups of 16 or more"),
    ],
)
def test_packages_refuse_in_words(kernel, name, shape, reason):
    spec = parse(name)
    row = SCHEMES[type(spec)].kernels[kernel]
    assert reason in row.refuses(spec, CUDA, *reversed(shape))


@pytest.mark.parametrize("kernel, package", [("humming", "humming-kernels"), ("gemlite",) * 2])
def test_packages_are_planned_without_a_card(kernel, package, monkeypatch):
    how = torch.device("cpu"), torch.bfloat16
    with pytest.raises(KernelError, match=f"{kernel}: int8wo: {kernel} needs a CUDA device; here"):
        kernels_for(parse("int8wo"), kernel, *how)
    with pytest.raises(KernelError, match=f"the package {package} is not installed; here"):
        kernels_for(parse("int8wo"), kernel, CUDA, torch.bfloat16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert kernels_for(parse("int8wo"), kernel, CUDA, torch.bfloat16) == [kernel]
    order = kernels_for(parse("int8wo"), "auto", CUDA, torch.bfloat16)
    assert order.index(kernel) > order.index("reference")


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
