"""Attention of a chunk against float64: what a cache holds, in rings too, and the chunk itself."""

import math
import random

import pytest
import torch

from quantbench.kv_cache import CACHES
from quantbench.ops import attend as chunk
from quantbench.ops.attend import attend
from quantbench.ops.attention import Choice
from quantbench.ops.cpu.build import ISAS, unavailable
from quantbench.ops.kv import Chunk, Stored, dequantize
from tests import seeds
from tests.memory import allocated
from tests.ops.attention_contract import integer_products
from tests.ops.exact import UNIT, attention, causal
from tests.ops.instructions import use

FORMATS = pytest.mark.parametrize("format", CACHES)
BLOCK = 16
flash_on_card = chunk._flash_on_card  # as it is; the path "card" replaces it
PATHS = ("codes", "dequantized", "any device", "card")
ON_EVERY_PATH = pytest.mark.parametrize("path", PATHS, indirect=True)


@pytest.fixture
def path(request, monkeypatch):
    """The C++ kernel; without it, torch's on the CPU and on any device, over blocks so small that
    there are many. For "card", the CPU's flash attention takes the place of CUDA's."""
    monkeypatch.setattr(chunk, "BLOCK", BLOCK)
    if request.param != "codes":
        monkeypatch.setattr(chunk, "choose", lambda *_: Choice("torch"))
    elif reason := unavailable():
        pytest.skip(reason)
    if request.param == "any device":
        monkeypatch.setattr(chunk, "_flash", lambda *given: chunk.with_denominator(*given, None))
    if request.param == "card":

        def flash(query, key, value, is_causal, scale):
            assert query.shape[1] == key.shape[1] == value.shape[1]
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, is_causal=is_causal, scale=scale
            )

        monkeypatch.setattr(chunk, "_card_takes", lambda query: True)
        monkeypatch.setattr(chunk, "_flash_on_card", flash)
    return request.param


def past(x, slots, format):
    """What a cache of so many slots holds of keys or values x (B, K, start, D): position p in slot
    p % slots; where none is, what must not be seen."""
    B, K, start, D = x.shape
    cache = CACHES[format](B, K, slots, D, x.dtype, "cpu")
    for name, buffer in cache.named_buffers():
        buffer.fill_(math.nan if "scale" in name or format == "dense" else 1)
    last = torch.arange(max(0, start - slots), start)
    cache.update(last % slots, x[:, :, last], x[:, :, last])
    return cache.stored("key", B)


def moved(stored, device):
    scale = None if stored.scale is None else stored.scale.to(device)
    return Stored(stored.codes.to(device), scale, stored.format)


def problem(B, H, K, D, start, S, dtype=torch.float32):
    query, own_key, own_value = (torch.randn(B, n, S, D).to(dtype) for n in (H, K, K))
    key, value = (torch.randn(B, K, start, D).to(dtype) for _ in range(2))
    return query, own_key, own_value, key, value


def check(query, own_key, own_value, key, value, slots, format="dense", window=None, device="cpu"):
    """Against all positions there were, as the format reads them back, and the chunk's own."""
    start, S, dtype = key.shape[2], query.shape[2], query.dtype
    pairs = (own_key, key), (own_value, value)
    sides = [Chunk(own.to(device), moved(past(x, slots, format), device)) for own, x in pairs]
    y = attend(query.to(device), *sides, torch.arange(start, start + S), window)
    assert y.is_contiguous()
    y = y.cpu()

    def all_of(x, own):
        if start == 0:
            return own
        read = dequantize(past(x, start, format), torch.float64)
        return torch.cat([read, own.double()], 2)

    positions = torch.arange(start + S)
    visible = causal(positions[start:], positions, window)
    keys, values = all_of(key, own_key), all_of(value, own_value)
    exact = attention(query, keys, values, visible)
    beside = 0
    if start and device == "cpu" and not unavailable():
        beside = integer_products(format, query, keys, values, visible, exact)
    if dtype == torch.float32:
        exact.check(y)
    else:  # it reads in the model's dtype, and rounds weights and each block's sum to it
        read = 0 if format == "dense" else UNIT[dtype]
        exact.check(y, read=read, roundings=2, beside=beside)
    return y


STARTS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 90, 300)
LENGTHS = (1, 2, 3, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 3 * BLOCK + 1)
WINDOWS = (1, 2, 4, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 5, 3 * BLOCK, 200)


def drawn():
    """A problem of any shape: where the chunk begins, how long it is, slots, format, window, dtype.

    A window's ring has as many slots as the window and wraps where it is deeper, or has more. Up to
    560 queries of a key head are more than the C++ kernel takes at once."""
    format, dtype = random.choice(list(CACHES)), random.choice(list(UNIT))
    K, unit = random.choice((1, 2, 3)), 32 if format == "int4" else 8
    D = random.choice((32, 64, 96, unit * random.randint(1, 128 // unit)))
    start = random.choice((random.choice(STARTS), random.randint(1, 100)))
    S = random.choice((random.choice(LENGTHS), random.randint(1, 70)))
    window = random.choice((None, None, random.choice(WINDOWS), random.randint(1, 200)))
    least = start + S if window is None else window
    slots = random.choice((least, least, least + random.randint(1, 90)))
    shape = (random.choice((1, 2, 5)), K * random.choice((1, 2, 3, 8)), K, D, start, S)
    return shape, slots, format, window, dtype


@pytest.mark.parametrize("group", range(5))
@pytest.mark.parametrize(
    "path, isa",
    [*(("codes", isa) for isa in ISAS), *((path, None) for path in PATHS[1:])],
    indirect=["path"],
)
def test_chunks_of_any_shape(path, isa, group):
    if isa:
        use(isa)
    for _ in range(24):
        shape, slots, format, window, dtype = given = drawn()
        query, own_key, own_value, key, value = problem(*shape, dtype)
        match random.randrange(4):
            case 0 if format == "dense":  # else what a key is off by as it is read decides, too
                query *= 8  # one key takes nearly all the weight: scores need more than 16 bits
            case 1 if dtype == torch.float32:  # all of it, or none
                own_key[:, :, random.randrange(own_key.shape[2])] *= 1e4
        with seeds.naming(given):
            check(query, own_key, own_value, key, value, slots, format, window)


@ON_EVERY_PATH
@FORMATS
def test_deep_chunks_at_the_size_of_blocks_that_is_used(path, format, monkeypatch):
    monkeypatch.setattr(chunk, "BLOCK", 4096)
    for start, S in ((5000, 2), (5000, 64), (100, 512)):
        check(*problem(1, 4, 2, 64, start, S, random.choice(list(UNIT))), start + S, format)


@pytest.mark.parametrize("path", ["codes"], indirect=True)
@FORMATS
def test_stored_codes_are_read_as_they_are(format, path, monkeypatch):
    """Only positions at a window's edge, which not all of the chunk's queries see, are dequantized:
    of 17 queries the last sees 16 fewer than the first."""
    dequantized = []

    def counting(stored, dtype):
        dequantized.append(stored.codes.shape[2])
        return dequantize(stored, dtype)

    monkeypatch.setattr(chunk, "dequantize", counting)
    sides = problem(1, 4, 2, 64, 500, 17)
    check(*sides, 600, format)
    assert not dequantized
    check(*sides, 200, format, window=200)
    assert sum(dequantized) == 2 * 16


@pytest.mark.parametrize("path", ["codes"], indirect=True)
def test_any_number_of_threads_gives_the_same_bits(path, same_for_any_threads):
    query, own_key, own_value, key, value = problem(2, 8, 2, 64, 3000, 70, torch.bfloat16)
    positions = torch.arange(3000, 3070)
    for format in CACHES:
        pairs = (own_key, key), (own_value, value)
        given = query, *(Chunk(own, past(x, 3100, format)) for own, x in pairs), positions
        same_for_any_threads(lambda given=given: attend(*given))


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
        sides = problem(2, 8, 2, 64, start, S, dtype)
        check(*sides, window or start + S, format, window, device="cuda")


@ON_EVERY_PATH
def test_products_beyond_float16_are_finite(path):
    """64 · 40² = 102400 before it is divided by √64; float16 ends at 65504. Scores are integers, so
    that float32 holds them exactly in whichever order they are summed."""
    sides = problem(1, 2, 2, 64, 40, 12, torch.float16)
    query, own_key, own_value, key, value = sides
    signs = torch.randn(1, 2, 1, 64).sign().half()
    query, own_key, key = (40 * signs.expand_as(x) for x in (query, own_key, key))
    y = check(query, own_key, own_value, key, value, 60)
    # all scores are alike, so a query's attention is the mean of the values it sees
    mean = torch.cat([value, own_value[:, :, :1]], 2).double().mean(2)
    assert (y[:, :, 0].double() - mean).abs().max() < 4 * UNIT[torch.float16]


@pytest.mark.parametrize("format", ["dense", "int8", "int4"])  # opcheck has no product of fp8
@pytest.mark.parametrize("window", [None, 30])
def test_the_op_is_registered_as_torch_wants_it(format, window):
    query, own_key, own_value, key, value = problem(1, 4, 2, 32, 20, 9)
    stored = [past(x, 30, format) for x in (key, value)]
    (k, ks), (v, vs) = ((side.codes, side.scale) for side in stored)
    if format == "dense":  # opcheck compares, and NaN equals nothing
        k, v = k.nan_to_num(), v.nan_to_num()
    arguments = (query, own_key, own_value, k, ks, v, vs, format, torch.arange(20, 29), window)
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
        cache = CACHES[format](1, K, slots, D, torch.bfloat16, "cpu", slots if window else None)
        sides = [torch.randn(1, n, S, D).bfloat16() for n in (H, K, K)]
        positions = torch.arange(slots - S, slots)
        query, key, value = sides

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
