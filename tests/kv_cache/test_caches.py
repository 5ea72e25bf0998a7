"""Every cache against attention in float64 over the keys and values that went in."""

import math

import pytest
import torch

from kv_cache.dense import DenseKVCache
from kv_cache.int8 import Int8KVCache, quantize

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


@pytest.mark.parametrize("B, H, K, D, window", SHAPES)
def test_int8_is_attention_over_rounded_keys_and_values(B, H, K, D, window):
    cache, query, key, value, positions = filled(Int8KVCache, B, H, K, D, window)

    def rounded(x):  # the definition, in float64: 127 steps to the largest of the token and head
        step = x.double().abs().amax(-1, keepdim=True) / 127
        return (x.double() / step).round() * step

    expected = exact_attention(query, rounded(key), rounded(value), positions, window)
    torch.testing.assert_close(
        cache.attend(query, positions).double(), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_int8_rounds_by_at_most_half_a_step(dtype, scale):
    x = (torch.randn(2, 3, 50, 64) * scale).to(dtype)
    values, step = quantize(x)
    # half a step, and the step itself off by the rounding of its dtype, 127 times over
    bound = step.double() * (0.5 + 127 * torch.finfo(dtype).eps)
    assert ((values.double() * step.double() - x.double()).abs() <= bound).all()


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
def test_int8_takes_extreme_rows(row):
    values, step = quantize(row)
    assert values.abs().max() <= 127 and step.isfinite().all()
    assert ((values * step - row).abs() <= step * 0.5 + 1e-40).all()


@pytest.mark.parametrize("cache_type", [DenseKVCache, Int8KVCache])
def test_reset_forgets_and_the_cache_serves_again(cache_type):
    cache, query, key, value, positions = filled(cache_type, 1, 4, 2, 64, None)
    before = cache.attend(query, positions)
    cache.reset()
    assert not any(buffer.any() for buffer in cache.buffers())
    cache.update(torch.arange(17), key, value)
    torch.testing.assert_close(cache.attend(query, positions), before)


@pytest.mark.parametrize(
    "cache_type, bytes_a_position", [(DenseKVCache, 2 * 64 * 2), (Int8KVCache, 2 * (64 + 2))]
)
def test_nbytes_is_what_the_docstring_says(cache_type, bytes_a_position):
    cache = cache_type(3, 2, 40, 64, torch.bfloat16, "meta")
    assert cache.nbytes == 3 * 2 * 40 * bytes_a_position
    assert all(buffer.is_meta for buffer in cache.buffers())
