"""What every kernel of a linear layer has to do: the exact product in float64, within a bound.

    for kernel in KERNELS:
        check(kernel, x, weight, activation)        # one product
        check(kernel, *draw(kernel, form))
    same_bits(kernel, x, weight, torch.set_num_threads)     # of the C++ kernels

A row of KERNELS says which numbers a kernel takes, how it multiplies, and how far each result may
be from the exact one. torchao's own kernels are compared with the reference's numbers where
schemes are (tests/quantize/test_every_scheme.py).
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quantbench.ops import reference
from quantbench.ops.cpu import build, linear
from quantbench.ops.formats import OUTER, Packed, dequantize
from quantbench.ops.packing import columns_per_unit
from quantbench.quantize.activation import rounded
from tests.ops.exact import DTYPES, UNIT
from tests.ops.instructions import MARKS, use
from tests.ops.packed_weights import FORMATS, OF_FILES, packed

# Forms whose weight is not packed: scheme none.
FULL_PRECISION = ("plain", 16, None)
GROUP_SIZES = (8, 16, 24, 32, 40, 64, 96, 128, 160, 256, 320, 512)
ACTIVATIONS = (None, None, None, "int8", "int8-asymmetric")


class Case:
    """A product, and what the bounds are made of, in float64."""

    def __init__(self, x: Tensor, weight: Packed | Tensor, activation: str | None) -> None:
        self.x, self.weight, self.activation = x, weight, activation
        w = (dequantize(weight) if isinstance(weight, Packed) else weight).double()
        numbers, scale = x.double(), 1.0
        if activation:
            numbers, scale = (y.double() for y in rounded(x, activation))
        self.numbers = w
        self.wanted = (numbers @ w.T) * scale
        self.sizes = numbers.abs() * scale
        self.terms = self.sizes @ w.abs().T  # the sum of the terms' sizes
        self.largest = numbers.abs().amax(-1, keepdim=True)

    def terms_of(self, per_group: Tensor) -> Tensor:
        """The sum of the sizes of x times a number of each group of the weight."""
        each = per_group.double().abs().repeat_interleave(self.weight.group_size, 1)
        return self.sizes @ each.T

    @property
    def format(self) -> str:
        return self.weight.format if isinstance(self.weight, Packed) else "plain"

    def __str__(self) -> str:
        given = f"x {tuple(self.x.shape)} {self.x.dtype}, {self.activation}, weight "
        if not isinstance(self.weight, Packed):
            return given + f"{tuple(self.weight.shape)}"
        w = self.weight
        zero = "" if w.zero is None else ", zeros"
        factor = "" if w.tensor_scale is None else f", times {float(w.tensor_scale)}"
        return (
            f"{given}{w.format}-{w.bits} {tuple(self.numbers.shape)}, groups of {w.group_size}, "
            f"{w.scale.dtype}{zero}{factor}"
        )


@dataclass(frozen=True)
class Kernel:
    name: str
    multiply: Callable[[Tensor, Packed | Tensor, str | None], Tensor]
    allowed: Callable[[Case], Tensor]
    dtype: Callable[[Tensor], torch.dtype]  # of the result
    takes: Callable[[tuple], bool]  # whether it takes a form
    begin: Callable[[], None] = lambda: None  # may skip the test
    activations: tuple[str | None, ...] = (None,)
    rows: tuple[int, ...] = (*range(1, 37), 50, 130)
    most_columns: int = 700
    device: str = "cpu"
    draws: int = 16  # of each form
    slow: bool = False  # Triton's interpreter: fewer and smaller problems


def check(kernel: Kernel, x: Tensor, weight: Packed | Tensor, activation: str | None = None):
    """The kernel's product, if no element is off by more than its bound."""
    case = Case(x, weight, activation)
    y = kernel.multiply(x, weight, activation)
    assert y.dtype == kernel.dtype(x) and y.shape == case.wanted.shape
    most = torch.finfo(y.dtype).max  # a sum beyond it is infinite
    error = (y.double().clamp(-most, most) - case.wanted.clamp(-most, most)).abs()
    allowed = kernel.allowed(case)
    excess = (error - allowed).max() if error.numel() else torch.zeros(())
    assert excess <= 0, f"{case}: off by {float((error / allowed).max()):.3g} times what is allowed"
    return y


# ------------------------------------------------------------------------------------ what is drawn


def columns_of(form: tuple) -> int:
    """What the number of columns has to be a multiple of."""
    format, bits, group = form
    if format == "plain":
        return 1
    unit = 8 if format == "2:4" else columns_per_unit(bits) if format != "fp8" else 1
    return math.lcm(unit, group or 1)


def same_bits(
    kernel: Kernel, x: Tensor, weight: Packed | Tensor, set_threads: Callable[[int], None]
) -> None:
    """Whatever the number of threads, and however x lies in memory: off a vector's boundary, by
    columns, the same row again and again."""
    y, (rows, K) = kernel.multiply(x, weight, None), x.shape
    elsewhere = torch.zeros(rows, K + 1, dtype=x.dtype)[:, 1:]
    by_columns = torch.zeros(K, rows, dtype=x.dtype).T
    views = [x, elsewhere.copy_(x), by_columns.copy_(x), x]
    for threads, view in zip((4, 3, 2, 1), random.sample(views, 4), strict=True):
        set_threads(threads)
        torch.full_like(y, math.nan)  # whose memory is next: what is not written is not right
        assert torch.equal(kernel.multiply(view, weight, None), y)
    same = kernel.multiply(x[:1].expand(rows, K), weight, None)
    assert torch.equal(same, same[:1].expand_as(same))


def broken_rows(kernel: Kernel, x: Tensor, weight: Packed | Tensor) -> None:
    """What is not finite stays in its row, of two of x's."""
    y, (rows, K) = kernel.multiply(x, weight, None), x.shape
    broken = random.sample(range(rows), 2)
    x = x.clone()
    x[broken[0], random.randrange(K)], x[broken[1], random.randrange(K)] = math.nan, math.inf
    z = kernel.multiply(x, weight, None)
    assert z[broken[0]].isnan().all() and not z[broken[1]].isfinite().any()
    others = [row for row in range(rows) if row not in broken]
    assert torch.equal(z[others], y[others])


def draw(kernel: Kernel, form: tuple) -> tuple[Tensor, Packed | Tensor, str | None]:
    format, bits, group = form
    if group and format not in ("2:4", "fp8", *OF_FILES):
        group = random.choice([group, *GROUP_SIZES])
        if group % columns_per_unit(bits) or group > kernel.most_columns:
            group = form[2]
    unit = columns_of((format, bits, group))
    if format in OF_FILES and random.random() < 0.5:
        unit = OUTER
    K = unit * random.randint(1, max(1, kernel.most_columns // unit))
    N = random.choice((1, 3, 16, 17, 33, 70))
    M, dtype = random.choice(kernel.rows), random.choice(DTYPES)
    activation = random.choice(kernel.activations) if format == "int" else None
    if format == "plain":
        weight = torch.randn(N, K, device=kernel.device).to(dtype)
        return activations(kernel, M, K, dtype, None), weight, None
    by_8_bits = format == "fp4" or (format == "int" and not group)
    scale_dtype = random.choice(
        (*DTYPES, torch.float8_e4m3fn, torch.float8_e8m0fnu) if by_8_bits else DTYPES
    )
    zero = format == "int" and bool(group) and random.random() < 0.5
    factor = random.choice((None, None, -0.37)) if not zero else None
    weight = packed((format, bits, group), N, K, scale_dtype, zero, factor, kernel.device)
    return activations(kernel, M, K, dtype, activation), weight, activation


def activations(kernel: Kernel, M: int, K: int, dtype: torch.dtype, rounding: str | None) -> Tensor:
    """(M, K): most rows are normal, the others at the edges of what the dtype holds."""
    x = torch.randn(M, K, device=kernel.device).to(dtype)
    half = dtype == torch.float16
    triton_bfloat16 = kernel.name == "triton" and dtype == torch.bfloat16
    for row in x:
        match random.randrange(20):
            case 0:
                row.zero_()
            case 1:
                row.copy_(row.abs())  # a range to one side of zero
            case 2:
                row.copy_(-row.abs())
            case 3 if not rounding:
                row[random.randrange(K)] *= 1e3  # an outlier
            # The interpreter takes subnormal bfloat16 for something else.
            case 4 if not rounding and not triton_bfloat16:
                row *= 1e-6 if half else 1e-40
            case 5 if not rounding:
                row *= 1e2 if half else 1e30
            case 6 if not rounding:
                row.fill_(10 if half else 1.9999 * 2.0**14)  # just below a power of two
            case 7 if not rounding:
                row.fill_(torch.finfo(dtype).tiny)
            case 8:
                row.zero_()
                row[random.randrange(K)] = 1
    return x


# ------------------------------------------------------------------------------------- the kernels


def cpu_allowed(case: Case) -> Tensor:
    """One rounding to the result's dtype; before it float32: sums of K terms in 16 lanes, of which
    256 columns may be summed one after the other, and what scales and zeros lose.

    x is multiplied as integers of 15 bits and a sign, float32 as integers of 30, in units of its
    largest number; with fp8 weights, as it is. AMX's tiles may hold weights of bfloat16, and tables
    numbers of 15 bits and a sign where x has 16 bits, with AVX2 of 13.
    """
    x, w, K = case.x, case.numbers, case.numbers.shape[1]
    terms, (_, zero) = case.terms, case.weight.plain.scales
    if zero is not None:  # the zero points' part is summed separately
        terms = terms + 2 * case.terms_of(zero)
    unit = UNIT[x.dtype]
    in_turn = min(K, 256) if x.shape[:-1].numel() > 1 else 0
    allowed = unit * case.wanted.abs() + (16 + K / 16 + in_turn) * 2.0**-24 * terms
    if case.activation is None:
        step = 2.0**-24 if x.dtype == torch.float32 else 2.0**-15
        if case.format != "fp8":
            allowed += step * case.largest * w.abs().sum(1)
        if build.isa() in ("amx", "avx512bf16") and x.dtype == torch.bfloat16:
            allowed += unit * case.terms
        if case.format in ("nf4", "bnb-fp4") and x.dtype != torch.float32:
            factor = 1.0 if case.weight.tensor_scale is None else float(case.weight.tensor_scale)
            scale = case.weight.plain.scales[0] * factor
            words = build.isa() == "avx2"
            allowed += 2.0 ** -(14 if words else 16) * case.terms_of(scale)
            if words:  # the sum of 8 products, in units of 2^-13 and 2^-14, loses its low byte
                each = scale.double().abs().sum(1) * case.weight.group_size
                allowed += 2.0**-22 * case.largest * each
    half = 2.0**-25 if x.dtype == torch.float16 else 0
    return allowed + 2.0**-125 * (1 + w.abs().sum(1)) + half


def plain_allowed(case: Case) -> Tensor:
    """float32 sums of K terms in 16 lanes, or in 2 of an AMX tile; in tiles of float32 256 columns
    may be summed one after the other. One rounding to the result's dtype. AMX and AVX512_BF16
    take denormals for zeros; a float16 result may be one."""
    ones = case.sizes.sum(-1, keepdim=True) + case.numbers.abs().sum(1)
    half = 2.0**-25 if case.x.dtype == torch.float16 else 0
    K = case.x.shape[-1]
    sums = (8 + K / 2 + min(K, 256)) * 2.0**-24 * case.terms
    return UNIT[case.x.dtype] * case.wanted.abs() + sums + 2.0**-126 * (1 + ones) + half


def reference_allowed(case: Case) -> Tensor:
    """K products, each rounded once and added up to K - 1 times, in float32."""
    K = case.x.shape[-1]
    return case.terms * (K + 1) * 2.0**-24 + (K + 1) * 2.0**-149


def triton_allowed(case: Case) -> Tensor:
    """Sums: a product meets at most K + 16 roundings on its way, each of 2^-24 of the terms' sizes;
    zero points are multiplied by sums of x, apart. Tensor cores cut off where they should round:
    2^-23, once when they align the terms and once when they add them.

    Numbers are rounded to x's dtype, which changes none that comes without a scale of its own,
    except those of NF4 and bitsandbytes' FP4. They come with the scales of groups of less
    than LEAST_SUMMED columns, and from UNPACKED_ROWS on with every scale.
    """
    from quantbench.ops.triton.linear import LEAST_SUMMED, UNPACKED_ROWS

    x, weight, K = case.x, case.weight, case.x.shape[-1]
    rows = x.shape[:-1].numel()
    factor = 1.0 if weight.tensor_scale is None else weight.tensor_scale.double().abs()
    terms, (_, zero) = case.terms, weight.plain.scales
    if zero is not None:
        terms = terms + 2 * case.terms_of(zero) * factor
    unit = 2.0**-22 if x.is_cuda else 2.0**-24
    # 2^-149 is the smallest float32: what lies between two of them is lost from a product or sum.
    most = x.double().abs().amax() if x.numel() else 0
    result = terms * (K + 16) * unit + (K + 16) * (2 + most) * 2.0**-149
    by_row = weight.group_size == K and weight.zero is None
    summed = (by_row or weight.group_size % LEAST_SUMMED == 0) and rows < UNPACKED_ROWS
    if summed and weight.format not in ("nf4", "bnb-fp4"):
        return result
    # A GPU rounds to nearest; the interpreter does not when it rounds to bfloat16.
    relative, smallest = {
        torch.bfloat16: (2.0**-8 if x.is_cuda else 2.0**-7, 2.0**-133),
        torch.float16: (2.0**-11, 2.0**-25),
        torch.float32: (2.0**-24, 2.0**-149),
    }[x.dtype]
    return result + x.double().abs() @ (case.numbers.abs() * relative + smallest * factor).T


def of_packed(form: tuple) -> bool:
    return form != FULL_PRECISION


def of_cpu(form: tuple) -> bool:
    return of_packed(form) and (form[0] not in ("fp8", "2:4") or (form[2] or 32) % 32 == 0)


def cpu_multiply(x: Tensor, weight: Packed, activation: str | None) -> Tensor:
    return linear.linear(x, linear.pack(weight, x.shape[-1], activation), len(weight.planes[0]))


def plain_multiply(x: Tensor, weight: Tensor, activation: None) -> Tensor:
    build.load()
    return torch.ops.quantbench.cpu_plain(x, weight)


def triton_multiply(x: Tensor, weight: Packed, activation: None) -> Tensor:
    pytest.importorskip("triton")
    from quantbench.ops.triton.linear import linear

    return linear(x, weight)


def cpu_kernels(isa: str) -> tuple[Kernel, Kernel]:
    """Of packed weights, and of plain ones."""

    def begin() -> None:
        use(isa)

    own = {"dtype": lambda x: x.dtype, "begin": begin}
    packed = Kernel(
        f"cpu-{isa}", cpu_multiply, cpu_allowed, takes=of_cpu, activations=ACTIVATIONS, **own
    )
    whole = Kernel(
        f"plain-{isa}", plain_multiply, plain_allowed, takes=lambda f: not of_packed(f), **own
    )
    return packed, whole


def float32(x: Tensor) -> torch.dtype:
    return torch.float32


REFERENCE = Kernel(
    "reference", lambda x, w, _: reference.linear(x, w), reference_allowed, float32, of_packed
)
SMALL = {"rows": (1, 2, 3, 5, 9, 33, 64), "most_columns": 300, "draws": 2, "slow": True}
TRITON = Kernel("triton", triton_multiply, triton_allowed, float32, of_packed, **SMALL)
ON_GPU = Kernel("triton-gpu", triton_multiply, triton_allowed, float32, of_packed, device="cuda")
SAME = "avx512"  # linear layers run the loops of avx2 there
CPU = [kernel for isa in build.ISAS if isa != SAME for kernel in cpu_kernels(isa)]
KERNELS = [
    pytest.param(kernel, id=kernel.name, marks=MARKS.get(kernel.name, ()))
    for kernel in (*CPU, REFERENCE, TRITON, ON_GPU)
]
FORMS = [*FORMATS, FULL_PRECISION]
