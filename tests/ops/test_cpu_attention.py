"""Decode attention in C++ against float64, for every instruction set this machine can run."""

import math

import pytest
import torch

from quantbench.ops.cpu import attention, build
from quantbench.ops.kv import Stored, dequantize
from tests.ops import at_once, decoding
from tests.ops.decoding import stored
from tests.ops.instructions import best as best
from tests.ops.instructions import use

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))

FORMATS = ("dense", "int8", "fp8", "int4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = build.ISAS


def bound(query, key, value, first, count):
    """Attention in float64, and what products of bytes may be off by."""
    exact = decoding.expected(query, key, value, first, count)
    sides = (dequantize(side, torch.float64) for side in (key, value))
    seen = decoding.visible(first, count, key.codes.shape[2])[:, None, None]
    return exact, decoding.byte_products(key.format, query[:, :, None], *sides, seen, exact)


def check(query, key, value, first, count):
    y = attention.decode_attention(query, key, value, first, count)
    expected, beside = bound(query, key, value, first, count)
    expected.check(y[:, :, None], dtype=query.dtype, beside=beside)
    return y


def check_past(query, key, value, first, count):
    """Output and denominators, which are float32 whatever the query is."""
    y, denominator = attention.past_attention(query, key, value, first, count)
    expected, beside = bound(query, key, value, first, count)
    expected.check(y[:, :, None], dtype=torch.float32, beside=beside)
    keys = dequantize(key, torch.float64).repeat_interleave(query.shape[1] // key.codes.shape[1], 1)
    scores = (keys @ query.double()[..., None])[..., 0] / math.sqrt(query.shape[-1])
    seen = decoding.visible(first, count, keys.shape[2])
    exact = scores.masked_fill(~seen[:, None], -math.inf).logsumexp(-1)
    # an error of every score, and of the sum; what bytes may be off by bounds the former
    relative = (beside / expected.mass).amax((-2, -1)) if torch.is_tensor(beside) else 0
    allowed = 64 * 2.0**-24 * (1 + expected.score.amax((-2, -1)) + exact.abs())
    assert denominator.dtype == torch.float32
    assert ((denominator - exact).abs() <= allowed + relative).all()


def problem(B, H, K, T, D, dtype, format, spare_rows=0):
    query = torch.randn(B, H, D).to(dtype)
    key, value = (stored(torch.randn(B, K, T, D).to(dtype), format, spare_rows) for _ in range(2))
    return query, key, value


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("B", "H", "K", "T", "D"),
    [
        (1, 8, 2, 600, 64),
        (5, 6, 6, 67, 80),
        (2, 16, 2, 129, 128),
        (1, 33, 1, 70, 256),
        (5, 7, 1, 33, 32),
        (2, 12, 4, 40, 72),
        (1, 1, 1, 1, 8),
    ],
)
def test_attention_is_right(isa, format, dtype, B, H, K, T, D):
    if format == "int4" and D % 32:
        pytest.skip("int4 has groups of 32")
    use(isa)
    query, key, value = problem(B, H, K, T, D, dtype, format, spare_rows=3)
    first, count = torch.randint(0, T, (B,)), torch.randint(1, T + 1, (B,))
    check(query, key, value, first, count)
    check(query, key, value, torch.zeros_like(first), torch.full_like(count, T))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 5, 68, 128, 129, 400])
def test_the_past_of_a_chunk(isa, format, dtype, queries):
    """As many queries a key head as the kernel takes at once, and more; rows wrap and differ."""
    use(isa)
    query, key, value = problem(2, 2 * queries, 2, 600, 64, dtype, format, spare_rows=1)
    check_past(query, key, value, torch.tensor([0, 580]), torch.tensor([600, 77]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["dense", "fp8"])
@pytest.mark.parametrize("head_dim", [32, 96, 128, 256])
def test_any_number_of_heads_and_lines(isa, format, head_dim):
    """Kernels take four heads at a time, and one or two lines of 32 numbers; rows wrap."""
    use(isa)
    T = 131
    for heads in range(1, 18):
        query, key, value = problem(1, heads, 1, T, head_dim, torch.bfloat16, format)
        check(query, key, value, torch.tensor([T - 3 * heads]), torch.tensor([T - heads]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "count", [1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 511, 512, 513, 600]
)
def test_counts_at_the_edges_of_blocks_and_parts(isa, format, count):
    """512 slots are a part; a ring ends in the middle of them, and of a block."""
    use(isa)
    query, key, value = problem(2, 8, 2, 600, 64, torch.bfloat16, format)
    first = torch.tensor([0, 600 - count // 2 - 1])
    check(query, key, value, first, torch.tensor([count, 1 + count // 2]))
    check(query, key, value, first + 300, torch.tensor([count, count]))


@pytest.mark.parametrize("format", FORMATS)
def test_a_deep_cache_and_a_first_beyond_its_end(format):
    query, key, value = problem(1, 4, 1, 20000, 64, torch.float32, format)
    y = check(query, key, value, torch.tensor([19990]), torch.tensor([19999]))
    again = attention.decode_attention(
        query, key, value, torch.tensor([-10]), torch.tensor([19999])
    )
    assert torch.equal(y, again)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(isa, format, dtype):
    use(isa)
    query, key, value = problem(2, 8, 2, 3000, 64, dtype, format)
    first, count = torch.tensor([5, 2990]), torch.tensor([2900, 777])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results += [attention.decode_attention(query, key, value, first, count)] * 2
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_extreme_values(isa, format):
    use(isa)
    B, H, K, T, D = 1, 8, 2, 100, 64
    query = torch.randn(B, H, D).bfloat16()
    keys, values = torch.randn(2, B, K, T, D).bfloat16()
    keys[:, :, 40] *= 1e4  # one key takes all the weight, or none of it
    keys[:, :, 41], values[:, :, 42:50] = 0, 0
    first, count = torch.tensor([10]), torch.tensor([80])
    key, value = stored(keys, format), stored(values, format)
    unseen = [*range(10), *range(90, 100)]
    for side in (key, value):  # what no row sees may hold anything
        if side.scale is not None:
            side.scale[:, :, unseen] = math.nan
        else:
            side.codes[:, :, unseen] = math.inf
    y = attention.decode_attention(query, key, value, first, count)
    assert y.isfinite().all()
    for side in (key, value):
        (side.codes if side.scale is None else side.scale)[:, :, unseen] = 0
    check(query, key, value, first, count)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_slots_whose_scores_are_minus_infinity_weigh_nothing(isa, head_dim):
    """Whole blocks of them, too, between others."""
    use(isa)
    T, begin, end = 250, 40, 200
    query, key, value = problem(1, 6, 2, T, head_dim, torch.bfloat16, "dense")
    query[:, :, 5] = 1
    first, count = torch.tensor([end]), torch.tensor([T - (end - begin)])  # all but begin to end
    check(query, key, value, first, count)
    expected, _ = bound(query, key, value, first, count)
    key.codes[:, :, begin:end, 5] = -math.inf
    y = attention.decode_attention(query, key, value, torch.tensor([0]), torch.tensor([T]))
    expected.check(y[:, :, None], dtype=query.dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zeros_give_zeros_and_nan_gives_nan(isa, dtype):
    use(isa)
    query, first, count = torch.randn(1, 4, 64).to(dtype), torch.tensor([0]), torch.tensor([40])
    zeros = torch.zeros(1, 2, 40, 64, dtype=dtype)
    for format in ("int8", "dense"):
        side = stored(zeros, format)
        assert (attention.decode_attention(query, side, side, first, count) == 0).all()
    keys = torch.randn(1, 2, 40, 64).to(dtype)
    keys[0, 0, 7, 3] = math.nan
    y = attention.decode_attention(
        query, stored(keys, "dense"), stored(zeros, "dense"), first, count
    )
    assert y[0, :2].isnan().all() and y[0, 2:].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_head_whose_query_is_not_finite_has_no_attention(isa, format, bad):
    use(isa)
    query, key, value = problem(1, 4, 2, 100, 64, torch.bfloat16, format)
    query[0, 1, 3] = bad
    y = attention.decode_attention(query, key, value, torch.tensor([0]), torch.tensor([100]))
    assert y[0, 1].isnan().all() and y[0, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_every_code_of_keys_and_values_and_scales_of_both_signs(isa, format):
    """Codes that quantization does not use, -128, and scales below zero, have a meaning, too."""
    use(isa)
    B, H, K, T, D = 1, 4, 2, 150, 64
    query = torch.randn(B, H, D).bfloat16()

    def side():
        if format == "int4":
            codes = torch.randint(0, 256, (B, K, T, D // 2)).to(torch.uint8)
            scale = torch.randn(B, K, T, D // 32) / 5
        else:
            codes = torch.randint(-128, 128, (B, K, T, D)).to(torch.int8)
            scale = torch.randn(B, K, T, 1) / 74
        return Stored(codes, scale.bfloat16(), format)

    check(query, side(), side(), torch.tensor([20]), torch.tensor([T - 5]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_16_bits_is_read_as_it_is(isa, dtype):
    """With one visible slot attention returns its value."""
    use(isa)
    query = torch.zeros(1, 1, 256)
    codes = torch.arange(-(2**15), 2**15).short().view(dtype)
    codes = codes[codes.isfinite()]
    if dtype == torch.bfloat16:  # AMX takes denormal bfloat16 for zeros
        codes = codes[(codes == 0) | (codes.abs() >= torch.finfo(dtype).tiny)]
        query = query.bfloat16()
    codes = torch.cat([codes, codes.new_zeros(-len(codes) % 256)])
    for chunk in codes.split(256):
        value = Stored(chunk.view(1, 1, 1, 256), None, "dense")
        y = attention.decode_attention(query, value, value, torch.tensor([0]), torch.tensor([1]))
        assert torch.equal(y.float(), dequantize(value).view(1, 1, 256))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_fp8_code_is_read_as_it_is(isa, dtype):
    """Denormals and NaN, too; as values, and as keys that are NaN."""
    use(isa)
    query = torch.zeros(1, 1, 256, dtype=dtype)
    scale = torch.full((1, 1, 1, 1), 0.5, dtype=dtype)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    value, zeros = Stored(every, scale, "fp8"), Stored(torch.zeros_like(every), scale, "fp8")
    one = torch.tensor([0]), torch.tensor([1])
    y = attention.decode_attention(query, zeros, value, *one)
    expected = dequantize(value).view(1, 1, 256)
    torch.testing.assert_close(y.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    assert attention.decode_attention(query, value, value, *one).isnan().all()


def test_tensors_that_are_views():
    query, key, value = problem(3, 8, 2, 50, 64, torch.bfloat16, "int4", spare_rows=2)
    first, count = torch.tensor([0, 3, 49]), torch.tensor([50, 9, 1])
    y = check(query, key, value, first, count)
    apart = torch.zeros(3, 64, 8, dtype=torch.bfloat16).mT  # elements of a head 8 apart
    apart.copy_(query)
    assert torch.equal(attention.decode_attention(apart, key, value, first, count), y)
    assert torch.equal(attention.decode_attention(query, key, value, first.int(), count.int()), y)


def test_two_calls_at_once():
    problems = [problem(1, 8, 2, 4000, 64, torch.bfloat16, format) for format in ("int8", "int4")]
    first, count = torch.tensor([7]), torch.tensor([3990])
    at_once.check(attention.decode_attention, [(*p, first, count) for p in problems], 30)


def test_compiles_once_however_the_position_moves():
    query, key, value = problem(2, 8, 2, 200, 64, torch.bfloat16, "int8")
    compilations = []

    def counting(graph, inputs):
        compilations.append(graph)
        return graph.forward

    def step(query, first, count):
        return attention.decode_attention(query * 2, key, value, first, count) + 1

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    for position in (1, 5, 64, 200):
        first, count = torch.tensor([0, position - 1]), torch.tensor([position, 3])
        assert torch.equal(compiled(query, first, count), step(query, first, count))
    assert len(compilations) == 1
    torch.testing.assert_close(
        torch.compile(step, fullgraph=True)(query, first, count), step(query, first, count)
    )


@pytest.mark.parametrize("op", ["cpu_decode_attention", "cpu_past_attention"])
def test_the_ops_are_registered_as_torch_wants_it(op):
    query, key, value = problem(2, 8, 2, 20, 64, torch.bfloat16, "int8")
    arguments = (query, key.codes, key.scale, value.codes, value.scale)
    where = (torch.tensor([0, 1]), torch.tensor([5, 20]), "int8")
    torch.library.opcheck(getattr(torch.ops.quantbench, op).default, (*arguments, *where))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": torch.tensor([0])}, "row 0 sees no slot"),
        ({"query": torch.randn(1, 3, 64)}, "3 for 2"),
        ({"query": torch.randn(1, 4, 60)}, "head_dim"),
        ({"query": torch.randn(1, 4, 64, dtype=torch.float64)}, "float32, bfloat16"),
        ({"first": torch.zeros(2, dtype=torch.long)}, "first and count"),
        ({"format": "int4"}, "int4"),
        ({"format": "int3"}, "no format int3"),
    ],
    ids=["count", "heads", "head_dim", "dtype", "first", "scales", "format"],
)
def test_what_it_does_not_take_is_an_error(change, message):
    query, key, value = problem(1, 4, 2, 10, 64, torch.float32, "int8")
    given = {"query": query, "first": torch.tensor([0]), "count": torch.tensor([3])} | change
    format = given.pop("format", "int8")
    key, value = (Stored(side.codes, side.scale, format) for side in (key, value))
    with pytest.raises(RuntimeError, match=message):
        attention.decode_attention(given["query"], key, value, given["first"], given["count"])


def test_a_cache_without_slots_is_an_error():
    query, key, value = problem(1, 4, 2, 0, 64, torch.float32, "dense")
    with pytest.raises(RuntimeError, match="the cache has no slots"):
        attention.decode_attention(query, key, value, torch.tensor([0]), torch.tensor([1]))
