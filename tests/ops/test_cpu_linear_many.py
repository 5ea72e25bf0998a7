"""Linear layers of many rows of x in C++ against float64, for every instruction set here."""

import pytest
import torch
import torch.nn.functional as F

from quantbench.ops.cpu import build, linear
from quantbench.ops.formats import Packed, dequantize
from quantbench.quantize.activation import rounded
from tests.ops.instructions import best as best
from tests.ops.instructions import use
from tests.ops.packed_weights import FORMATS, name, packed

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))

ISAS = ("portable", "avx2", "avx512vnni", "amx")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CASES = [form for form in FORMATS if form[0] not in ("fp8", "2:4") or (form[2] or 32) % 32 == 0]
EVERY = [*CASES, "dense"]
GROUPED = [form for form in CASES if form[2] and form[0] not in ("2:4", "fp8")]
WITH_ZERO = [form for form in FORMATS if form[0] == "int" and form[2]]


def label(form) -> str:
    return form if form == "dense" else name(form)


def weight_of(form, N: int, K: int, zero: bool = False) -> Packed | torch.Tensor:
    return torch.randn(N, K).bfloat16() if form == "dense" else packed(form, N, K, zero=zero)


def floats_of(weight: Packed | torch.Tensor) -> torch.Tensor:
    return dequantize(weight) if isinstance(weight, Packed) else weight


def check(x, weight, activation=None):
    """The kernel's product of x (M, K) with a weight, if no element is off by too much."""
    exact = floats_of(weight).double()
    N, K = exact.shape
    y = linear.linear(x, linear.pack(weight, K, activation), N)
    numbers, scale = (x.double(), 1.0) if activation is None else rounded(x, activation)
    numbers, scale = numbers.double(), torch.as_tensor(scale).double()
    wanted = (numbers @ exact.T) * scale
    terms = (numbers.abs() @ exact.abs().T) * scale
    offsets = torch.zeros(())
    if isinstance(weight, Packed) and weight.zero is not None:  # added in float32 to what is scaled
        offset = weight.zero.double().abs().repeat_interleave(weight.group_size, 1)
        offsets = (numbers.abs() @ offset.T) * scale
    # One rounding to the result's dtype; before it float32, in runs of at most 256 columns.
    allowed = EPSILON[x.dtype] * wanted.abs()
    allowed += (16 + min(K, 256) + K / 256) * 2.0**-24 * (terms + 2 * offsets)
    if build.isa() == "amx" and x.dtype == torch.bfloat16 and activation is None:
        allowed += EPSILON[x.dtype] * terms  # its tiles may hold weights of bfloat16
    if x.dtype != torch.float32 and activation is None:  # or activations be integers of 16 bits
        allowed += 2.0**-15 * numbers.abs().amax(-1, keepdim=True) * exact.abs().sum(1)
    smallest = 2.0**-125 * (1 + exact.abs().sum(1)) + (2.0**-25 if x.dtype == torch.float16 else 0)
    most = torch.finfo(x.dtype).max  # a sum beyond it is infinite
    error = (y.double().clamp(-most, most) - wanted.clamp(-most, most)).abs()
    excess = error - allowed - smallest
    assert y.shape == wanted.shape and y.dtype == x.dtype
    assert (excess <= 0).all(), f"off by {float(excess.max())} more than allowed"
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", EVERY, ids=label)
def test_every_format(isa, form):
    use(isa)
    for M, N, K, dtype in (
        (17, 33, 256, torch.bfloat16),
        (33, 16, 128, torch.float32),
        (50, 16, 128, torch.float32),
        (18, 1, 640, torch.float16),
        (48, 20, 256, torch.bfloat16),
        (130, 70, 640, torch.bfloat16),
    ):
        check(torch.randn(M, K).to(dtype), weight_of(form, N, K))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", EVERY, ids=label)
def test_every_number_of_rows(isa, form):
    use(isa)
    weight = weight_of(form, 40, 384)
    for M in range(1, 36):
        check(torch.randn(M, 384).bfloat16(), weight)


@pytest.mark.parametrize("form, dtype", [(("fp6", 6, None), torch.float16),
                                         (("int", 8, None), torch.float32)], ids=str)  # fmt: skip
def test_short_prompts_stay_in_integers_with_vnni(form, dtype):
    """Two products of integers for each weight are faster than floats up to 47 rows. Their sums are
    exact: a row's results are those of the row alone, bit for bit, which floats' are not."""
    use("avx512vnni")
    x, packed_weight = torch.randn(64, 512).to(dtype), linear.pack(packed(form, 96, 512), 512)
    alone = torch.cat([linear.linear(row[None], packed_weight, 96) for row in x])
    for M in (17, 47):
        assert torch.equal(linear.linear(x[:M], packed_weight, 96), alone[:M])
    assert not torch.equal(linear.linear(x, packed_weight, 96), alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", WITH_ZERO, ids=name)
def test_zero_points(isa, form):
    use(isa)
    for dtype in DTYPES:
        for M in (7, 20):
            check(torch.randn(M, 192).to(dtype), packed(form, 20, 192, dtype, zero=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "M, N, K", [(17, 1, 1), (19, 3, 7), (33, 17, 31), (128, 33, 129), (40, 63, 1000)]
)
def test_odd_shapes(isa, dtype, M, N, K):
    use(isa)
    x = torch.randn(M, K).to(dtype)
    for weight_dtype in DTYPES:
        check(x, torch.randn(N, K).to(weight_dtype))
    check(x, packed(("int", 8, None), N, K, torch.float32))


@pytest.mark.parametrize("isa", ISAS)
def test_weights_halfway_between_two_bfloat16s(isa):
    """The farthest that tiles of bfloat16 can be from a weight: 2**-8 of it just above 1/2."""
    use(isa)
    weight = torch.full((20, 1), 0.5 + 3 * 2.0**-9).half()
    check(torch.randn(40, 1).bfloat16(), weight)
    check(torch.randn(40, 64).bfloat16(), weight.expand(20, 64).contiguous())


@pytest.mark.parametrize("form", GROUPED, ids=name)
def test_groups_of_every_size(form):
    format, bits, _ = form
    for size in (8, 16, 24, 40, 96, 160, 256, 320, 512):
        check(torch.randn(18, 2 * size).bfloat16(), packed((format, bits, size), 18, 2 * size))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", EVERY, ids=label)
def test_errors_are_as_small_as_a_product_of_bfloat16s(isa, form):
    """torch's own, of the weight rounded to bfloat16: the mean error, of 9600 results."""
    use(isa)
    weight, x = weight_of(form, 96, 1024), torch.randn(100, 1024).bfloat16()
    y = linear.linear(x, linear.pack(weight, 1024), 96)
    wanted = x.double() @ floats_of(weight).double().T
    torchs = F.linear(x, floats_of(weight).bfloat16())
    error, its = ((found.double() - wanted).abs().mean() for found in (y, torchs))
    assert error <= 1.1 * its


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["int8", "int8-asymmetric"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_activations(isa, activation, dtype):
    use(isa)
    for form in (("int", 8, None), ("int", 4, 32), ("int", 4, 64)):
        x = torch.randn(21, 320).to(dtype)
        x[1], x[2], x[3] = 0, x[2].abs(), -x[3].abs()  # nothing, and ranges to one side of zero
        for M in (6, 21):
            check(x[:M], packed(form, 33, 320), activation)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", EVERY, ids=label)
def test_extreme_activations(isa, form):
    use(isa)
    weight = weight_of(form, 20, 256)
    for dtype in DTYPES:
        x = torch.randn(18, 256).to(dtype)
        x[0] = 0
        x[1, 7] *= 1e3  # an outlier
        x[2] *= 1e-40 if dtype != torch.float16 else 1e-6  # denormals
        x[3] *= 1e30 if dtype != torch.float16 else 1e2
        x[4] = torch.finfo(dtype).tiny
        for M in (9, 18):
            y = check(x[:M], weight)
            assert (y[0] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [("int", 4, 64), ("2:4", 4, 64), "dense"], ids=label)
def test_what_is_not_finite_stays_in_its_row(isa, form):
    use(isa)
    packed_bytes = linear.pack(weight_of(form, 20, 192), 192)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(37, 192).to(dtype)
        clean = linear.linear(x, packed_bytes, 20)
        x[2, 100], x[33, 5] = torch.nan, torch.inf
        y = linear.linear(x, packed_bytes, 20)
        assert y[2].isnan().all() and not y[33].isfinite().any()
        others = torch.tensor([row for row in range(37) if row not in (2, 33)])
        assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", EVERY, ids=label)
def test_any_number_of_threads_gives_the_same_bits(isa, form):
    use(isa)
    K, N = 1056 if form == "dense" else 1280, 16 * 7 + 5
    weight, x = weight_of(form, N, K), torch.randn(75, K).bfloat16()
    packed_bytes, before, results = linear.pack(weight, K), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(linear.linear(x, packed_bytes, N))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_is_the_same_among_any_others(isa):
    """And more of them than go through the weights together."""
    use(isa)
    packed_bytes, x = linear.pack(packed(("int", 4, 64), 20, 64), 64), torch.randn(1100, 64)
    for dtype in DTYPES:
        together = linear.linear(x.to(dtype), packed_bytes, 20)
        assert torch.equal(
            linear.linear(x[1050:1099].to(dtype), packed_bytes, 20), together[1050:1099]
        )
