"""Every kernel of decode attention against float64 (attention_contract.py)."""

import importlib.util
import itertools
import math
import random

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from quantbench.kv_cache import CACHES
from quantbench.ops.cpu import attention
from quantbench.ops.kv import StoredCache, dequantize
from tests import seeds
from tests.models.refused import refuses
from tests.ops.attention_contract import (
    CPU,
    EDGES,
    KERNELS,
    TORCH,
    check,
    draw,
    expected,
    problem,
    shapes,
    stored,
)
from tests.ops.exact import DTYPES
from tests.ops.instructions import NEEDS_COMPILER, same_at_once

FORMATS = pytest.mark.parametrize("format", CACHES)
ON_EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS, indirect=True)
ON_CPU = pytest.mark.parametrize("kernel", CPU, ids=lambda kernel: kernel.label, indirect=True)


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    """Few or many share a row's slots, as on a small and a large GPU, in Triton's interpreter."""
    if importlib.util.find_spec("triton") and not torch.cuda.is_available():
        count = random.choice((1, 16, 20))
        module = "quantbench.ops.triton.attention"
        monkeypatch.setattr(f"{module}._processors", lambda device: count)


@ON_EVERY_KERNEL
@FORMATS
def test_attention(kernel, format):
    """Over rings and ragged rows, of any shape and dtype."""
    for shape in [*shapes(kernel, format), *[None] * kernel.draws]:
        check(kernel, *draw(kernel, format, shape))


@ON_CPU
@FORMATS
def test_several_queries_of_a_row_of_the_cache(kernel, format):
    """Each has the bits that it has as the only one, however deep the cache is."""
    for T in (random.randint(1, 100), 600, 5000):
        rows, each, K, heads = 2, random.randint(2, 5), 8, random.randint(1, 3)
        dtype = random.choice(DTYPES)
        _, key, value = problem(rows, K, K, T, 32, dtype, format)
        query = torch.randn(rows * each, K * heads, 32).to(dtype)
        first, count = torch.randint(T, (rows * each,)), torch.randint(1, T + 1, (rows * each,))
        y = kernel(query, key, value, first, count)
        for i in range(each):
            one = slice(i, None, each)  # of each row
            with seeds.naming((T, each, heads, dtype, first, count)):
                alone = kernel(query[one], key, value, first[one], count[one])
                assert torch.equal(y[one], alone)


@ON_EVERY_KERNEL
@FORMATS
def test_scaled_and_bounded_scores_and_sinks(kernel, format):
    """Far beyond the bound, too, on either side."""
    for softcap in (None, 0.5, 4.0, 50.0)[kernel.slow :: 1 + kernel.slow]:
        given = draw(kernel, format)
        heads, width = given[0].shape[1:]
        scale = random.choice((0.05, 1.0, 4.0 / width))
        sinks = random.choice((None, 4 * torch.randn(heads, device=kernel.device)))
        check(kernel, *given, scale, softcap, sinks)


@pytest.mark.parametrize("window", [None, 5, 40])
def test_triton_reads_a_position_as_its_places(window):
    """Before and after a ring of slots is full, and within a window of more slots."""
    on_card = pytest.importorskip("quantbench.ops.triton.attention")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for slots in (5, 40, 64) if window else (64,):
        query, key, value = problem(2, 4, 2, slots, 32, torch.float32, "int8", device=device)
        for position in (0, 3, 4, slots - 1, *((slots, 3 * slots + 1) if window == slots else ())):
            seen = min(position + 1, slots, window or slots)
            first = (position + 1 - seen) % slots if window else 0
            places = (torch.tensor([x, x], device=device) for x in (first, seen))
            at = torch.tensor([position], device=device)
            y = on_card.decode_attention(query, key, value, None, at, window=window)
            assert torch.equal(y, on_card.decode_attention(query, key, value, *places))


@ON_EVERY_KERNEL
@FORMATS
def test_counts_at_the_edges_of_blocks_and_parts(kernel, format):
    """A row for each: 512 slots are a part, and a ring ends in the middle of it, and of a block.
    Triton's tiles have 32 to 128 slots, its shares of a row a multiple of 16."""
    T = 256 if kernel.slow else kernel.most_slots
    counts = [count for count in EDGES if count <= T]
    query, key, value = problem(len(counts), 4, 1, T, 64, torch.bfloat16, format, 0, kernel.device)
    check(kernel, query, key, value, [(T - count // 2) % T for count in counts], counts)


@ON_EVERY_KERNEL
def test_extreme_values(kernel):
    T, first = 100, 0 if kernel is TORCH else 10  # torch's reads all slots before the last
    for format, dtype in seeds.sample(itertools.product(CACHES, DTYPES), 4 if kernel.slow else 12):
        query = torch.randn(1, 8, 64).to(kernel.device, dtype)
        query[:, 3] = 0
        keys, values = torch.randn(2, 1, 2, T, 64).to(kernel.device, dtype)
        keys[:, :, 40] *= 1e3  # one key takes all the weight, or none of it
        keys[:, :, 41], values[:, :, 42:50] = 0, 0
        values[:, :, 50, 7], values[:, :, 51] = 1e4, values[:, :, 51] * 1e-3
        given = query, stored(keys, format), stored(values, format), [first], [80]
        y = check(kernel, *given)
        for side in given[1:3]:  # what no row sees may hold anything
            hidden = side.codes if side.scale is None else side.scale
            hidden[:, :, [*range(first), *range(first + 80, T)]] = math.nan
        assert torch.equal(kernel(*given), y), (format, dtype)


@ON_EVERY_KERNEL
def test_numbers_near_the_ends_of_the_dtype(kernel):
    interpreted = kernel.label == "triton"
    # The interpreter takes subnormal bfloat16 for something else, and AMX for zeros.
    for dtype in (torch.float16, torch.float32):
        query, keys, values = torch.randn(3, 1, 2, 30, 64)
        query, keys = query[:, :, 0].to(kernel.device, dtype), keys.to(kernel.device, dtype)
        smallest = torch.finfo(dtype).smallest_normal
        largest = 2.0**13 if dtype == torch.float16 else 2.0**100
        small = (values * smallest / 4).to(kernel.device, dtype)
        large = (values.clamp(-4, 4) * largest).to(kernel.device, dtype)
        triples = (query, keys, small), (query, keys, large)
        triples += (query * smallest, keys, keys), (large[:, :, 0], small, keys)
        for format in CACHES if not interpreted else seeds.sample(CACHES, 2):
            for given, key, value in triples:
                check(kernel, given, stored(key, format), stored(value, format), [0], [30])


@ON_EVERY_KERNEL
def test_zeros_give_zeros_and_nan_stays_in_its_head(kernel):
    query = torch.randn(1, 4, 64, device=kernel.device)
    for format in CACHES:
        zeros = torch.zeros(1, 2, 40, 64, device=kernel.device)
        nothing, broken = stored(zeros, format), stored(zeros, format)
        assert (kernel(query, nothing, nothing, [0], [40]) == 0).all()
        (broken.codes if broken.scale is None else broken.scale)[0, 0, 7] = math.nan
        for pair in ((broken, nothing), (nothing, broken)):
            y = kernel(query, *pair, [0], [40])
            assert y[0, :2].isnan().any(-1).all() and (y[0, 2:] == 0).all()


@ON_EVERY_KERNEL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_every_code_is_read_as_it_is(kernel, format, dtype):
    """With one visible slot attention returns its value; a key that is NaN gives NaN."""
    K, groups, kind = {
        "int8": (1, 1, torch.int8), "fp8": (1, 1, torch.float8_e4m3fn), "int4": (2, 8, torch.uint8),
    }[format]  # fmt: skip
    codes = torch.arange(256, dtype=torch.uint8, device=kernel.device).view(1, K, 1, 256 // K)
    scale = torch.full((1, K, 1, groups), 0.5, dtype=dtype, device=kernel.device)
    value = StoredCache(codes.view(kind), scale, format)
    key = StoredCache(torch.zeros_like(codes).view(kind), scale, format)
    query = torch.zeros(1, K, 256, dtype=dtype, device=kernel.device)
    y = kernel(query, key, value, [0], [1])
    wanted = dequantize(value, dtype).view(1, K, 256)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    if format == "fp8":
        assert kernel(query, value, value, [0], [1]).isnan().all()


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_16_bits_is_read_as_it_is(kernel, dtype):
    query = torch.zeros(1, 1, 256)
    codes = torch.arange(-(2**15), 2**15).short().view(dtype)
    codes = codes[codes.isfinite()]
    if dtype == torch.bfloat16:  # AMX takes denormal bfloat16 for zeros
        codes = codes[(codes == 0) | (codes.abs() >= torch.finfo(dtype).tiny)]
        query = query.bfloat16()
    codes = torch.cat([codes, codes.new_zeros(-len(codes) % 256)])
    for chunk in codes.split(256):
        value = StoredCache(chunk.view(1, 1, 1, 256), None, "dense")
        y = kernel(query, value, value, [0], [1])
        assert torch.equal(y.float(), dequantize(value).view(1, 1, 256))


@ON_EVERY_KERNEL
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_scales_of_both_signs_and_of_any_size(kernel, format):
    """Codes that quantization does not use, -128, and scales below zero have a meaning, too. Groups
    of int4 have weights of their own, so that small numbers are not lost beside large ones."""
    K, T, D = 2, 150, 64
    query = torch.randn(1, 4, D).to(kernel.device, torch.bfloat16)

    def side(*factors):
        low, high = (0, 256) if format == "int4" else (-128, 128)
        columns, groups = (D // 2, D // 32) if format == "int4" else (D, 1)
        dtype = torch.uint8 if format == "int4" else torch.int8
        codes = torch.randint(low, high, (1, K, T, columns)).to(kernel.device, dtype)
        scale = torch.randn(1, K, T, groups) / (5 if format == "int4" else 74)
        scale = scale * torch.tensor(factors[:groups])
        return StoredCache(codes, scale.to(kernel.device, torch.bfloat16), format)

    check(kernel, query, side(1.0, 1.0), side(1.0, 1.0), [20], [T - 5])
    check(kernel, query, side(1.0, 1.0), side(2.0**40, 1.0), [0], [T])


@ON_CPU
@FORMATS
def test_a_head_whose_query_is_not_finite_has_no_attention(kernel, format):
    for bad in (math.nan, math.inf, -math.inf):
        query, key, value = problem(1, 4, 2, 100, 64, torch.bfloat16, format)
        query[0, 1, 3] = bad
        y = kernel(query, key, value, [0], [100])
        assert y[0, 1].isnan().all() and y[0, [0, 2, 3]].isfinite().all()


@ON_CPU
@pytest.mark.parametrize("head_dim", [64, 128])
def test_slots_whose_scores_are_minus_infinity_weigh_nothing(kernel, head_dim):
    """Whole blocks of them, too, between others."""
    T, begin, end = 250, 40, 200
    query, key, value = problem(1, 6, 2, T, head_dim, torch.bfloat16, "dense")
    query[:, :, 5] = 1
    seen = torch.tensor([end]), torch.tensor([T - (end - begin)])  # all but those between
    exact = expected(query, key, value, *seen)
    key.codes[:, :, begin:end, 5] = -math.inf
    exact.check(kernel(query, key, value, [0], [T])[:, :, None], dtype=query.dtype)


@ON_EVERY_KERNEL
@FORMATS
def test_tensors_that_are_views(kernel, format):
    """They give the same bits, but for torch's own kernel, which may sum in another order."""
    query, key, value = problem(3, 8, 2, 50, 64, torch.float16, format, 2, kernel.device)
    first, count = torch.tensor([0, 3, 40], device=kernel.device), torch.tensor([41, 9, 1])
    key, value = key.slots(0, 41), value.slots(0, 41)  # heads lie apart, with slots between them
    y = check(kernel, query, key, value, first, count)
    apart = torch.zeros(3, 64, 8, dtype=torch.float16, device=query.device).mT  # elements apart
    wide = torch.zeros(3, 16, 64, dtype=torch.float16, device=query.device)[:, 4:12]
    for view in seeds.sample((apart, wide), 1 if kernel.slow else 2):
        view.copy_(query)
        viewed = check(kernel, view, key, value, first.int(), count.int())
        assert kernel is TORCH or torch.equal(viewed, y)
    same = torch.tensor([20], device=query.device).expand(3)
    check(kernel, query, key, value, same, same)


# -------------------------------------------------------------------------------- the C++ kernel


@ON_CPU
@FORMATS
def test_the_past_of_a_chunk(kernel, format):
    """As many queries a key head as the kernel takes at once, and more; rows wrap and differ.
    Output and denominators are float32 whatever the query is."""
    for queries in (1, 129, *seeds.sample((2, 5, 17, 68, 128, 300), 1)):
        dtype = seeds.sample(DTYPES, 1)[0]
        query, key, value = problem(2, 2 * queries, 2, 600, 64, dtype, format, 1)
        first, count = torch.tensor([0, 580]), torch.tensor([600, 77])
        y, denominator = attention.past_attention(query, key, value, first, count)
        exact = expected(query, key, value, first, count)
        beside = kernel.allowed(query, key, value, first, count, exact)["beside"]
        exact.check(y[:, :, None], dtype=torch.float32, beside=beside)
        wanted = exact.denominator[..., 0]
        # An error of every score, and of the sum; what bytes may be off by bounds the former.
        relative = (beside / exact.mass).amax((-2, -1)) if torch.is_tensor(beside) else 0
        allowed = 64 * 2.0**-24 * (1 + exact.score.amax((-2, -1)) + wanted.abs())
        assert denominator.dtype == torch.float32
        assert ((denominator - wanted).abs() <= allowed + relative).all()


@NEEDS_COMPILER
@FORMATS
def test_a_deep_cache_and_a_first_beyond_its_end(format):
    given = problem(1, 4, 1, 20000, 64, torch.float32, format)
    first, count = torch.tensor([19990]), torch.tensor([19999])
    y = attention.decode_attention(*given, first, count)
    expected(*given, first, count).check(y[:, :, None])
    assert torch.equal(attention.decode_attention(*given, first - 20000, count), y)


@ON_CPU
@FORMATS
def test_any_number_of_threads_gives_the_same_bits(kernel, format, same_for_any_threads):
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = problem(2, 8, 2, 3000, 64, dtype, format)
        given = query, key, value, [5, 2990], [2900, 777]
        same_for_any_threads(lambda given=given: kernel(*given))


@NEEDS_COMPILER
def test_two_calls_at_once():
    problems = [problem(1, 8, 2, 4000, 64, torch.bfloat16, format) for format in ("int8", "int4")]
    places = torch.tensor([7]), torch.tensor([3990])
    same_at_once(attention.decode_attention, [(*p, *places) for p in problems], 30)


@ON_EVERY_KERNEL
def test_compiles_once_however_the_position_moves(kernel):
    torch._dynamo.reset()  # `step` is one function to it, and at most eight graphs
    given = problem(2, 8, 2, 70, 64, torch.bfloat16, "int8", device=kernel.device)
    query, *sides = given
    compiler = CompileCounter()

    def step(query, first, count):
        return kernel(query * 2, *sides, first, count) + 1

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for position in (1, 5, 64, 70):
        places = torch.tensor([[0, position - 1], [position, 3]], device=kernel.device)
        assert torch.equal(compiled(query, *places), step(query, *places))
    assert compiler.frame_count == 1


@pytest.mark.parametrize(
    "op",
    [
        *(pytest.param(f"cpu_{op}_attention", marks=NEEDS_COMPILER) for op in ("decode", "past")),
        "triton_decode_attention",
    ],
)
@pytest.mark.parametrize("format", ["dense", "int8", "int4"])  # opcheck has no product of fp8
def test_the_ops_are_registered_as_torch_wants_it(op, format):
    device = "cpu"
    if op.startswith("triton"):
        pytest.importorskip("quantbench.ops.triton.attention")
        device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key, value = problem(2, 8, 2, 20, 64, torch.bfloat16, format, device=device)
    arguments = (query, key.codes, key.scale, value.codes, value.scale)
    places = (torch.tensor(x, device=device) for x in ([0, 1], [5, 20]))
    op = getattr(torch.ops.quantbench, op).default
    how = (0.2, 5.0)
    torch.library.opcheck(op, (*arguments, *places, format, *how))


@NEEDS_COMPILER
def test_what_it_does_not_take_is_an_error():
    whole, *sides = problem(1, 4, 2, 10, 64, torch.float32, "int8")
    zero, three = torch.tensor([0]), torch.tensor([3])

    def run(query=whole, first=zero, count=three, format="int8", sides=sides):
        sides = (StoredCache(side.codes, side.scale, format) for side in sides)
        return attention.decode_attention(query, *sides, first, count)

    assert run().shape == (1, 4, 64)
    empty = [StoredCache(side.codes[:, :, :0].float(), None, "dense") for side in sides]
    wrong = (
        ({"count": zero}, "row 0 sees no slot"),
        ({"query": torch.randn(1, 3, 64)}, "3 for 2"),
        ({"query": torch.randn(1, 4, 60)}, "head_dim"),
        ({"query": whole.double()}, "float32, bfloat16"),
        ({"first": torch.zeros(2, dtype=torch.long)}, "first and count"),
        ({"format": "int4"}, "int4"),
        ({"format": "int3"}, "as int3"),
        ({"format": "dense", "sides": empty}, "the cache has no slots"),
    )
    refuses(run, wrong)
