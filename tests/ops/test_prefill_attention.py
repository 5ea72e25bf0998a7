"""Attention through a KV cache against float64: sequences in pieces, of one position or more, on
every path that it takes. What an exact attention reads is what the cache reads back."""

import math
import random

import pytest
import torch

from quantbench.kv_cache import CACHES
from quantbench.ops import attend as chunk
from quantbench.ops.attend import attend
from quantbench.ops.attention import AttentionKernel
from quantbench.ops.cpu.build import ISAS, unavailable
from quantbench.ops.kv import Scoring, dequantize
from tests import seeds
from tests.memory import allocated
from tests.ops.attention_contract import integer_products
from tests.ops.exact import UNIT, attention, causal
from tests.ops.instructions import use

FORMATS = pytest.mark.parametrize("format", CACHES)
BLOCK = 16
SCALED = ((None, None), (0.5, None), (None, 2.0), (0.3, 5.0))  # scale and softcap
flash_on_card = chunk._flash_on_card  # as it is; the path "card" replaces it
PATHS = ("codes", "dequantized", "any device", "card")
ON_EVERY_PATH = pytest.mark.parametrize("path", PATHS, indirect=True)


@pytest.fixture
def path(request, monkeypatch):
    """The C++ kernel; without it, torch's on the CPU and on any device, over blocks so small that
    there are many. For "card", the CPU's flash attention takes the place of CUDA's."""
    monkeypatch.setattr(chunk, "BLOCK", BLOCK)
    if request.param != "codes":
        monkeypatch.setattr(chunk, "choose", lambda *_: AttentionKernel("torch"))
    elif reason := unavailable():
        pytest.skip(reason)
    if request.param == "any device":
        monkeypatch.setattr(
            chunk,
            "_flash",
            lambda *given: chunk.with_denominator(*given[:4], Scoring(*given[4:])),
        )
    if request.param == "card":

        def flash(query, key, value, is_causal, scale):
            assert query.shape[1] == key.shape[1] == value.shape[1]
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, is_causal=is_causal, scale=scale
            )

        monkeypatch.setattr(chunk, "_card_takes", lambda query: True)
        monkeypatch.setattr(chunk, "_flash_on_card", flash)
    return request.param


def made(format, B, K, T, D, dtype=torch.float32, window=None, kernel="torch", spare_rows=0):
    cache = CACHES[format](B + spare_rows, K, T, D, dtype, "cpu", window)
    cache.kernel = kernel
    return cache


def sequence(B, H, K, L, D, dtype=torch.float32):
    return [torch.randn(B, heads, L, D).to(dtype) for heads in (H, K, K)]


def through(cache, query, key, value, lengths, *how):
    """All positions of a sequence, in pieces of these lengths; those of one are decode. how: scale,
    softcap and sinks."""
    outputs = []
    for at in torch.arange(query.shape[2]).split(lengths):
        sides = cache.update(at, key[:, :, at], value[:, :, at])
        outputs.append(attend(query[:, :, at], *sides, at, cache.window, Scoring(*how)))
    return torch.cat(outputs, 2)


def behind(cache, start, query, key, value):
    """The positions from `start` on, as one chunk."""
    before, at = torch.arange(query.shape[2]).tensor_split([start])
    cache.store(before, key[:, :, before], value[:, :, before])
    sides = cache.update(at, key[:, :, at], value[:, :, at])
    y = attend(query[:, :, at], *sides, at, cache.window)
    assert y.is_contiguous()
    return y


def as_read(cache, x):
    """Keys or values as the cache reads them back."""
    B, K, L, D = x.shape
    whole = type(cache)(B, K, L, D, x.dtype, "cpu")
    whole.store(torch.arange(L), x, x)
    return dequantize(whole.stored("key", B), torch.float64)


def check(cache, y, query, key, value, *how):
    """y: of the last positions. A chunk reads in the model's dtype, rounds weights to it, and each
    block's sum; the C++ kernel may multiply integers."""
    positions = torch.arange(query.shape[2])
    at = positions[-y.shape[2] :]
    given = query[:, :, at], as_read(cache, key), as_read(cache, value)
    visible = causal(at, positions, cache.window)
    exact = attention(*given, visible, *how)
    if y.dtype == torch.float32:
        exact.check(y)
        return
    beside = 0 if unavailable() else integer_products(cache.format, *given, visible, exact)
    read = 0 if cache.format == "dense" else UNIT[y.dtype]
    exact.check(y, read=read, roundings=2, beside=beside)


def hide_what_nobody_sees(cache, rows):
    for name, buffer in cache.named_buffers():
        buffer[:rows].fill_(math.nan if "scale" in name or cache.format == "dense" else 1)


def drawn(format):
    """A sequence (B, H, K, L, D), a window, its pieces, a dtype, how scores are scaled, and sinks.

    131 positions lie past the edges at 32, 64 and 128 of what kernels read at once, 300 past that
    at 256; 70 of 8 query heads are more queries than the C++ kernel takes at once. Windows are
    smaller than the sequence, as large, and larger; so are chunks, and decode wraps behind them.
    """
    K, group = random.choice((1, 2, 3)), random.choice((1, 2, 4, 8))
    D = random.choice((64, 128, 256, 32 * random.randint(1, 8), 8 * random.randint(1, 16)))
    D = D if format != "int4" or D % 32 == 0 else 96
    L = random.choice((131, 5 * BLOCK + 1, 70, 330, *(random.randint(1, 60) for _ in range(3))))
    window = random.choice((None, None, 1, 2, 5, BLOCK, 2 * BLOCK + 3, 70, 100, 200))
    first = random.choice(((), (3,), (BLOCK, 9), (37,), (70,), (1, BLOCK - 1, BLOCK + 1, 7), (L,)))
    lengths = pieces(L, *first) if sum(first) <= L else [L]
    if L == 330:
        lengths = [300, 30]
    elif random.random() < 0.3:
        lengths, left = [], L
        while left:
            lengths.append(min(left, random.choice((random.randint(1, 3), random.randint(1, 60)))))
            left -= lengths[-1]
    dtype, how = random.choice([torch.float32, torch.float32, *UNIT]), (None, None)
    if dtype == torch.float32:
        how = random.choice((how, *SCALED))
    sinks = random.choice((None, 2 * torch.randn(K * group)))
    shape = random.choice((1, 2, 5)), K * group, K, L, D
    return shape, window, lengths, dtype, (*how, sinks)


def pieces(L, *starts):
    """`starts`, then by token."""
    return [*starts, *[1] * (L - sum(starts))]


@FORMATS
@pytest.mark.parametrize(
    "path, isa",
    [*(("codes", isa) for isa in ISAS), *((path, None) for path in PATHS[1:])],
    indirect=["path"],
)
def test_sequences_in_pieces(format, path, isa):
    if isa:
        use(isa)
    for _ in range(14):
        (B, H, K, L, D), window, lengths, dtype, how = given = drawn(format)
        kernel = "cpu" if path == "codes" else "torch"
        cache = made(format, B, K, L + random.randint(0, 9), D, dtype, window, kernel, 2)
        hide_what_nobody_sees(cache, B)
        query, key, value = sequence(B, H, K, L, D, dtype)
        match random.randrange(4):
            case 0 if format == "dense":  # else what a key is off by as it is read decides, too
                query *= 8  # one key takes nearly all the weight: scores need more than 16 bits
            case 1 if dtype == torch.float32:  # all of it, or none
                key[:, :, random.randrange(L)] *= 1e4
        with seeds.naming(given):
            assert cache.slots <= (window or cache.slots)
            check(cache, through(cache, query, key, value, lengths, *how), query, key, value, *how)
            assert not any(buffer[B:].any() for buffer in cache.buffers())


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.0, 1.0, 5.0])])
def test_without_a_cache(window, sinks):
    given, at = sequence(2, 4, 2, 40, 32), torch.arange(40)
    for how in SCALED:
        exact = attention(*given, causal(at, at, window), *how, sinks)
        exact.check(attend(*given, at, window, Scoring(*how, sinks)))


def check_chunk(format, start, S, B=1, dtype=torch.float32, window=None, device="cpu"):
    """A chunk of S positions behind `start` others."""
    cache = made(format, B, 2, start + S + random.randint(0, 9), 64, dtype, window)
    given = sequence(B, 4 * B, 2, start + S, 64, dtype)
    check(cache, behind(cache.to(device), start, *(x.to(device) for x in given)).cpu(), *given)


@ON_EVERY_PATH
@FORMATS
def test_deep_chunks_at_the_size_of_blocks_that_is_used(path, format, monkeypatch):
    monkeypatch.setattr(chunk, "BLOCK", 4096)
    for start, S in ((5000, 2), (5000, 64), (100, 512)):
        check_chunk(format, start, S, dtype=random.choice(list(UNIT)))


@pytest.mark.parametrize("path", ["codes"], indirect=True)
@FORMATS
def test_stored_codes_are_read_as_they_are(format, path, monkeypatch):
    """Only positions at a window's edge, which not all of the chunk's queries see, are dequantized:
    of 17 queries the last sees 16 fewer than the first."""
    dequantized, given = [], sequence(1, 4, 2, 517, 64)

    def counting(stored, dtype):
        dequantized.append(stored.codes.shape[2])
        return dequantize(stored, dtype)

    monkeypatch.setattr(chunk, "dequantize", counting)
    for window, count in ((None, 0), (200, 2 * 16)):
        cache = made(format, 1, 2, 600, 64, window=window)
        check(cache, behind(cache, 500, *given), *given)
        assert sum(dequantized) == count


@pytest.mark.parametrize("path", ["codes"], indirect=True)
def test_any_number_of_threads_gives_the_same_bits(path, same_for_any_threads):
    given = sequence(2, 8, 2, 3070, 64, torch.bfloat16)
    for format in CACHES:
        cache = made(format, 2, 2, 3100, 64, torch.bfloat16)
        same_for_any_threads(lambda cache=cache: behind(cache, 3000, *given))


@pytest.mark.parametrize("path", ["card"], indirect=True)
@pytest.mark.parametrize("N", [1, 300, 4096])
def test_a_card_s_flash_attention_takes_what_it_is_given(N, path):
    """Shapes and dtypes by torch's own shape function, for which no card need be here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        query, key = (torch.empty(2, 4, n, 96, device="cuda", dtype=torch.float16) for n in (70, N))
        output, denominator = flash_on_card(query, key, key, is_causal=False, scale=None)
    assert output.shape == (2, 4, 70, 96) and output.dtype == torch.float16
    assert denominator.shape == (2, 4, 70) and denominator.dtype == torch.float32


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("window", [None, 7, 100])
def test_on_cuda(format, dtype, window):
    for start, S in ((0, 5), (0, 21), (40, 21)):
        check_chunk(format, start, S, 2, dtype, window, "cuda")


@ON_EVERY_PATH
def test_products_beyond_float16_are_finite(path):
    """64 · 40² = 102400 before it is divided by √64; float16 ends at 65504. Scores are integers, so
    that float32 holds them exactly in whichever order they are summed."""
    cache, (_, _, value) = made("dense", 1, 2, 60, 64, torch.float16), sequence(1, 2, 2, 52, 64)
    value, signs = value.half(), torch.randn(1, 2, 1, 64).sign().half()
    given = *[40 * signs.expand_as(value)] * 2, value
    y = behind(cache, 40, *given)
    check(cache, y, *given)
    # all scores are alike, so a query's attention is the mean of the values it sees
    mean = value[:, :, :41].double().mean(2)
    assert (y[:, :, 0].double() - mean).abs().max() < 4 * UNIT[torch.float16]


@pytest.mark.parametrize("format", ["dense", "int8", "int4"])  # opcheck has no product of fp8
@pytest.mark.parametrize("window", [None, 30])
def test_the_op_is_registered_as_torch_wants_it(format, window):
    cache, (query, key, value) = made(format, 1, 2, 30, 32), sequence(1, 4, 2, 9, 32)
    cache.fill(20)
    past = [cache.stored(side, 1) for side in ("key", "value")]
    past = [tensor for side in past for tensor in (side.codes, side.scale)]
    arguments = (query, key, value, *past, format, torch.arange(20, 29), window)
    arguments += (None, 30.0, None, None, None, None)  # softcap
    torch.library.opcheck(torch.ops.quantbench.chunk_attention.default, arguments)


@pytest.mark.parametrize(
    "path, format, window",
    [
        *[("codes", "dense", False), ("codes", "int4", True), ("dequantized", "int8", False)],
        *[("dequantized", "fp8", True), ("any device", "dense", True), ("card", "int4", False)],
    ],
    indirect=["path"],
)
def test_memory_grows_with_the_chunk_and_not_with_the_cache(
    format, window, path, monkeypatch, tmp_path
):
    """At a depth of 10 blocks as at one of 40: chunk · block, never chunk · cache."""
    monkeypatch.setattr(chunk, "BLOCK", 2048)
    H, K, S, D = 4, 1, 64, 64

    def measured(slots):
        cache = made(format, 1, K, slots, D, torch.bfloat16, slots if window else None)
        query, key, value = sequence(1, H, K, S, D, torch.bfloat16)
        positions = torch.arange(slots - S, slots)

        def layer():
            attend(query, *cache.update(positions, key, value), positions, cache.window)

        return allocated(layer, tmp_path)

    _, shallow = measured(20_480)
    largest, deep = measured(81_920)
    assert largest < S * 81_920  # a mask of bytes
    # keys and values of a block, once as they are unpacked in float32 and once as they are read;
    # of a score, 4 bytes: as it is, masked, as a weight, and what numbers the positions
    assert deep <= 1.01 * shallow
    assert deep <= 2048 * (2 * K * D * (4 + 4 + 2) + H * S * 5 * 4 + 5 * 8)
