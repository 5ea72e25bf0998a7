"""-hqq: the scale and zero point of each group that fit its weights best, in plain torch.

    scale, zero = fit(w, scale, zero, bits)

    w ≈ (code - 2**(bits - 1)) · scale + zero

It starts with the scale and zero that span the group's range, and tries others:

- half-quadratic optimization (Badri and Shaji 2023, https://mobiusml.github.io/hqq_blog), which
  minimizes |error|**0.7 and so gives up outliers; it ends for a group whose zero changes no more;
- narrower ranges around the same centre;
- least squares for the codes that the best so far leads to, REFITS times.

Each group takes the candidate with the least squared error, as scale and zero are stored.

ops/cpu/hqq.py gives the same bits, twenty times faster. So every sum here has its order: four sums
of every fourth number, then their sum.
"""

import torch
from torch import Tensor

NORM, BETA, KAPPA, ITERATIONS = 0.7, 10.0, 1.01, 20  # β starts at BETA and grows by KAPPA
MOST_STEPS = 2e4  # of codes for a unit of weight: for groups of equal weights
NARROWER = (0.95, 0.9, 0.85, 0.8, 0.7)  # of the range
REFITS = 3


def fit(w: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """w (N, K); scale and zero (N, K // group_size) of the range, in 16 bits. Returns new ones
    of the same shapes and dtypes.

    The group size has to be a multiple of 4. A group's result depends on its weights alone.
    """
    groups = w.float().unflatten(-1, (scale.shape[1], -1))
    best = _Best(groups, bits, scale, zero)
    best.attempt(*_half_quadratic(groups, bits))
    wide, centre = scale.float(), zero.float() - scale.float() * 0.5  # for an even number of codes
    for part in NARROWER:
        narrow = (wide * part).to(scale.dtype)
        best.attempt(narrow, centre + narrow.float() * 0.5)
    for _ in range(REFITS):
        best.attempt(*_least_squares(groups, bits, best.scale, best.zero))
    return best.scale, best.zero


class _Best:
    """Keeps, for each group, the pair (scale, zero) with the least squared error so far."""

    def __init__(self, groups: Tensor, bits: int, scale: Tensor, zero: Tensor) -> None:
        self.groups, self.bits, self.scale, self.zero = groups, bits, scale, zero
        self.error = _error(groups, bits, scale, zero)

    def attempt(self, scale: Tensor, zero: Tensor) -> None:
        scale, zero = scale.to(self.scale.dtype), zero.to(self.zero.dtype)
        error = _error(self.groups, self.bits, scale, zero)
        better = (error < self.error) & (scale > 0)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)
        self.error = torch.where(better, error, self.error)


def _half_quadratic(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero, float32. Here codes are from 0 on, and the zero point is one of them:
    w ≈ (code - zero) / steps."""
    most = 2**bits - 1
    low, high = groups.aminmax(dim=-1)
    steps = ((high - low).reciprocal() * most).clamp(max=MOST_STEPS)
    scale = steps.reciprocal()
    zero = -low * steps
    if bits == 4:  # as the authors have it
        zero = zero.round()
    unsettled = torch.ones_like(zero, dtype=torch.bool)
    for iteration in range(ITERATIONS):
        stretched = groups * steps[..., None]
        codes = (stretched + zero[..., None]).round_().clamp_(0, most)
        error = groups - (codes - zero[..., None]) * scale[..., None]
        best = _shrunk(error, BETA * KAPPA**iteration)
        shifts = codes - (groups - best) * steps[..., None]
        settled = torch.where(unsettled, _sum(shifts) / groups.shape[-1], zero)
        unsettled &= settled != zero
        zero = settled
        if not unsettled.any():
            break
    return scale, ((most + 1) / 2 - zero) * scale


def _shrunk(error: Tensor, beta: float) -> Tensor:
    """The proximal operator of |error|**NORM: 0 up to where the two terms are equal."""
    size = error.abs()
    power = size.double().pow(NORM - 1).float() * (1 / beta)
    shrunk = (size - power).clamp(min=0).copysign(error)
    return torch.where(size > beta ** (-1 / (2 - NORM)), shrunk, 0.0)


def _least_squares(groups: Tensor, bits: int, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and zero of least squares for the codes that scale and zero lead to, float32."""
    count = groups.shape[-1]
    codes = _codes(groups, bits, scale, zero)
    code, weight = _sum(codes) / count, _sum(groups) / count
    centred = codes - code[..., None]
    spread = _sum(centred * centred)
    slope = _sum(centred * groups) / spread.clamp(min=1e-6)
    slope = torch.where(spread > 0, slope, scale.float())
    return slope, weight - slope * code


def _error(groups: Tensor, bits: int, scale: Tensor, zero: Tensor) -> Tensor:
    numbers = _codes(groups, bits, scale, zero) * scale.float()[..., None] + zero.float()[..., None]
    return _sum((numbers - groups).square())


def _codes(groups: Tensor, bits: int, scale: Tensor, zero: Tensor) -> Tensor:
    """The nearest codes, from -2**(bits - 1) on."""
    half = 1 << (bits - 1)
    steps = (groups - zero.float()[..., None]) * scale.float().reciprocal()[..., None]
    return steps.round_().clamp_(-half, half - 1)


def _sum(numbers: Tensor) -> Tensor:
    """Over the last dimension, in the order that the C++ has."""
    four = numbers.unflatten(-1, (-1, 4)).unbind(-2)
    total = torch.zeros_like(four[0])
    for part in four:
        total += part
    a, b, c, d = total.unbind(-1)
    return (a + b) + (c + d)
