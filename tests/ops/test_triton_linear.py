"""The Triton kernels against float64, in Triton's interpreter and, where one is, on a GPU; and
whether they compile for one, which the interpreter cannot tell."""

import pytest
import torch
import torch.nn.functional as F

from quantbench.ops.formats import Packed, dequantize
from tests.ops.gpu_compiler import compile_for_gpus
from tests.ops.packed_weights import FORMATS, name, packed

pytest.importorskip("triton")

from quantbench.ops.triton.linear import VECTOR_ROWS, linear, product  # noqa: E402

IN_INTERPRETER = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the GPU here"),
)
DEVICES = [IN_INTERPRETER, pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bound(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """How far each of the (M, N) results may be from the exact one.

    Sums: a product meets at most K + 16 roundings on its way, each of 2^-24 of the terms' sizes.
    Integers are multiplied as 1 + code / 2^bits, below 2, and 1.5 is taken off in the end: terms of
    3.5 · 2^bits scales together. Tensor cores cut off where they should round: 2^-23, once when
    they align the terms and once when they add them.

    Numbers: more than VECTOR_ROWS rows are multiplied by numbers rounded to x's dtype, which
    changes none that comes without a scale of its own, except those of NF4 and bitsandbytes' FP4.
    """
    dtype, tiled, on_gpu = x.dtype, x.shape[0] > VECTOR_ROWS, x.is_cuda
    x, K = x.double().abs(), x.shape[-1]
    tensor_scale = 1.0 if weight.tensor_scale is None else weight.tensor_scale.double().abs()
    numbers = dequantize(weight).double().abs()
    terms = numbers
    if weight.format in ("int", "2:4"):
        per_group = weight.scale.double() * 3.5 * 2**weight.bits
        if weight.zero is not None:
            per_group = per_group + weight.zero.double().abs()
        terms = terms + per_group.repeat_interleave(weight.group_size, 1) * tensor_scale
    unit = 2.0**-22 if tiled and on_gpu else 2.0**-24
    # 2^-149 is the smallest float32: what lies between two of them is lost from a product or sum.
    result = (x @ terms.T) * (K + 16) * unit + (K + 16) * (2 + x.amax()) * 2.0**-149
    by_row = weight.group_size == K and weight.zero is None
    if not tiled or (by_row and weight.format not in ("nf4", "bnb-fp4")):
        return result
    # A GPU rounds to nearest; the interpreter does not when it rounds to bfloat16.
    relative, smallest = {
        torch.bfloat16: (2.0**-8 if on_gpu else 2.0**-7, 2.0**-133),
        torch.float16: (2.0**-11, 2.0**-25),
        torch.float32: (2.0**-24, 2.0**-149),
    }[dtype]
    return result + x @ (numbers * relative + smallest * tensor_scale).T


def check(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    result = linear(x, weight)
    assert result.dtype == torch.float32 and result.shape == (len(x), len(weight.planes[0]))
    exact = x.double() @ dequantize(weight).double().T
    error, allowed = (result - exact).abs(), bound(x, weight)
    assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times the bound"
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 33, 64])
@pytest.mark.parametrize("form", FORMATS, ids=name)
def test_every_format_at_every_batch(form, rows, device):
    """K = 384 is no multiple of a tile of either kernel, N = 21 of none either."""
    dtype = DTYPES[(rows + FORMATS.index(form)) % 3]
    weight = packed(form, 21, 384, zero=form[0] == "int" and form[2] == 64, device=device)
    check(torch.randn(rows, 384, dtype=dtype, device=device), weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [("int", 4, 64), ("fp6", 6, None), ("2:4", 4, 64)], ids=name)
def test_every_dtype_in_both_kernels(form, dtype, device):
    for rows in (1, 2, 5):
        weight = packed(form, 40, 192, scale_dtype=dtype, device=device)
        check(torch.randn(rows, 192, dtype=dtype, device=device), weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [("int", 8, None), ("int", 3, 64), ("nf4", 4, 64)], ids=name)
def test_numbers_are_written_some_rows_at_a_time(form, dtype, device, monkeypatch):
    """5 of the 21 rows at a time, so that the last piece is shorter, with every kind of scale."""
    x = torch.randn(70, 192, dtype=dtype, device=device)
    monkeypatch.setattr("quantbench.ops.triton.linear.MOST_UNPACKED", 5 * 192 * x.element_size())
    for more in ({}, {"tensor_scale": 0.37}):
        check(x, packed(form, 21, 192, device=device, **more))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cublas_is_asked_for_sums_that_are_not_rounded(dtype):
    """By torch's own shape function, for which no card need be here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, numbers = (torch.empty(n, 64, dtype=dtype, device="cuda") for n in (70, 21))
        y = product(x, numbers)
    assert y.shape == (70, 21) and y.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [("int", 8, None), ("int", 5, 64), ("fp4", 4, 32)], ids=name)
def test_a_batch_of_512(form, device):
    check(torch.randn(512, 128, dtype=torch.bfloat16, device=device), packed(form, 9, 128))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "form, columns",
    [
        *((("int", 4, None), columns) for columns in (2, 10, 130)),
        *((("int", 6, None), columns) for columns in (4, 300)),
        *((("int", 8, None), columns) for columns in (1, 33, 514)),
        *[(("int", 1, None), 8), (("int", 7, None), 1032), (("fp8", 8, None), 77)],
        *[(("fp6", 6, None), 36), (("nf4", 4, None), 6), (("2:4", 4, None), 8)],
        *[(("int", 3, 8), 24), (("nf4", 4, 24), 72), (("int", 4, 136), 272)],
    ],
    ids=str,
)
def test_any_number_of_units_of_columns(form, columns, rows, device):
    weight = packed(form, 3, columns, device=device)
    check(torch.randn(rows, columns, device=device), weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "scale_dtype",
    [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu],
    ids=str,
)
def test_scales_of_every_dtype(scale_dtype, rows, device):
    for form in (("fp4", 4, 32), ("int", 4, None)):
        weight = packed(form, 17, 128, scale_dtype, tensor_scale=-0.37, device=device)
        check(torch.randn(rows, 128, device=device), weight)


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
        error, allowed = (result - exact)[:, finite].abs(), bound(x, weight)[:, finite]
        assert (error <= allowed).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("form", FORMATS, ids=name)
def test_every_code_of_a_format_stands_for_its_number(form, rows, device):
    """Rows of the identity pick single numbers out, so each has to be right, zeros included."""
    weight = packed(form, 16, 128, scale_dtype=torch.float32, device=device)
    start = 32
    x = torch.eye(128, device=device)[start : start + rows]
    check(x, weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", [("int", 4, 64), ("int", 8, None), ("fp6", 6, None)], ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_activations(dtype, form, rows, device):
    weight = packed(form, 8, 192, device=device)
    outlier = torch.randn(rows, 192, dtype=dtype, device=device)
    outlier[:, 77] = 30000
    check(outlier, weight)
    zeros = torch.zeros(rows, 192, dtype=dtype, device=device)
    assert not check(zeros, weight).any()
    if dtype == torch.bfloat16 and device == "cpu":
        return  # the interpreter takes subnormal bfloat16 for something else
    smallest = torch.finfo(dtype).smallest_normal
    subnormal = (torch.randn(rows, 192, device=device) * smallest / 4).to(dtype)
    assert subnormal.any()
    check(subnormal, weight)


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
    compile_for_gpus("compile_triton_linear")


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
