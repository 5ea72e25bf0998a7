"""Every cache against attention in float64 over the keys and values that went in."""

import math

import pytest
import torch

from errors import UsageError
from kernels.kv import dequantize
from kv_cache import CACHES
from kv_cache.dense import DenseKVCache
from kv_cache.eight_bit import Float8KVCache, Int8KVCache
from kv_cache.int4 import Int4KVCache

SHAPES = [  # batch, query heads, key/value heads, head_dim, window
    (1, 4, 4, 64, None),
    (5, 8, 2, 80, None),
    (2, 8, 1, 128, None),
    (1, 16, 4, 256, None),
    (2, 4, 2, 64, 5),
]


def exact_attention(query, key, value, positions, window):
    """Float64, one query head at a time, written from the definition."""
    B, H, S, D = query.shape
    group = H // key.shape[1]
    output = torch.zeros(B, H, S, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for s, position in enumerate(positions.tolist()):
                first = 0 if window is None else max(0, position - window + 1)
                k = key[b, h // group, first : position + 1].double()
                v = value[b, h // group, first : position + 1].double()
                scores = k @ query[b, h, s].double() / math.sqrt(D)
                output[b, h, s] = torch.softmax(scores, 0) @ v
    return output


def filled(cache_type, B, H, K, D, window, T=24, length=17, dtype=torch.float32):
    cache = cache_type(B, K, T, D, dtype, "cpu", window)
    key, value = torch.randn(B, K, length, D), torch.randn(B, K, length, D)
    key, value = key.to(dtype), value.to(dtype)
    for piece in torch.arange(length).split(7):  # a prefill in chunks, the last one shorter
        cache.update(piece, key[:, :, piece], value[:, :, piece])
    query = torch.randn(B, H, 3, D).to(dtype)
    positions = torch.arange(length - 3, length)
    return cache, query, key, value, positions


@pytest.mark.parametrize("B, H, K, D, window", SHAPES)
def test_dense_is_attention(B, H, K, D, window):
    cache, query, key, value, positions = filled(DenseKVCache, B, H, K, D, window)
    expected = exact_attention(query, key, value, positions, window)
    # float32 sums of at most 17 · 256 products of unit normals: well inside 1e-5
    torch.testing.assert_close(
        cache.attend(query, positions).double(), expected, atol=1e-5, rtol=1e-5
    )


def rounded_int8(x):
    """127 steps to the largest of the token and head."""
    step = x.double().abs().amax(-1, keepdim=True) / 127
    return (x.double() / step).round() * step


def rounded_fp8(x):
    """The nearest E4M3 number, 448 standing for the largest of the token and head."""
    step = x.double().abs().amax(-1, keepdim=True) / 448
    return (x.double() / step).float().to(torch.float8_e4m3fn).double() * step


def rounded_int4(x):
    """-8 stands for the largest in size of every 32 numbers."""
    groups = x.double().unflatten(-1, (-1, 32))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    step = extreme / -8
    return ((groups / step).round().clamp(-8, 7) * step).flatten(-2)


ROUNDED = {Int8KVCache: rounded_int8, Float8KVCache: rounded_fp8, Int4KVCache: rounded_int4}
QUANTIZED = pytest.mark.parametrize("cache_type", ROUNDED, ids=lambda t: t.format)


@QUANTIZED
@pytest.mark.parametrize("B, H, K, D, window", SHAPES)
def test_quantized_caches_are_attention_over_rounded_keys_and_values(
    cache_type, B, H, K, D, window
):
    if cache_type is Int4KVCache and D % 32:
        with pytest.raises(UsageError, match="head_dim 80 is no multiple of 32; int8"):
            cache_type(B, K, 24, D, torch.float32, "cpu", window)
        return
    cache, query, key, value, positions = filled(cache_type, B, H, K, D, window)
    rounded = ROUNDED[cache_type]
    expected = exact_attention(query, rounded(key), rounded(value), positions, window)
    # A number next to the middle of two codes may go to the other one in float32: few do, and an
    # int4 step is an eighth of the largest.
    tolerance = 1e-5 if cache_type is Int8KVCache else 2e-2
    actual = cache.attend(query, positions).double()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=1e-5)
    assert (actual - expected).abs().median() < 1e-5


STEPS = {Int8KVCache: (0.5, 127), Float8KVCache: (16, 448), Int4KVCache: (1, 8)}


@QUANTIZED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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


@QUANTIZED
@pytest.mark.parametrize(
    "row",
    [
        torch.zeros(64),
        torch.cat([torch.full((1,), 3e4), torch.full((63,), 1e-3)]),
        torch.full((64,), 1e-40),  # subnormal
        torch.full((64,), -1.0),
    ],
    ids=["zeros", "one outlier", "subnormal", "equal"],
)
def test_extreme_rows(cache_type, row):
    cache = cache_type(1, 1, 2, 64, torch.float32, "cpu")
    x = row.view(1, 1, 1, 64)
    cache.update(torch.tensor([1]), x, x)
    read = dequantize(cache.stored("value", 1))[0, 0]
    assert (read[0] == 0).all() and read.isfinite().all()
    most, codes = STEPS[cache_type]
    assert ((read[1] - row).abs() <= row.abs().max() / codes * most + 1e-40).all()


@pytest.mark.parametrize("cache_type", CACHES.values(), ids=CACHES)
def test_reset_forgets_and_the_cache_serves_again(cache_type):
    cache, query, key, value, positions = filled(cache_type, 1, 4, 2, 64, None)
    before = cache.attend(query, positions)
    cache.reset()
    assert not any(buffer.any() for buffer in cache.buffers())
    cache.update(torch.arange(17), key, value)
    torch.testing.assert_close(cache.attend(query, positions), before)


@pytest.mark.parametrize(
    "cache_type, bytes_a_position",
    [
        (DenseKVCache, 2 * 64 * 2),
        (Int8KVCache, 2 * (64 + 2)),
        (Float8KVCache, 2 * (64 + 2)),
        (Int4KVCache, 2 * (32 + 2 * 2)),
    ],
)
def test_nbytes_is_what_the_docstring_says(cache_type, bytes_a_position):
    cache = cache_type(3, 2, 40, 64, torch.bfloat16, "meta")
    assert cache.nbytes == 3 * 2 * 40 * bytes_a_position
    assert all(buffer.is_meta for buffer in cache.buffers())
