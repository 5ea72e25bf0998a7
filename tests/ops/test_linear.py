"""Every kernel of a linear layer against float64 (linear_contract.py)."""

import random

import pytest
import torch
import torch.nn.functional as F

from quantbench.ops.cpu import linear, plain
from quantbench.ops.formats import dequantize
from quantbench.quantize.activation import rounded
from tests import seeds
from tests.models.refused import refuses
from tests.ops.exact import DTYPES
from tests.ops.instructions import NEEDS_COMPILER, same_at_once, use
from tests.ops.linear_contract import (
    CPU,
    FORMS,
    FULL_PRECISION,
    KERNELS,
    Case,
    broken_rows,
    check,
    columns_of,
    draw,
    same_bits,
)
from tests.ops.packed_weights import packed

ON_EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS, indirect=True)
ON_CPU = pytest.mark.parametrize("kernel", CPU, ids=lambda kernel: kernel.name, indirect=True)


def forms(kernel, count):
    """Some of the forms that the kernel takes."""
    return seeds.sample(filter(kernel.takes, FORMS), count)


def weight_of(form, N, K, device="cpu", **more):
    if form == FULL_PRECISION:
        return torch.randn(N, K, device=device).bfloat16()
    return packed(form, N, K, device=device, **more)


@ON_EVERY_KERNEL
@pytest.mark.parametrize("group", range(6))
def test_products(kernel, group):
    """A sixth of the formats: random shapes, dtypes, groups, scales, zero points, activations."""
    every = list(filter(kernel.takes, FORMS))
    for form in every[group::6] or every:
        for _ in range(kernel.draws):
            check(kernel, *draw(kernel, form))


@ON_CPU
def test_what_changes_no_bit(kernel, pieces, threads):
    """Threads, views, and numbers of other rows that are not finite. Small: half of a weight is cut
    evenly, half handed out, here block by block."""
    for form in forms(kernel, 8):
        K = columns_of(form) * max(1, 256 // columns_of(form))
        some = random.randint(1, 40), random.randint(2, 40)
        # From 64 blocks on a thread cuts its share in unequal streams (Streams::UNEVEN_FROM). Alone
        # it has half of a weight at once.
        long = 16 * random.choice((67, 160)) - 5
        for N, M in (some, (597, 1), (597, 3), (long, random.randint(1, 5)), (600, 75)):
            weight, dtype = weight_of(form, N, K), random.choice(DTYPES)
            dtype = weight.dtype if form == FULL_PRECISION else dtype
            x = torch.randn(M, K).to(dtype)
            with seeds.naming((form, N, K, M, dtype)):
                check(kernel, x, weight, None)
                same_bits(kernel, x, weight, threads)
                if form != FULL_PRECISION and M > 1:
                    broken_rows(kernel, x, weight)


@ON_EVERY_KERNEL
def test_single_numbers_are_picked_out(kernel):
    """By rows of the identity: each has to be right, zeros included. 256 rows have every code."""
    for form in forms(kernel, 6 if kernel.slow else len(FORMS)):
        K = 8 * columns_of(form) if columns_of(form) < 32 else columns_of(form)
        weight = weight_of(form, 40 if kernel.slow else 256, K, kernel.device)
        start = random.randrange(K - 6)
        for M in (1, 6):
            eye = torch.eye(K, device=kernel.device)[start : start + M]
            check(kernel, eye.to(getattr(weight, "dtype", torch.float32)), weight)


@pytest.mark.parametrize("activation", ["int8", "int8-asymmetric"])
def test_products_of_bytes_are_exact_integers(isa, activation):
    """Their sum in int32 to the bit, then the scales in float32: of 9 rows and more, of any size;
    of fewer as far as float32 has all integers. Rows of -128 times weights of -128 are the largest
    sums, and asymmetric rounding moves a row of one sign by 128."""
    for M, K in ((1, 512), (8, 500), (random.randint(9, 40), random.randint(1, 700)), (33, 5000)):
        N = random.choice((1, 17, 50))
        weight = packed(("int", 8, None), N, K, torch.float32)
        weight.planes[0][-1] = -128
        x = torch.randn(M, K)
        x[0], x[-1] = -1, x[-1].abs()
        numbers, scale = rounded(x, activation)
        sums = (numbers.long() @ weight.planes[0].long().T).float()
        y = linear.linear(x, linear.pack(weight, K, activation), N)
        wanted = sums * weight.scale.float().T * scale
        with seeds.naming((M, N, K)):
            assert torch.equal(y, wanted)


@NEEDS_COMPILER
def test_nothing_comes_of_nothing():
    packed_bytes = linear.pack(packed(("int", 4, 32), 5, 64), 64)
    assert linear.linear(torch.zeros(0, 64), packed_bytes, 5).shape == (0, 5)
    assert plain.linear(torch.zeros(0, 64), torch.zeros(5, 64)).shape == (0, 5)


@ON_CPU
def test_errors_are_as_small_as_a_product_of_bfloat16s(kernel):
    """torch's own, of the weight rounded to bfloat16: the mean error, of 9600 results."""
    for form in forms(kernel, 8):
        weight, x = weight_of(form, 96, 1024), torch.randn(100, 1024).bfloat16()
        whole = weight if form == FULL_PRECISION else dequantize(weight)
        wanted, torchs = x.double() @ whole.double().T, F.linear(x, whole.bfloat16())
        y = kernel.multiply(x, weight, None)
        error, its = ((found.double() - wanted).abs().mean() for found in (y, torchs))
        assert error <= 1.1 * its, form


def test_weights_halfway_between_two_bfloat16s(isa):
    """The farthest that tiles of bfloat16 can be from a weight: 2**-8 of it just above 1/2."""
    kernel = next(kernel for kernel in CPU if kernel.name in (f"cpu-{isa}", "cpu-avx2"))
    weight = packed(("int", 8, 32), 20, 64, torch.float32)
    weight.planes[0].fill_(1)
    weight.scale.fill_(0.5 + 3 * 2.0**-9)
    check(kernel, torch.randn(40, 64).bfloat16(), weight)


@pytest.mark.parametrize("form, dtype", [(("nf4", 4, 64), torch.float16),
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


@ON_CPU
def test_a_row_is_the_same_among_any_others(kernel):
    """And more of them than go through the weights together."""
    weight = weight_of(forms(kernel, 1)[0], 20, 256)
    for M, some in ((1100, slice(1050, 1099)), (40, slice(0, 33))):
        x = torch.randn(M, 256).bfloat16()
        alone, all_rows = (kernel.multiply(rows, weight, None) for rows in (x[some], x))
        assert torch.equal(alone, all_rows[some])


@NEEDS_COMPILER
def test_packed_weights_may_lie_anywhere_and_x_have_more_dimensions():
    weight, x = packed(("int", 4, 32), 20, 96), torch.randn(24, 96)
    packed_bytes = linear.pack(weight, 96)
    moved = torch.zeros(len(packed_bytes) + 3, dtype=torch.uint8)[3:]
    deeper = linear.linear(x.view(2, 12, 96), moved.copy_(packed_bytes), 20)
    assert torch.equal(deeper.view(24, 20), linear.linear(x, packed_bytes, 20))


def test_many_rows_of_plain_weights_are_the_same_layer(isa):
    """By whichever library is faster: the sums of torch's own are float32 as well."""
    kernel = next(kernel for kernel in CPU if kernel.name in (f"plain-{isa}", "plain-avx2"))
    for dtype in DTYPES:
        x, weight = torch.randn(2, 40, 64).to(dtype), torch.randn(30, 64).to(dtype)
        y = plain.linear(x, weight)
        assert y.shape == (2, 40, 30) and y.dtype == dtype
        error = (y.double() - x.double() @ weight.double().T).abs().flatten(0, 1)
        assert (error <= kernel.allowed(Case(x.flatten(0, 1), weight, None))).all()


def test_many_rows_in_bfloat16_without_instructions_for_it_are_ours(isa):
    """oneDNN does 54 GFLOP/s there, and vectors of float32 181: docs/LOG.md."""
    x, weight = torch.randn(100, 70).bfloat16(), torch.randn(48, 70).bfloat16()
    with torch.profiler.profile() as profile:
        plain.linear(x, weight)
    ours = any(event.name == "quantbench::cpu_plain" for event in profile.events())
    assert ours == (isa in ("avx2", "avxvnni", "avx512", "avx512vnni"))


@NEEDS_COMPILER
@pytest.mark.parametrize("rows", [(1, 5), (40, 100)])
def test_two_calls_at_once(rows):
    problems = [
        (torch.randn(m, 512).bfloat16(), linear.pack(packed(form, N, 512), 512), N)
        for m, form, N in zip(rows, (("int", 4, 64), ("fp6", 6, None)), (500, 300), strict=True)
    ]
    same_at_once(linear.linear, problems, 50)
    plains = [(x, torch.randn(N, 512).bfloat16()) for x, _, N in problems]
    same_at_once(plain.linear, plains, 50)


# ----------------------------------------------------------------------- what torch and users see


@NEEDS_COMPILER
def test_compiles_and_is_registered_as_torch_wants_it():
    packed_bytes = linear.pack(packed(("int", 4, 32), 20, 64), 64)
    x = torch.randn(1, 3, 64).bfloat16()
    torch.library.opcheck(torch.ops.quantbench.cpu_linear.default, (x[0], packed_bytes, 20))
    arguments = torch.randn(3, 64), torch.randn(20, 64)
    torch.library.opcheck(torch.ops.quantbench.cpu_plain.default, arguments)

    def layer(x):
        return linear.linear(x * 2, packed_bytes, 20) + 1

    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))


@NEEDS_COMPILER
def test_what_it_does_not_take_is_an_error():
    whole, right = torch.randn(20, 64), linear.pack(packed(("int", 8, None), 20, 64), 64)
    one = torch.randn(1, 64)

    def packed_product(x=one, weight=right, rows=20):
        return linear.linear(x, weight, rows)

    def plain_product(x=one, weight=whole):
        return plain.linear(x, weight)

    for rows in (1, 0):  # nothing comes of nothing
        assert packed_product(one[:rows]).shape == plain_product(one[:rows]).shape == (rows, 20)
    wrong = (
        ({"x": one.double()}, "float32, bfloat16"),
        ({"x": one[:, :60]}, "64"),
        ({"rows": 21}, "20 rows, not 21"),
        ({"weight": right[:-64]}, "size"),
        ({"weight": torch.zeros(500, dtype=torch.uint8)}, "no weight packed"),
        ({"weight": right[:100]}, "no weight packed"),
    )
    refuses(packed_product, wrong)
    wrong = (
        ({"x": one.double(), "weight": whole.double()}, "float32, bfloat16"),
        ({"x": one.bfloat16()}, "differ in dtype"),
        ({"x": one[:, :60]}, "64"),
        ({"weight": whole.T.contiguous().T}, "contiguous"),
    )
    refuses(plain_product, wrong)


# ---------------------------------------------------------------------------------- the contract


@NEEDS_COMPILER
def test_the_contract_finds_a_number_that_is_a_little_off():
    """One element beyond its bound, in the last column of the last row, fails every kernel."""
    for kernel in CPU:
        off = type(kernel)(**{**vars(kernel), "multiply": a_little_off(kernel)})
        form = forms(kernel, 1)[0]
        with pytest.raises(AssertionError, match="times what is allowed"):
            check(off, torch.randn(3, 256).bfloat16(), weight_of(form, 20, 256))


def a_little_off(kernel):
    def multiply(x, weight, activation):
        whole = weight if isinstance(weight, torch.Tensor) else dequantize(weight)
        y = (x.double() @ whole.double().T).to(x.dtype)
        y[-1, -1] += 0.1 * (x.abs() @ whole.abs().to(x.dtype).T)[-1, -1]
        return y

    return multiply
