"""Linear layers in C++ against float64, for every instruction set this machine can run."""

import pytest
import torch

from quantbench.errors import KernelError
from quantbench.ops.cpu import build, linear
from quantbench.ops.formats import Packed, dequantize
from quantbench.quantize.activation import rounded
from tests.ops import at_once
from tests.ops.instructions import best as best
from tests.ops.instructions import small_pieces as small_pieces
from tests.ops.instructions import use
from tests.ops.packed_weights import FORMATS, name, packed

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))

ISAS = ("portable", "avx2", "avx512vnni")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# The rounding step of activations, relative to the largest of 256 columns: bfloat16 and float16
# become integers of 15 bits and a sign, float32 of 30. Float formats multiply them as they are.
STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-15, torch.float16: 2.0**-15}
FLOATS = ("dense", "fp8")
CASES = [form for form in FORMATS if form[0] not in ("fp8", "2:4") or (form[2] or 32) % 32 == 0]
GROUPED = [form for form in CASES if form[2] and form[0] not in ("2:4", "fp8")]
WITH_ZERO = [form for form in FORMATS if form[0] == "int" and form[2]]


def check(x, weight, activation=None):
    """The kernel's product of x (M, K) with a Packed or plain float weight, if it is right."""
    exact = dequantize(weight).double() if isinstance(weight, Packed) else weight.double()
    format = weight.format if isinstance(weight, Packed) else "dense"
    N, K = exact.shape
    y = linear.linear(x, linear.pack(weight, K, activation), N)
    numbers, scale = (x.double(), 1.0) if activation is None else rounded(x, activation)
    numbers, scale = numbers.double(), torch.as_tensor(scale).double()
    wanted = (numbers @ exact.T) * scale
    assert y.shape == (*x.shape[:-1], N) and y.dtype == x.dtype
    # One rounding to the result's dtype; before it float32: sums of K terms in 16 lanes' order, and
    # what a table's numbers, scales and zeros lose when they are multiplied.
    terms = (numbers.abs() @ exact.abs().T) * scale
    if isinstance(weight, Packed) and weight.zero is not None:  # its part is summed by itself
        offset = weight.zero.double().abs().repeat_interleave(weight.group_size, 1)
        terms = terms + 2 * (numbers.abs() @ offset.T) * scale
    allowed = EPSILON[x.dtype] * wanted.abs() + (8 + K / 16) * 2.0**-24 * terms
    if format not in FLOATS and activation is None:
        largest = numbers.abs().amax(-1, keepdim=True)
        allowed += STEP[x.dtype] * largest * exact.abs().sum(1)
    if build.isa() == "amx" and x.dtype == torch.bfloat16 and activation is None:
        allowed += EPSILON[x.dtype] * terms  # its tiles may hold weights of bfloat16
    elif x.shape[:-1].numel() > 1:  # 256 columns may be summed one after the other
        allowed += min(K, 256) * 2.0**-24 * terms
    smallest = 2.0**-126 * (1 + exact.abs().sum(1)) + (2.0**-25 if x.dtype == torch.float16 else 0)
    most = torch.finfo(x.dtype).max  # a sum beyond it is infinite
    error = (y.double().clamp(-most, most) - wanted.clamp(-most, most)).abs()
    excess = error - allowed - smallest
    assert (excess <= 0).all(), f"off by {float(excess.max())} more than allowed"
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", CASES, ids=name)
def test_packed_weights(isa, form):
    use(isa)
    for M, N, K, x_dtype, scale_dtype in (
        (1, 33, 256, torch.bfloat16, torch.bfloat16),
        (3, 16, 128, torch.float32, torch.float32),
        (5, 1, 384, torch.float16, torch.float16),
    ):
        check(torch.randn(M, K).to(x_dtype), packed(form, N, K, scale_dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", WITH_ZERO, ids=name)
def test_zero_points(isa, form):
    use(isa)
    for scale_dtype, x_dtype in zip(
        DTYPES, (torch.bfloat16, torch.float32, torch.float16), strict=True
    ):
        check(torch.randn(2, 192).to(x_dtype), packed(form, 20, 192, scale_dtype, zero=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, K", [(1, 1), (1, 33), (17, 31), (16, 32), (100, 70), (63, 515)])
def test_full_precision(isa, dtype, N, K):
    use(isa)
    for weight_dtype in DTYPES:
        check(torch.randn(2, K).to(dtype), torch.randn(N, K).to(weight_dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [("int", 8, None), ("fp8", 8, None)], ids=name)
@pytest.mark.parametrize("N, K", [(1, 1), (3, 7), (17, 31), (33, 129), (40, 1000)])
def test_odd_shapes(isa, form, N, K):
    use(isa)
    check(torch.randn(2, K).bfloat16(), packed(form, N, K, torch.float32))


@pytest.mark.parametrize("form", GROUPED, ids=name)
def test_groups_of_every_size(form):
    format, bits, _ = form
    for size in (8, 16, 24, 40, 96, 160, 256, 320, 512):
        check(torch.randn(2, 2 * size).bfloat16(), packed((format, bits, size), 18, 2 * size))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "form", [("int", 4, 64), ("fp6", 6, None), ("2:4", 4, 64), ("fp8", 8, None)]
)
def test_one_to_seventeen_rows(isa, form):
    use(isa)
    weight = packed(form, 40, 192)
    for M in range(1, 18):
        for dtype in (torch.bfloat16, torch.float32):
            check(torch.randn(M, 192).to(dtype), weight)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["int8", "int8-asymmetric"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_activations(isa, activation, dtype):
    use(isa)
    for form in (("int", 8, None), ("int", 4, 32)):
        x = torch.randn(5, 160).to(dtype)
        x[1], x[2], x[3] = 0, x[2].abs(), -x[3].abs()  # nothing, and ranges to one side of zero
        check(x, packed(form, 33, 160), activation)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [*CASES, "dense"], ids=lambda f: f if f == "dense" else name(f))
def test_extreme_activations(isa, form):
    use(isa)
    K = 256
    weight = torch.randn(20, K).bfloat16() if form == "dense" else packed(form, 20, K)
    for dtype in DTYPES:
        x = torch.randn(6, K).to(dtype)
        x[0] = 0
        x[1, 7] *= 1e3  # an outlier
        x[2] *= 1e-40 if dtype != torch.float16 else 1e-6  # denormals
        x[3] *= 1e30 if dtype != torch.float16 else 1e2
        x[4] = 1.9999 * 2.0**14 if dtype != torch.float16 else 10  # just below a power of two
        x[5] = torch.finfo(dtype).tiny
        y = check(x, weight)
        assert (y[0] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [("int", 4, 64), ("2:4", 4, 64), "dense"], ids=str)
def test_what_is_not_finite_stays_in_its_row(isa, form):
    use(isa)
    weight = torch.randn(20, 192) if form == "dense" else packed(form, 20, 192)
    packed_bytes = linear.pack(weight, 192)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(5, 192).to(dtype)
        clean = linear.linear(x, packed_bytes, 20)
        x[2, 100], x[3, 5] = torch.nan, torch.inf
        y = linear.linear(x, packed_bytes, 20)
        assert y[2].isnan().all() and not y[3].isfinite().any()
        assert torch.equal(y[[0, 1, 4]], clean[[0, 1, 4]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [("fp8", 8, None), ("fp6", 6, None), ("fp4", 4, 32)], ids=name)
def test_every_code_means_what_it_means(isa, form):
    """A column of all codes, picked out by an activation of one."""
    use(isa)
    format, bits, group = form
    weight = packed(form, 256, 32, torch.float32)
    codes = (torch.arange(256) % 2**bits).to(torch.uint8)
    if bits == 8:
        codes[codes & 127 == 127] = 0
        weight.planes[0].view(torch.uint8)[:, 9] = codes
    elif bits == 4:  # column 9 is the second in its byte
        plane = weight.planes[0]
        plane[:, 4] = (plane[:, 4] & 15) | codes << 4
    else:
        weight.planes[0][:, 4] = (weight.planes[0][:, 4] & 15) | (codes & 15) << 4
        weight.planes[1][:, 2] = (weight.planes[1][:, 2] & ~0b1100) | codes >> 4 << 2
    x = torch.zeros(1, 32)
    x[0, 9] = 1
    y = linear.linear(x, linear.pack(weight, 32), 256)
    torch.testing.assert_close(y[0], dequantize(weight)[:, 9], rtol=2**-22, atol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [*CASES, "dense"], ids=lambda f: f if f == "dense" else name(f))
def test_any_number_of_threads_gives_the_same_bits(isa, form):
    use(isa)
    K, N = 256, 16 * 37 + 5
    weight = torch.randn(N, K).bfloat16() if form == "dense" else packed(form, N, K)
    packed_bytes, x = linear.pack(weight, K), torch.randn(3, K).bfloat16()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            assert torch.equal(linear.pack(weight, K), packed_bytes)
            results.append(linear.linear(x, packed_bytes, N))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "form", [("int", 4, 64), ("int", 1, 64), ("fp8", 8, None), "dense"], ids=str
)
def test_one_row_shared_in_small_pieces(isa, form, small_pieces):
    """Half of a weight is cut evenly, half handed out: here even of a small one, block by block."""
    use(isa)
    K, N = 256, 16 * 37 + 5
    weight = torch.randn(N, K).bfloat16() if form == "dense" else packed(form, N, K)
    x = torch.randn(1, K).bfloat16()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(check(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("rows", [(1, 5), (40, 100)])
def test_two_calls_at_once(rows):
    problems = [
        (torch.randn(m, 512).bfloat16(), linear.pack(packed(form, N, 512), 512), N)
        for m, form, N in zip(rows, (("int", 4, 64), ("fp6", 6, None)), (500, 300), strict=True)
    ]
    at_once.check(linear.linear, problems, 50)


@pytest.mark.parametrize("rows", [4, 24])
@pytest.mark.parametrize("isa", ISAS)
def test_tensors_that_are_views(isa, rows):
    use(isa)
    K, N = 96, 20
    packed_bytes = linear.pack(packed(("int", 4, 32), N, K), K)
    for dtype in DTYPES:
        x = torch.randn(rows, K).to(dtype)
        y = linear.linear(x, packed_bytes, N)
        elsewhere = torch.zeros(rows, K + 1, dtype=dtype)[:, 1:]  # off a vector's boundary
        elsewhere.copy_(x)
        columns = torch.zeros(K, rows, dtype=dtype).T
        columns.copy_(x)
        moved = torch.zeros(len(packed_bytes) + 3, dtype=torch.uint8)[3:]
        moved.copy_(packed_bytes)
        same_row = x[:1].expand(rows, K)
        assert torch.equal(linear.linear(same_row, moved, N), y[:1].expand(rows, N))
        for same in (elsewhere, columns, x.view(2, rows // 2, K)):
            assert torch.equal(linear.linear(same, moved, N).view(rows, N), y)


def test_nothing_comes_of_nothing():
    assert linear.linear(torch.zeros(0, 64), linear.pack(torch.zeros(5, 64), 64), 5).shape == (0, 5)


def test_compiles_and_is_registered_as_torch_wants_it():
    packed_bytes = linear.pack(packed(("int", 4, 32), 20, 64), 64)
    x = torch.randn(1, 3, 64).bfloat16()
    arguments = (x[0], packed_bytes, 20)
    torch.library.opcheck(torch.ops.quantbench.cpu_linear.default, arguments)

    def layer(x):
        return linear.linear(x * 2, packed_bytes, 20) + 1

    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    for dtype in DTYPES:
        weight = torch.randn(20, 64).to(dtype)
        weight[3, 4] = bad
        with pytest.raises(KernelError, match="NaN or infinite"):
            linear.pack(weight, 64)
    weight = packed(("int", 4, 32), 20, 64, zero=True)
    for tensor in (weight.scale, weight.zero):
        before, tensor[2, 1] = tensor[2, 1].clone(), bad
        with pytest.raises(KernelError, match="NaN or infinite"):
            linear.pack(weight, 64)
        tensor[2, 1] = before
    weight = packed(("fp8", 8, None), 20, 64)
    weight.planes[0].view(torch.uint8)[7, 7] = 127
    with pytest.raises(KernelError, match="NaN or infinite"):
        linear.pack(weight, 64)


def test_what_it_does_not_take_is_an_error():
    packed_bytes = linear.pack(torch.randn(20, 64), 64)
    x = torch.randn(1, 64)
    for arguments, message in (
        ((x.double(), packed_bytes, 20), "float32, bfloat16"),
        ((x[:, :60], packed_bytes, 20), "64"),
        ((x, packed_bytes, 21), "20 rows, not 21"),
        ((x, packed_bytes[:-64], 20), "size"),
        ((x, torch.zeros(500, dtype=torch.uint8), 20), "no weight packed"),
        ((x, packed_bytes[:100], 20), "no weight packed"),
    ):
        with pytest.raises(RuntimeError, match=message):
            linear.linear(*arguments)
    with pytest.raises(KernelError, match="multiples of 8"):
        linear.pack(packed(("int", 8, 4), 20, 64), 64)
