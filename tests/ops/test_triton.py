"""What only the Triton kernels have: pieces, 8-bit scales, caches that processors share, CUDA
graphs; and whether they compile for a GPU, which the interpreter cannot tell. Their numbers:
test_linear.py and test_decode_attention.py."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from quantbench.kv_cache import CACHES
from quantbench.ops import kv
from quantbench.ops.attend import attend
from quantbench.ops.formats import Packed, dequantize
from tests.ops import attention_contract, exact, linear_contract
from tests.ops.exact import DTYPES
from tests.ops.gpu_compiler import KERNELS, SHARED_MEMORY, compile_for_a_gpu
from tests.ops.instructions import MARKS
from tests.ops.linear_contract import Case
from tests.ops.packed_weights import FORMATS, name, packed

pytest.importorskip("triton")

from quantbench.ops.triton import attention  # noqa: E402
from quantbench.ops.triton.linear import as_bytes, linear, product  # noqa: E402

WHERE = {"cpu": "triton", "cuda": "triton-gpu"}
DEVICES = [pytest.param(device, marks=MARKS[label]) for device, label in WHERE.items()]
ON_EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)
CACHE_FORMATS = pytest.mark.parametrize("format", CACHES)
multiplied = partial(linear_contract.check, linear_contract.TRITON)
kernel = attention_contract.TRITON
attended = partial(attention_contract.check, kernel)


def test_kernels_compile_for_gpus():
    """On any machine: Triton and ptxas need none for it; and take no more instructions a weight
    than they did. `make gpu-compile` takes all of them."""
    drawn = {which: [random.randrange(len(some))] for which, (_, some) in KERNELS.items()}
    compile_for_a_gpu(random.choice(sorted(SHARED_MEMORY)), drawn)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [("int", 8, None), ("int", 3, 64), ("nf4", 4, 64)], ids=name)
def test_numbers_are_written_some_rows_at_a_time(form, dtype, device, monkeypatch):
    """5 of the 21 rows at a time, so that the last piece is shorter, with every kind of scale; of a
    batch of 512, more than a tile has, as well."""
    x = torch.randn(random.choice((70, 512)), 192, dtype=dtype, device=device)
    monkeypatch.setattr("quantbench.ops.triton.linear.MOST_UNPACKED", 5 * 192 * x.element_size())
    for more in ({}, {"tensor_scale": 0.37}):
        multiplied(x, packed(form, 21, 192, device=device, **more))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("form", [("int", 8, None), ("int", 4, 64), ("fp6", 6, None)], ids=name)
def test_a_row_that_several_programs_share(form, device):
    for rows in (1, 9):
        multiplied(torch.randn(rows, 1088, device=device), packed(form, 3, 1088, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cublas_is_asked_for_sums_that_are_not_rounded(dtype):
    """By torch's own shape function, for which no card need be here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, numbers = (torch.empty(n, 64, dtype=dtype, device="cuda") for n in (70, 21))
        y = product(x, numbers)
    assert y.shape == (70, 21) and y.dtype == torch.float32


@ON_EVERY_DEVICE
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
        allowed = linear_contract.triton_allowed(Case(x, weight, None))
        error, allowed = (result - exact)[:, finite].abs(), allowed[:, finite]
        assert (error <= allowed).all()


@ON_EVERY_DEVICE
def test_leading_dimensions_stay_and_none_is_too_few(device):
    weight = packed(("int", 4, 64), 5, 64, device=device)
    x = torch.randn(2, 1, 3, 64, device=device)
    expected = linear(x.view(6, 64), weight)
    assert torch.equal(linear(x, weight), expected.view(2, 1, 3, 5))
    assert linear(x[0, 0, 0], weight).shape == (5,)
    assert linear(x[:0], weight).shape == (0, 1, 3, 5)


@ON_EVERY_DEVICE
def test_the_operator_keeps_its_promises_to_the_compiler(device):
    """Schema, fake results and tracing, by torch's own check; then whole, as a layer calls it."""
    weight = packed(("fp4", 4, 16), 10, 32, device=device)
    x = torch.randn(2, 32, device=device)
    scale, kind = as_bytes(weight.scale)
    arguments = (x, weight.planes, scale, None, None, kind)
    torch.library.opcheck(torch.ops.quantbench.triton_linear, (*arguments, "fp4", 4, 16))
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), linear(x, weight))


LARGE = [form for form in FORMATS if form[2] in (None, 16, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 64, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", LARGE, ids=name)
def test_layers_of_real_models(form, dtype, rows):
    for N, K in ((4096, 14336), (1024, 4096), (4097, 4096)):
        weight = packed(form, N, K, scale_dtype=dtype, device="cuda")
        multiplied(torch.randn(rows, K, dtype=dtype, device="cuda"), weight)


def captured_by_a_graph(function):
    """A CUDA graph of a function, and the tensor that each replay writes."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, function()


@pytest.mark.gpu
@pytest.mark.parametrize("form", [("int", 4, 64), ("nf4", 4, 64), ("fp8", 8, None)], ids=name)
def test_a_cuda_graph_replays_on_new_activations(form):
    weight = packed(form, 512, 1024, device="cuda")
    x = torch.randn(1, 1024, dtype=torch.bfloat16, device="cuda")
    graph, captured = captured_by_a_graph(lambda: linear(x, weight))
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


@ON_EVERY_DEVICE
@CACHE_FORMATS
def test_few_positions_in_a_deep_cache(format, device, monkeypatch):
    T = 1000
    if device == "cpu":
        T = 300  # the interpreter takes a second for each hundred
        monkeypatch.setattr(attention, "_processors", lambda device: 20)
    query, key, value = attention_contract.problem(1, 4, 1, T, 64, torch.float16, format, 0, device)
    for first, count in ((T - 10, 200), (0, 200), (T - 1, T)):
        y = attended(query, key, value, [first], [count])
    assert torch.equal(kernel(query, key, value, [-1], [T]), y)


@ON_EVERY_DEVICE
def test_a_compiled_cache_decodes_with_it(device):
    dtype = torch.float32
    caches = [CACHES["int8"](1, 2, 60, 64, dtype, device, 16) for _ in range(2)]
    caches[0].kernel = "triton"

    def layer(cache, query, key, value, positions):
        return attend(query, *cache.update(positions, key, value), positions, cache.window)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for position in range(20):  # past the window, so that its ring wraps
        parts = [torch.randn(1, heads, 1, 64, device=device) for heads in (8, 2, 2)]
        where = torch.tensor([position], device=device)
        ys = [step(c, *parts, where) for step, c in zip((compiled, layer), caches, strict=True)]
        torch.testing.assert_close(*ys, atol=1e-5, rtol=1e-5)  # float32 sums in another order


@pytest.mark.gpu
@CACHE_FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("B", "H", "K", "D"), [(1, 32, 8, 128), (4, 64, 8, 128), (1, 32, 32, 128), (2, 16, 8, 256)]
)
def test_caches_of_real_models(format, dtype, B, H, K, D):
    query, key, value = attention_contract.problem(B, H, K, 8192, D, dtype, format, 0, "cuda")
    for first, count in ((0, 1), (0, 200), (8000, 4097), (1, 8192)):
        y = attended(query, key, value, [first] * B, [count] * B)
        assert torch.equal(kernel(query, key, value, [first] * B, [count] * B), y)


@pytest.mark.gpu
@CACHE_FORMATS
def test_a_cuda_graph_replays_at_another_depth(format):
    query, key, value = attention_contract.problem(
        2, 32, 8, 4096, 128, torch.bfloat16, format, 0, "cuda"
    )
    first, count = (torch.tensor(x, device="cuda") for x in ([0, 7], [1, 2]))
    given = query, key, value, first, count
    graph, captured = captured_by_a_graph(lambda: attention.decode_attention(*given))
    for depths in ([1, 1], [200, 3000], [4096, 17]):
        count.copy_(torch.tensor(depths))
        first.copy_(torch.tensor([0, 4000]))
        query.copy_(torch.randn_like(query))
        graph.replay()
        assert torch.equal(captured, attended(*given))


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31():
    B, K, T, D = 17, 8, 131072, 128
    codes = torch.zeros(B, K, T, D, dtype=torch.int8, device="cuda")
    scale = torch.zeros(B, K, T, 1, dtype=torch.bfloat16, device="cuda")
    assert codes.numel() > 2**31
    last = torch.randn(1, K, 300, D, device="cuda").bfloat16()
    whole, small = kv.StoredCache(codes, scale, "int8"), attention_contract.stored(last, "int8")
    codes[-1:, :, -300:], scale[-1:, :, -300:] = small.codes, small.scale
    query = torch.randn(B, 32, D, device="cuda").bfloat16()
    y = kernel(query, whole, whole, [T - 300] * B, [300] * B)
    expected = exact.attention(
        query[-1:, :, None],
        *[kv.dequantize(small, torch.float64)] * 2,
        torch.ones(1, 300, dtype=torch.bool, device="cuda"),
    )
    allowed = attention_contract.triton_allowed(query, whole, whole, None, None, expected)
    expected.check(y[-1:, :, None], **allowed)
    assert (y[:-1] == 0).all()
