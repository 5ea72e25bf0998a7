"""Full-precision layers in C++ against float64, for every instruction set this machine can run."""

import pytest
import torch

from quantbench.ops.cpu import build, plain
from tests.ops import at_once
from tests.ops.instructions import best as best
from tests.ops.instructions import use

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))

ISAS = ("portable", "avx2", "avx512vnni", "amx")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = [(1, 1), (1, 33), (17, 31), (16, 32), (100, 70), (63, 515), (33, 96), (257, 160)]


def product(x, weight):
    return torch.ops.quantbench.cpu_plain(x, weight)


def check(x, weight, multiply=product):
    """The product that `multiply` gives for x (…, K), if it is right."""
    plain.build.load()
    y, wanted = multiply(x, weight), x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    # float32 sums of K terms in 16 lanes or 2 of a tile; one rounding to the result's dtype.
    allowed = EPSILON[x.dtype] * wanted.abs() + (8 + x.shape[-1] / 2) * 2.0**-24 * terms
    # Tiles take denormals for zeros, in x, weights and sums; a float16 result may be one.
    ones = x.double().abs().sum(-1, keepdim=True) + weight.double().abs().sum(1)
    smallest = 2.0**-126 * (1 + ones)
    smallest = smallest + (2.0**-25 if x.dtype == torch.float16 else 0)
    assert y.shape == wanted.shape and y.dtype == x.dtype
    assert ((y.double() - wanted).abs() <= allowed + smallest).all()
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, K", SHAPES)
def test_shapes(isa, dtype, N, K):
    use(isa)
    for M in (1, 2, 3, 5, 16, 17, 33, 70):
        check(torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_numbers(isa, dtype):
    use(isa)
    x, weight = torch.randn(6, 192).to(dtype), torch.randn(40, 192).to(dtype)
    x[0] = 0
    x[1, 7] *= 1e3
    x[2] *= 1e-40 if dtype != torch.float16 else 1e-6
    x[3] *= 1e30 if dtype != torch.float16 else 1e2
    x[4] = torch.finfo(dtype).tiny
    weight[3] = 0
    weight[5, 9] = 1e4 if dtype != torch.float16 else 10
    weight[6] *= 1e-38 if dtype != torch.float16 else 1e-6
    for rows in (slice(None), slice(1, 2)):
        check(x[rows], weight)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("M", [1, 5, 40])
def test_any_number_of_threads_gives_the_same_bits(isa, M):
    use(isa)
    x, weight = torch.randn(M, 256).bfloat16(), torch.randn(16 * 37 + 5, 256).bfloat16()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(check(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite_stays_in_its_row(isa):
    use(isa)
    weight, x = torch.randn(50, 192).bfloat16(), torch.randn(5, 192).bfloat16()
    clean = check(x, weight)
    x[2, 100], x[3, 5] = torch.nan, torch.inf
    y = product(x, weight)
    assert y[2].isnan().all() and not y[3].isfinite().any()
    assert torch.equal(y[[0, 1, 4]], clean[[0, 1, 4]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_x_as_a_view(isa, dtype):
    use(isa)
    x, weight = torch.randn(4, 96).to(dtype), torch.randn(20, 96).to(dtype)
    y = check(x, weight)
    elsewhere = torch.zeros(4, 97, dtype=dtype)[:, 1:]  # off a vector's boundary
    elsewhere.copy_(x)
    columns = torch.zeros(96, 4, dtype=dtype).T
    columns.copy_(x)
    for same in (elsewhere, columns):
        assert torch.equal(check(same, weight), y)


def test_two_calls_at_once():
    plain.build.load()
    problems = [
        (torch.randn(M, 512).bfloat16(), torch.randn(N, 512).bfloat16())
        for M, N in ((1, 500), (9, 300))
    ]
    at_once.check(product, problems, 100)


@pytest.mark.parametrize("isa", ISAS)
def test_many_rows_are_the_same_layer(isa):
    """Without tiles torch's own library takes over, whose sums are float32 as well."""
    use(isa)
    x, weight = torch.randn(2, 40, 64), torch.randn(30, 64)
    for dtype in DTYPES:
        check(x.to(dtype), weight.to(dtype), plain.linear)


def test_registered_as_torch_wants_it():
    plain.build.load()
    arguments = torch.randn(3, 64), torch.randn(20, 64)
    torch.library.opcheck(torch.ops.quantbench.cpu_plain.default, arguments)


def test_what_it_does_not_take_is_an_error():
    plain.build.load()
    x, weight = torch.randn(1, 64), torch.randn(20, 64)
    for arguments, message in (
        ((x.double(), weight.double()), "float32, bfloat16"),
        ((x.bfloat16(), weight), "differ in dtype"),
        ((x[:, :60], weight), "64"),
        ((x, weight.T.contiguous().T), "contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            product(*arguments)
    assert product(torch.zeros(0, 64), weight).shape == (0, 20)
