"""Every cache against attention in float64 over the keys and values that it reads back, and what
it reads back against what went in."""

import pytest
import torch

from quantbench.errors import UsageError
from quantbench.kv_cache import CACHES, base
from quantbench.kv_cache.dense import DenseKVCache
from quantbench.kv_cache.eight_bit import Float8KVCache, Int8KVCache
from quantbench.kv_cache.int4 import Int4KVCache
from quantbench.ops import prefill_attention as chunk
from quantbench.ops.attend import attend
from quantbench.ops.cpu.build import unavailable
from quantbench.ops.kv import dequantize
from tests.ops.exact import UNIT, attention, causal

FORMATS = pytest.mark.parametrize("format", CACHES)
KERNELS = ("torch",) if unavailable() else ("torch", "cpu")
SHAPES = pytest.mark.parametrize(
    ("B", "H", "K", "D"),
    [
        (1, 4, 4, 64),
        (5, 8, 2, 80),
        (2, 16, 2, 128),
        (5, 8, 1, 64),
        (1, 8, 2, 256),
    ],
    ids=["heads of their own", "GQA 4", "GQA 8", "MQA", "head_dim 256"],
)
BLOCK = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that short sequences have many block edges."""
    monkeypatch.setattr(chunk, "BLOCK", BLOCK)


def made(format, B, K, T, D, dtype=torch.float32, window=None, kernel="torch", spare_rows=0):
    if format == "int4" and D % 32:
        pytest.skip("int4 has groups of 32")
    cache = CACHES[format](B + spare_rows, K, T, D, dtype, "cpu", window)
    cache.kernel = kernel
    return cache


def sequence(B, H, K, L, D, dtype=torch.float32):
    return (torch.randn(B, heads, L, D).to(dtype) for heads in (H, K, K))


def attended(cache, query, key, value, positions):
    """What a layer of a model does."""
    return attend(query, *cache.update(positions, key, value), positions, cache.window)


def through(cache, query, key, value, lengths, start=0):
    """All positions of a sequence, in pieces of these lengths; those of one are decode."""
    outputs = []
    for positions in (torch.arange(query.shape[2]) + start).split(lengths):
        piece = positions - start
        parts = (x[:, :, piece] for x in (query, key, value))
        outputs.append(attended(cache, *parts, positions))
    return torch.cat(outputs, 2)


def as_read(cache, x):
    """Keys or values as the cache reads them back."""
    B, K, L, D = x.shape
    whole = type(cache)(B, K, L, D, x.dtype, "cpu")
    whole.update(torch.arange(L), x, x)
    return dequantize(whole.stored("key", B), torch.float64)


def check(cache, y, query, key, value, window=None):
    """A chunk reads in the model's dtype, rounds weights to it, and each block's sum."""
    positions = torch.arange(query.shape[2])
    visible = causal(positions, positions, window)
    exact = attention(query, as_read(cache, key), as_read(cache, value), visible)
    if y.dtype == torch.float32:
        exact.check(y)
    else:
        exact.check(y, read=0 if cache.format == "dense" else UNIT[y.dtype], roundings=2)


def pieces(L, *starts):
    """`starts`, then by token."""
    return [*starts, *[1] * (L - sum(starts))]


# ---------------------------------------------------------------------------------- attention


@FORMATS
@SHAPES
@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_position_by_position(format, B, H, K, D, kernel):
    """Past the edges at 32, 64 and 128 of what kernels read at once."""
    L = 131
    cache = made(format, B, K, L + 5, D, kernel=kernel, spare_rows=2)
    query, key, value = sequence(B, H, K, L, D)
    check(cache, through(cache, query, key, value, 1), query, key, value)


@FORMATS
@SHAPES
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_prefill_in_chunks(format, B, H, K, D, dtype):
    L = 5 * BLOCK + 1
    query, key, value = sequence(B, H, K, L, D, dtype)
    for lengths in ([L], [BLOCK, BLOCK, L - 2 * BLOCK], [1, BLOCK - 1, BLOCK + 1, 7, L - 40]):
        cache = made(format, B, K, L, D, dtype, spare_rows=1)
        check(cache, through(cache, query, key, value, lengths), query, key, value)


@FORMATS
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [1, 2, 5, BLOCK, 2 * BLOCK + 3, 70, 100])
@pytest.mark.parametrize(
    "first", [(), (3,), (BLOCK, 9), (37,), (70,)], ids=lambda sizes: f"chunks {sizes}"
)
def test_a_sliding_window(format, kernel, window, first):
    """Smaller than the sequence, as large, and larger; chunks smaller and larger than it, and then
    decode over all of its wraps."""
    B, H, K, L, D = 2, 4, 2, 70, 32
    cache = made(format, B, K, L, D, window=window, kernel=kernel)
    assert cache.slots == min(window, L)
    query, key, value = sequence(B, H, K, L, D)
    y = through(cache, query, key, value, pieces(L, *first))
    check(cache, y, query, key, value, window)


@FORMATS
def test_random_shapes_and_pieces(format):
    random = torch.Generator().manual_seed(torch.initial_seed())

    def draw(least, most):
        return int(torch.randint(least, most + 1, (), generator=random))

    for _ in range(25):
        B, K, group, D, L = draw(1, 3), draw(1, 3), draw(1, 5), 32 * draw(1, 3), draw(1, 60)
        window = draw(1, 70) if draw(0, 1) else None
        lengths, left = [], L
        while left:
            lengths.append(min(left, draw(1, 3) if draw(0, 1) else draw(1, 60)))
            left -= lengths[-1]
        kernel = KERNELS[draw(0, len(KERNELS) - 1)]
        cache = made(format, B, K, L + draw(0, 9), D, window=window, kernel=kernel)
        query, key, value = sequence(B, K * group, K, L, D)
        check(cache, through(cache, query, key, value, lengths), query, key, value, window)


@FORMATS
@pytest.mark.parametrize("window", [None, 11])
def test_chunks_of_any_length_are_one_prefill_and_token_by_token(format, window):
    B, H, K, L, D = 2, 4, 2, 50, 64
    query, key, value = sequence(B, H, K, L, D)
    outputs, kept = [], []
    for lengths in (L, 16, 7, 49, 1):
        cache = made(format, B, K, L, D, window=window)
        outputs.append(through(cache, query, key, value, lengths))
        kept.append([buffer.clone() for buffer in cache.buffers()])
    for y, buffers in zip(outputs[1:], kept[1:], strict=True):
        # Sums of float32 in another order; each is within 64 roundings of the exact one.
        torch.testing.assert_close(y, outputs[0], atol=1e-5, rtol=1e-5)
        assert all(map(torch.equal, buffers, kept[0]))


@FORMATS
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kernel", KERNELS)
def test_fewer_rows_than_the_cache_has(format, window, kernel):
    """The same bits as in a cache of their own, and the other rows stay as they are."""
    query, key, value = sequence(2, 4, 2, 30, 64)
    own, larger = (
        made(format, 2, 2, 33, 64, window=window, kernel=kernel, spare_rows=rows) for rows in (0, 3)
    )
    lengths = pieces(30, 13, 8)
    expected = through(own, query, key, value, lengths)
    assert torch.equal(through(larger, query, key, value, lengths), expected)
    assert not any(buffer[2:].any() for buffer in larger.buffers())


# ---------------------------------------------------------------------------------- keeping


@FORMATS
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kernel", KERNELS)
def test_reset_and_used_again_it_is_as_new(format, window, kernel):
    query, key, value = sequence(2, 4, 2, 30, 64)
    lengths = pieces(30, 13, 8)
    fresh = made(format, 2, 2, 33, 64, window=window, kernel=kernel)
    expected = through(fresh, query, key, value, lengths)
    used = made(format, 2, 2, 33, 64, window=window, kernel=kernel)
    through(used, *sequence(2, 4, 2, 33, 64), pieces(33, 20))
    places = [buffer.data_ptr() for buffer in used.buffers()]
    used.reset()
    assert not any(buffer.any() for buffer in used.buffers())
    assert torch.equal(through(used, query, key, value, lengths), expected)
    assert all(map(torch.equal, used.buffers(), fresh.buffers()))
    assert [buffer.data_ptr() for buffer in used.buffers()] == places


@FORMATS
def test_without_reset_later_positions_are_not_seen(format):
    """A new prompt at position 0 needs no reset: what an older, longer one left lies ahead."""
    query, key, value = sequence(1, 4, 2, 20, 64)
    fresh, used = (made(format, 1, 2, 40, 64) for _ in range(2))
    through(used, *sequence(1, 4, 2, 40, 64), 40)
    lengths = pieces(20, 9, 5)
    expected = through(fresh, query, key, value, lengths)
    assert torch.equal(through(used, query, key, value, lengths), expected)


@FORMATS
@pytest.mark.parametrize("window", [None, 7, 12])
@pytest.mark.parametrize("depth", [0, 1, 6, 7, 8, 29, 30])
def test_fill_leaves_what_update_leaves(format, window, depth, monkeypatch):
    monkeypatch.setattr(base, "FILLED_AT_ONCE", 8)
    filled, written = (made(format, 2, 3, 30, 32, torch.bfloat16, window) for _ in range(2))
    calls, update = [], filled.store
    monkeypatch.setattr(filled, "store", lambda *call: (calls.append(call), update(*call)))
    filled.fill(depth)
    at = torch.cat([positions for positions, _, _ in calls])
    assert torch.equal(at, torch.arange(depth))
    for i in range(depth):  # by token
        key, value = (torch.cat([call[side] for call in calls], 2)[:, :, [i]] for side in (1, 2))
        written.update(torch.tensor([i]), key, value)
    assert all(map(torch.equal, filled.buffers(), written.buffers()))
    reached = torch.zeros(filled.slots, dtype=torch.bool)
    reached[torch.arange(depth) % filled.slots] = True
    for side in ("key", "value"):
        stored = dequantize(filled.stored(side, 2))
        assert torch.equal(stored.abs().amax((0, 1, 3)) > 0, reached)
        if depth:  # unit normals: five deviations of a variance over so many
            seen = stored[:, :, reached]
            assert abs(seen.var() - 1) < 0.1 + 5 * (2 / seen.numel()) ** 0.5


BYTES = {  # of a position of a head, keys and values, for head_dim 64 and a dtype of so many bytes
    "dense": lambda size: 2 * 64 * size,
    "int8": lambda size: 2 * (64 + size),
    "fp8": lambda size: 2 * (64 + size),
    "int4": lambda size: 2 * (32 + 2 * size),
}


@FORMATS
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("window, slots", [(None, 40), (7, 7), (40, 40), (99, 40)])
def test_nbytes_is_what_is_stored_and_what_the_docstring_says(format, dtype, window, slots):
    cache = CACHES[format](3, 2, 40, 64, dtype, "cpu", window)
    assert cache.nbytes == sum(buffer.untyped_storage().nbytes() for buffer in cache.buffers())
    assert cache.nbytes == 3 * 2 * slots * BYTES[format](dtype.itemsize)
    assert not cache.state_dict()  # a checkpoint has no caches in it
    on_meta = CACHES[format](3, 2, 40, 64, dtype, "meta", window)
    assert on_meta.nbytes == cache.nbytes and all(buffer.is_meta for buffer in on_meta.buffers())
    before = cache.nbytes
    cache.update(torch.arange(5), *torch.randn(2, 3, 2, 5, 64).to(dtype))
    assert cache.nbytes == before


# ---------------------------------------------------------------------------------- rounding


def rounded_int8(x):
    """127 steps to the largest of the token and head."""
    step = x.double().abs().amax(-1, keepdim=True) / 127
    return (x.double() / step).round() * step


def rounded_fp8(x):
    """The nearest E4M3 number, 448 standing for the largest of the token and head."""
    step = x.double().abs().amax(-1, keepdim=True) / 448
    y = x.double() / step
    spacing = 2.0 ** (y.abs().log2().floor().clamp(min=-6) - 3)  # three bits behind the first
    return (y / spacing).round() * spacing * step


def rounded_int4(x):
    """-8 stands for the largest in size of every 32 numbers."""
    groups = x.double().unflatten(-1, (-1, 32))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    step = extreme / -8
    return ((groups / step).round().clamp(-8, 7) * step).flatten(-2)


ROUNDED = {Int8KVCache: rounded_int8, Float8KVCache: rounded_fp8, Int4KVCache: rounded_int4}
QUANTIZED = pytest.mark.parametrize("cache_type", ROUNDED, ids=lambda t: t.format)


@QUANTIZED
def test_numbers_are_rounded_to_the_nearest_code(cache_type):
    """But for those between two codes, that float32 may put to the other one: they are few."""
    x = torch.randn(3, 2, 100, 128)
    cache = cache_type(3, 2, 100, 128, torch.float32, "cpu")
    cache.update(torch.arange(100), x, -x)
    rounded = ROUNDED[cache_type](x)
    for side, expected in (("key", rounded), ("value", -rounded)):
        # a scale is off by 2**-24 of itself, a product by as much again
        wrong = (dequantize(cache.stored(side, 3)) - expected).abs() > 2.0**-22 * expected.abs()
        assert wrong.double().mean() < 1e-4


STEPS = {Int8KVCache: (0.5, 127), Float8KVCache: (16, 448), Int4KVCache: (1, 8)}


@QUANTIZED
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_rounding_is_by_at_most_half_a_step(cache_type, dtype, scale):
    """int8: half of one; fp8: half the spacing at 448, 32; int4: half of one, but a whole one
    opposite of the largest. And the step is off by its dtype's rounding, `codes` times over."""
    x = (torch.randn(2, 3, 50, 64) * scale).to(dtype)
    cache = cache_type(2, 3, 50, 64, dtype, "cpu")
    cache.update(torch.arange(50), x, x)
    step = cache.key_scale.double().abs().repeat_interleave(64 // cache.key_scale.shape[-1], -1)
    most, codes = STEPS[cache_type]
    bound = step * (most + codes * torch.finfo(dtype).eps) + 1e-12
    read = dequantize(cache.stored("key", 2)).double()
    assert ((read - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_dense_keeps_every_bit(dtype):
    x = torch.randn(2, 3, 50, 80).to(dtype)
    cache = DenseKVCache(2, 3, 50, 80, dtype, "cpu")
    cache.update(torch.arange(50), x, -x)
    assert torch.equal(cache.key_codes, x) and torch.equal(cache.value_codes, -x)


@QUANTIZED
@pytest.mark.parametrize(
    "row",
    [
        torch.zeros(64),
        torch.cat([torch.full((1,), 3e4), torch.full((63,), 1e-3)]),
        torch.full((64,), 1e-40),  # subnormal
        torch.cat([torch.full((1,), 1e-40), torch.zeros(63)]),  # 1 / scale is infinite
        torch.full((64,), -1.0),
    ],
    ids=["zeros", "one outlier", "subnormal", "subnormal beside zeros", "equal"],
)
def test_extreme_rows(cache_type, row):
    cache = cache_type(1, 1, 2, 64, torch.float32, "cpu")
    x = row.view(1, 1, 1, 64)
    cache.update(torch.tensor([1]), x, x)
    read = dequantize(cache.stored("value", 1))[0, 0]
    assert (read[0] == 0).all() and read.isfinite().all()
    most, codes = STEPS[cache_type]
    assert ((read[1] - row).abs() <= row.abs().max() / codes * most + 1e-40).all()


@QUANTIZED
def test_the_largest_of_float16_is_kept(cache_type):
    x = torch.full((1, 1, 1, 64), 65504.0).half()
    cache = cache_type(1, 1, 1, 64, torch.float16, "cpu")
    cache.update(torch.tensor([0]), x, -x)
    for side, sign in (("key", 1), ("value", -1)):
        read = dequantize(cache.stored(side, 1))
        assert ((read * sign - 65504).abs() <= 65504 / 128).all()


def test_int4_says_which_head_dim_it_takes():
    with pytest.raises(UsageError, match="head_dim 80 is no multiple of 32; int8"):
        Int4KVCache(1, 2, 24, 80, torch.float32, "cpu")
