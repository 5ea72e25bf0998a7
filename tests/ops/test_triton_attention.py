"""Decode attention in Triton against float64, in Triton's interpreter and, where one is, on a GPU;
and whether it compiles for one, which the interpreter cannot tell."""

import math

import pytest
import torch

from quantbench.kv_cache import CACHES
from quantbench.ops.attend import attend
from quantbench.ops.kv import Stored, dequantize
from tests.ops import decoding, exact
from tests.ops.decoding import stored
from tests.ops.exact import UNIT
from tests.ops.gpu_compiler import compile_for_gpus

pytest.importorskip("triton")

from quantbench.ops.triton import attention  # noqa: E402

IN_INTERPRETER = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the GPU here"),
)
DEVICES = pytest.mark.parametrize(
    "device", [IN_INTERPRETER, pytest.param("cuda", marks=pytest.mark.gpu)]
)
FORMATS = pytest.mark.parametrize("format", CACHES)
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BFLOAT16, FLOAT16, FLOAT32)


def problem(B, H, K, T, D, dtype, format, device, spare_rows=0):
    query = torch.randn(B, H, D).to(device, dtype)
    sides = (torch.randn(B, K, T, D).to(device, dtype) for _ in range(2))
    return query, *(stored(side, format, spare_rows) for side in sides)


def run(query, key, value, first, count):
    places = (torch.as_tensor(x, device=query.device) for x in (first, count))
    return attention.decode_attention(query, key, value, *places)


def check(query, key, value, first, count):
    y = run(query, key, value, first, count)
    first, count = (torch.as_tensor(x, device=query.device) for x in (first, count))
    expected = decoding.expected(query, key, value, first, count)
    expected.check(y[:, :, None], roundings=roundings(query, key.format))
    return y


def roundings(query: torch.Tensor, format: str) -> float:
    """How often attention weights are rounded before the product, counted in units of query's
    dtype."""
    if query.dtype == FLOAT32:
        return 0
    if format == "dense":
        # The interpreter cuts bfloat16 off where a GPU rounds it: as good as two, and the result's.
        return 3 if query.dtype == BFLOAT16 and not query.is_cuda else 1
    cut = 1 if query.dtype == BFLOAT16 and not query.is_cuda else 0
    return UNIT[FLOAT16] / UNIT[query.dtype] + cut


@pytest.fixture(params=[1, 16])
def processors(request, monkeypatch):
    """Few or many, which share a row's slots."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention, "_processors", lambda device: request.param)
    elif request.param > 1:
        pytest.skip("a GPU has as many as it has")


@DEVICES
@FORMATS
@pytest.mark.parametrize(
    ("B", "H", "K", "T", "D"),
    [
        (1, 8, 2, 300, 64),
        (5, 3, 3, 67, 80),
        (1, 16, 2, 129, 128),
        (1, 20, 1, 70, 256),
        (3, 7, 1, 33, 32),
        (2, 8, 4, 40, 72),
        (2, 40, 1, 50, 96),
        (1, 128, 1, 40, 64),
        (1, 1, 1, 1, 8),
    ],
)
def test_attention_is_right(format, B, H, K, T, D, device):
    """Over rings and ragged rows."""
    if format == "int4" and D % 32:
        pytest.skip("int4 has groups of 32")
    dtype = DTYPES[(D // 8 + list(CACHES).index(format)) % 3]
    query, key, value = problem(B, H, K, T, D, dtype, format, device, spare_rows=2)
    check(query, key, value, torch.randint(0, T, (B,)), torch.randint(1, T + 1, (B,)))
    check(query, key, value, torch.zeros(B).int(), torch.full((B,), T))


@DEVICES
@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(format, dtype, device):
    query, key, value = problem(2, 8, 2, 150, 64, dtype, format, device)
    check(query, key, value, [140, 3], [150, 77])


@DEVICES
@FORMATS
def test_counts_at_the_edges_of_tiles_and_shares(format, processors, device):
    """A row for each of them: tiles have 32 to 128 slots, shares a multiple of 16."""
    counts = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256]
    query, key, value = problem(len(counts), 4, 1, 256, 64, BFLOAT16, format, device)
    check(query, key, value, [(37 * count + 200) % 256 for count in counts], counts)


@DEVICES
@FORMATS
def test_few_positions_in_a_deep_cache(format, device, monkeypatch):
    T = 1000
    if device == "cpu":
        monkeypatch.setattr(attention, "_processors", lambda device: 20)
    query, key, value = problem(1, 4, 1, T, 64, FLOAT16, format, device)
    for first, count in ((990, 200), (0, 200), (T - 1, T)):
        y = check(query, key, value, [first], [count])
    assert torch.equal(run(query, key, value, [-1], [T]), y)


@DEVICES
@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(format, dtype, device):
    B, H, K, T, D = 1, 8, 2, 100, 64
    query = torch.randn(B, H, D).to(device, dtype)
    query[:, 3] = 0
    keys, values = torch.randn(2, B, K, T, D).to(device, dtype)
    keys[:, :, 40] *= 1e3  # one key takes all the weight, or none of it
    keys[:, :, 41], values[:, :, 42:50] = 0, 0
    values[:, :, 50, 7], values[:, :, 51] = 1e4, values[:, :, 51] * 1e-3
    key, value = stored(keys, format), stored(values, format)
    expected = check(query, key, value, [10], [80])
    for side in (key, value):  # what no row sees may hold anything
        (side.codes if side.scale is None else side.scale)[:, :, [*range(10), *range(90, T)]] = (
            math.nan
        )
    assert torch.equal(run(query, key, value, [10], [80]), expected)


@DEVICES
@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_near_the_ends_of_the_dtype(format, dtype, device):
    if dtype == BFLOAT16 and device == "cpu":
        pytest.skip("the interpreter takes subnormal bfloat16 for something else")
    smallest = torch.finfo(dtype).smallest_normal
    query, keys, values = torch.randn(3, 1, 2, 30, 64)
    query = query[:, :, 0].to(device, dtype)
    small = (values * smallest / 4).to(device, dtype)
    keys = keys.to(device, dtype)
    assert small.any()
    check(query, stored(keys, format), stored(small, format), [0], [30])
    check(query * smallest, stored(keys, format), stored(keys, format), [0], [30])
    large = (values.clamp(-4, 4) * (2.0**13 if dtype == FLOAT16 else 2.0**100)).to(device, dtype)
    check(query, stored(keys, format), stored(large, format), [0], [30])
    check(large[:, :, 0], stored(small, format), stored(keys, format), [0], [30])


@DEVICES
def test_a_scale_of_int4_may_dwarf_its_neighbour(device):
    """Groups of 32 have weights of their own, so that small numbers are not lost in float16."""
    query, keys, values = torch.randn(3, 1, 2, 40, 64, device=device)
    values[..., :32] *= 2.0**40
    query, keys, values = query[:, :, 0].bfloat16(), keys.bfloat16(), values.bfloat16()
    check(query, stored(keys, "int4"), stored(values, "int4"), [0], [40])


@DEVICES
@FORMATS
def test_zeros_give_zeros_and_nan_stays_in_its_head(format, device):
    query, zeros = torch.randn(1, 4, 64, device=device), torch.zeros(1, 2, 40, 64, device=device)
    nothing = stored(zeros, format)
    assert (run(query, nothing, nothing, [0], [40]) == 0).all()
    zeros[0, 0, 7, 3] = math.nan
    broken = Stored(zeros, None, "dense") if format == "dense" else stored(zeros[:, :], format)
    if broken.scale is not None:
        broken.scale[0, 0, 7] = math.nan
    for pair in ((broken, nothing), (nothing, broken)):
        y = run(query, *pair, [0], [40])
        assert y[0, :2].isnan().any(-1).all() and (y[0, 2:] == 0).all()


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_every_code_is_read_as_it_is(format, dtype, device):
    """With one visible slot attention returns its value."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if format == "int4":
        codes = codes.view(1, 2, 1, 128)
    else:
        codes = codes.view(torch.int8 if format == "int8" else torch.float8_e4m3fn)[None, None]
        codes = codes.view(1, 1, 1, 256)
    K = codes.shape[1]
    scale = torch.full((1, K, 1, 8 if format == "int4" else 1), 0.5, dtype=dtype, device=device)
    value = Stored(codes, scale, format)
    key = Stored(torch.zeros_like(codes.view(torch.uint8)).view(codes.dtype), scale, format)
    y = run(torch.zeros(1, K, 256, dtype=dtype, device=device), key, value, [0], [1])
    expected = dequantize(value, dtype).view(1, K, 256)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@DEVICES
@FORMATS
def test_tensors_that_are_views(format, device):
    query, key, value = problem(3, 8, 2, 50, 64, FLOAT16, format, device, spare_rows=2)
    first = torch.tensor([0, 3, 49], device=device)
    key, value = key.slots(0, 41), value.slots(0, 41)  # heads lie apart, with slots between them
    y = check(query, key, value, first, [41, 9, 1])
    apart = torch.zeros(3, 64, 8, dtype=FLOAT16, device=device).mT  # elements of a head 8 apart
    apart.copy_(query)
    assert torch.equal(run(apart, key, value, first.int(), torch.tensor([41, 9, 1]).int()), y)
    wide = torch.zeros(3, 16, 64, dtype=FLOAT16, device=device)[:, 4:12]
    wide.copy_(query)
    assert torch.equal(run(wide, key, value, first, [41, 9, 1]), y)
    same = torch.tensor([20], device=device).expand(3)
    check(query, key, value, same, same)


@DEVICES
def test_the_operator_keeps_its_promises_to_the_compiler(device):
    """Schema, fake results and tracing, by torch's own check; then whole, as a cache calls it."""
    query, key, value = problem(2, 8, 2, 20, 64, BFLOAT16, "int4", device)
    where = [torch.tensor(x, device=device) for x in ([0, 1], [5, 20])]
    arguments = (query, key.codes, key.scale, value.codes, value.scale, *where, "int4")
    torch.library.opcheck(torch.ops.quantbench.triton_decode_attention.default, arguments)

    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(query, first, count):
        return attention.decode_attention(query * 2, key, value, first, count) + 1

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    for position in (1, 5, 20):
        where[1].fill_(position)
        assert torch.equal(compiled(query, *where), step(query, *where))
    assert len(graphs) == 1


@DEVICES
def test_a_compiled_cache_decodes_with_it(device):
    dtype = FLOAT32
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


def test_kernels_compile_for_gpus():
    compile_for_gpus("compile_triton_attention")


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(
    ("B", "H", "K", "D"), [(1, 32, 8, 128), (4, 64, 8, 128), (1, 32, 32, 128), (2, 16, 8, 256)]
)
def test_caches_of_real_models(format, dtype, B, H, K, D):
    query, key, value = problem(B, H, K, 8192, D, dtype, format, "cuda")
    for first, count in ((0, 1), (0, 200), (8000, 4097), (1, 8192)):
        y = check(query, key, value, [first] * B, [count] * B)
        assert torch.equal(run(query, key, value, [first] * B, [count] * B), y)


@pytest.mark.gpu
@FORMATS
def test_a_cuda_graph_replays_at_another_depth(format):
    query, key, value = problem(2, 32, 8, 4096, 128, BFLOAT16, format, "cuda")
    first, count = (torch.tensor(x, device="cuda") for x in ([0, 7], [1, 2]))
    attention.decode_attention(query, key, value, first, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention.decode_attention(query, key, value, first, count)
    for depths in ([1, 1], [200, 3000], [4096, 17]):
        count.copy_(torch.tensor(depths))
        first.copy_(torch.tensor([0, 4000]))
        query.copy_(torch.randn_like(query))
        graph.replay()
        assert torch.equal(captured, check(query, key, value, first, count))


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31():
    B, K, T, D = 17, 8, 131072, 128
    codes = torch.zeros(B, K, T, D, dtype=torch.int8, device="cuda")
    scale = torch.zeros(B, K, T, 1, dtype=BFLOAT16, device="cuda")
    assert codes.numel() > 2**31
    last = torch.randn(1, K, 300, D, device="cuda").bfloat16()
    whole, small = Stored(codes, scale, "int8"), stored(last, "int8")
    codes[-1:, :, -300:], scale[-1:, :, -300:] = small.codes, small.scale
    query = torch.randn(B, 32, D, device="cuda").bfloat16()
    y = run(query, whole, whole, [T - 300] * B, [300] * B)
    expected = exact.attention(
        query[-1:, :, None],
        *[dequantize(small, torch.float64)] * 2,
        torch.ones(1, 300, dtype=torch.bool, device="cuda"),
    )
    expected.check(y[-1:, :, None], roundings=roundings(query, "int8"))
    assert (y[:-1] == 0).all()
