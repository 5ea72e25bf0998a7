"""What a cache reads back against what went in, and what else it keeps. Attention through it:
tests/ops/test_prefill_attention.py."""

import pytest
import torch

from quantbench.generate import Generator
from quantbench.kv_cache import CACHES, base
from quantbench.kv_cache.dense import DenseKVCache
from quantbench.kv_cache.eight_bit import Float8KVCache, Int8KVCache
from quantbench.kv_cache.int4 import Int4KVCache
from quantbench.ops import attend as chunk
from quantbench.ops.cpu.build import unavailable
from quantbench.ops.kv import dequantize
from tests.models.small import small_model
from tests.ops.exact import UNIT
from tests.ops.test_prefill_attention import BLOCK, made, pieces, sequence, through

FORMATS = pytest.mark.parametrize("format", CACHES)
KERNELS = ("torch",) if unavailable() else ("torch", "cpu")
ON_EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that short sequences have many block edges."""
    monkeypatch.setattr(chunk, "BLOCK", BLOCK)


@FORMATS
@pytest.mark.parametrize("window", [None, 9])
@ON_EVERY_KERNEL
def test_neither_pieces_nor_rows_nor_an_earlier_use_change_a_bit(format, window, kernel):
    """The same as in a new cache of these rows alone, and other rows stay as they are. A new prompt
    at position 0 needs no reset, unless positions wrap: what an older one left lies ahead."""
    given, lengths = sequence(2, 4, 2, 30, 64), pieces(30, 13, 8)
    fresh = made(format, 2, 2, 33, 64, window=window, kernel=kernel)
    expected = through(fresh, *given, lengths)
    used = made(format, 2, 2, 33, 64, window=window, kernel=kernel, spare_rows=3)
    through(used, *sequence(5, 4, 2, 33, 64), pieces(33, 20))
    places = [buffer.data_ptr() for buffer in used.buffers()]
    if window is None:
        assert torch.equal(through(used, *given, lengths), expected)
    for buffer in used.buffers():
        buffer.zero_()
    assert torch.equal(through(used, *given, lengths), expected)
    assert not any(buffer[2:].any() for buffer in used.buffers())
    assert [buffer.data_ptr() for buffer in used.buffers()] == places
    for other in (30, 16, 7, 29, 1):
        cache = made(format, 2, 2, 33, 64, window=window, kernel=kernel)
        # Sums of float32 in another order; each is within 64 roundings of the exact one.
        torch.testing.assert_close(through(cache, *given, other), expected, atol=1e-5, rtol=1e-5)
        for new, old in zip(cache.buffers(), fresh.buffers(), strict=True):
            assert torch.equal(new, old)


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
        if depth:  # unit normals: five standard deviations of their variance
            seen = stored[:, :, reached]
            assert abs(seen.var() - 1) < 0.1 + 5 * (2 / seen.numel()) ** 0.5


BYTES = {  # bytes of a position's key and value, head_dim 64; size: of the dtype
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


E4M3 = torch.arange(256).byte().view(torch.float8_e4m3fn).double()
# What codes mean, that of a group's largest number in size, and the size of a group: a token and
# head of 64 numbers, or a half of it.
BOOKS = {
    Int8KVCache: (torch.arange(-127.0, 128), 127, 64),
    Float8KVCache: (E4M3[E4M3.isfinite()], 448, 64),
    Int4KVCache: (torch.arange(-8.0, 8), -8, 32),
}


def some_rows(dtype):
    """Rows (X, 64) of numbers of any size: equal ones, zeros, an outlier, the largest of the dtype,
    subnormals, whose scale's inverse may be infinite."""
    rows = [torch.randn(99, 64) * scale for scale in (1.0, 1e-3, 300.0)]
    rows += [torch.full((1, 64), -1.0), torch.full((1, 64), 1e-40), torch.full((1, 64), 65504.0)]
    rows += [torch.full((1, 64), 1e-3).index_fill(1, torch.tensor([0]), 3e4), torch.zeros(1, 64)]
    return torch.cat(rows).to(dtype)


@pytest.mark.parametrize("cache_type", BOOKS, ids=lambda t: t.format)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_numbers_are_rounded_to_the_nearest_code(cache_type, dtype):
    """None is farther off than the nearest code, but for what the scale's rounding to the dtype
    adds, of the largest code the most."""
    x = some_rows(dtype)
    cache = cache_type(1, 1, len(x), 64, dtype, "cpu")
    cache.update(torch.arange(len(x)), x[None, None], -x[None, None])
    book, largest, size = BOOKS[cache_type]
    groups = x.double().unflatten(-1, (-1, size))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    nearest = (groups[..., None] - extreme[..., None] / largest * book).abs().amin(-1)
    allowed = nearest + extreme.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    for side, sign in (("key", 1), ("value", -1)):
        read = sign * dequantize(cache.stored(side, 1), torch.float64)[0, 0]
        assert (read[-1] == 0).all() and read.isfinite().all()
        assert ((read.view_as(groups) - groups).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_dense_keeps_every_bit(dtype):
    x = torch.randn(2, 3, 50, 80).to(dtype)
    cache = DenseKVCache(2, 3, 50, 80, dtype, "cpu")
    cache.update(torch.arange(50), x, -x)
    assert torch.equal(cache.key_codes, x) and torch.equal(cache.value_codes, -x)


def test_a_text_goes_on_behind_what_a_window_still_has():
    """Only where a ring of slots has not replaced positions that the next token sees."""
    model = small_model(window=8)
    tokens = torch.randint(3, 96, (1, 40))
    for read in (6, 8, 9, 30):
        for count in (0, 3, read - 2, read - 1, read):
            generator = Generator(model, 1, 40, decoder="modules")
            generator.forward(tokens[:, :read])
            kept = generator.keep(count, read)
            assert kept in (0, count) and (kept == count or (read > 8 and count < read - 1))
            others = torch.cat((tokens[:, :kept], torch.randint(3, 96, (1, 3))), 1)
            y = generator.forward(others[:, kept:], kept)
            torch.testing.assert_close(y, model(others)[:, kept:], rtol=1e-4, atol=1e-4)
