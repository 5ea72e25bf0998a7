"""What only the Triton kernel of linear layers has: pieces, 8-bit scales, CUDA graphs; and whether
it compiles for a GPU, which the interpreter cannot tell. Its numbers: test_linear.py."""

import random

import pytest
import torch
import torch.nn.functional as F

from quantbench.ops.formats import Packed, dequantize
from tests.ops import linear_contract
from tests.ops.exact import DTYPES
from tests.ops.gpu_compiler import compile_for_gpus
from tests.ops.linear_contract import TRITON, Case, triton_allowed
from tests.ops.packed_weights import FORMATS, name, packed

pytest.importorskip("triton")

from quantbench.ops.triton.linear import linear, product  # noqa: E402

IN_INTERPRETER = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the GPU here"),
)
DEVICES = [IN_INTERPRETER, pytest.param("cuda", marks=pytest.mark.gpu)]


def check(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    return linear_contract.check(TRITON, x, weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [("int", 8, None), ("int", 3, 64), ("nf4", 4, 64)], ids=name)
def test_numbers_are_written_some_rows_at_a_time(form, dtype, device, monkeypatch):
    """5 of the 21 rows at a time, so that the last piece is shorter, with every kind of scale; of a
    batch of 512, more than a tile has, as well."""
    x = torch.randn(random.choice((70, 512)), 192, dtype=dtype, device=device)
    monkeypatch.setattr("quantbench.ops.triton.linear.MOST_UNPACKED", 5 * 192 * x.element_size())
    for more in ({}, {"tensor_scale": 0.37}):
        check(x, packed(form, 21, 192, device=device, **more))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [("int", 8, None), ("int", 4, 64), ("fp6", 6, None)], ids=name)
def test_a_row_that_several_programs_share(form, device):
    for rows in (1, 9):
        check(torch.randn(rows, 8256, device=device), packed(form, 3, 8256, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cublas_is_asked_for_sums_that_are_not_rounded(dtype):
    """By torch's own shape function, for which no card need be here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, numbers = (torch.empty(n, 64, dtype=dtype, device="cuda") for n in (70, 21))
        y = product(x, numbers)
    assert y.shape == (70, 21) and y.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 4])
def test_every_8_bit_scale_there_is(rows, device):
    """All 256 bytes as scales, subnormals and NaN among them: NaN where the reference has it."""
    every = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        weight = packed(("fp4", 4, None), 256, 16, device=device)
        scales = every.view(dtype)
        weight = Packed(weight.planes, scales, None, None, "fp4", 4, 16)
        x = torch.randn(rows, 16, device=device) / 64
        result, exact = linear(x, weight), x.double() @ dequantize(weight).double().T
        nan = scales.float().isnan().flatten()
        assert torch.equal(result.isnan().any(0), nan) and nan.any()
        # 6 · 2^126 is too large for the float32 numbers that the reference sums.
        finite = exact.isfinite().all(0)
        assert finite.sum() >= 252
        allowed = triton_allowed(Case(x, weight, None))
        error, allowed = (result - exact)[:, finite].abs(), allowed[:, finite]
        assert (error <= allowed).all()


@pytest.mark.parametrize("device", DEVICES)
def test_leading_dimensions_stay_and_none_is_too_few(device):
    weight = packed(("int", 4, 64), 5, 64, device=device)
    x = torch.randn(2, 1, 3, 64, device=device)
    expected = linear(x.view(6, 64), weight)
    assert torch.equal(linear(x, weight), expected.view(2, 1, 3, 5))
    assert linear(x[0, 0, 0], weight).shape == (5,)
    assert linear(x[:0], weight).shape == (0, 1, 3, 5)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_keeps_its_promises_to_the_compiler(device):
    """Schema, fake results and tracing, by torch's own check; then whole, as a layer calls it."""
    weight = packed(("fp4", 4, 16), 10, 32, device=device)
    x = torch.randn(2, 32, device=device)
    arguments = (x.view(2, 4, 8).mT.contiguous(), weight.planes, weight.scale)
    torch.library.opcheck(
        torch.ops.quantbench.triton_linear, (*arguments, None, None, "fp4", 4, 16)
    )
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), linear(x, weight))


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_layer_is_the_layer(device):
    from quantbench.quantize.kernels import TritonLinear
    from quantbench.quantize.packed import PackedWeight

    parts = packed(("int", 5, 32), 24, 64, zero=True, device=device)
    weight = PackedWeight.make(
        parts.planes,
        parts.scale,
        zero=parts.zero,
        **{"format": "int", "bits": 5, "columns": 64, "group_size": 32, "dtype": torch.bfloat16},
    )
    layer = torch.nn.Linear(64, 24, dtype=torch.bfloat16, device=device)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer = TritonLinear.of(layer, None)
    with torch.no_grad():
        for rows in (1, 6):
            x = torch.randn(rows, 64, dtype=torch.bfloat16, device=device)
            expected = (check(x, parts) + layer.bias).bfloat16()
            assert torch.equal(layer(x), expected)
            assert torch.equal(torch.compile(layer, fullgraph=True)(x), expected)


def test_kernels_compile_for_gpus():
    """On any machine: Triton and ptxas need none for it."""
    compile_for_gpus("linear")


LARGE = [form for form in FORMATS if form[2] in (None, 16, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 64, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", LARGE, ids=name)
def test_layers_of_real_models(form, dtype, rows):
    for N, K in ((4096, 14336), (1024, 4096), (4097, 4096)):
        weight = packed(form, N, K, scale_dtype=dtype, device="cuda")
        check(torch.randn(rows, K, dtype=dtype, device="cuda"), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [("int", 4, 64), ("nf4", 4, 64), ("fp8", 8, None)], ids=name)
def test_a_cuda_graph_replays_on_new_activations(form):
    weight = packed(form, 512, 1024, device="cuda")
    x = torch.randn(1, 1024, dtype=torch.bfloat16, device="cuda")
    linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(x, weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(captured, linear(x, weight))


@pytest.mark.gpu
def test_a_layer_in_inductors_cuda_graphs():
    weight = packed(("nf4", 4, 64), 512, 1024, device="cuda")
    step = torch.compile(lambda x: F.silu(linear(x, weight)), mode="reduce-overhead")
    for _ in range(5):
        x = torch.randn(1, 1024, dtype=torch.bfloat16, device="cuda")
        assert torch.allclose(step(x), F.silu(linear(x, weight)), rtol=1e-5)
