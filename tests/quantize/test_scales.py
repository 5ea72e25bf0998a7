"""The scales of every scheme, held against the weights alone: a weight is no further from what it
becomes than half a step of its own group's range. Nothing here reads a scale of the scheme's."""

import pytest
import torch

from quantbench.quantize.spec import SHOWN, parse_scheme
from tests.quantize.test_numbers import OF_EVERY_KIND, drawn, packed

# A least-squares fit (-hqq, -gptq) gives up outliers: test_numbers holds it against the plain
# scheme, and bitsandbytes' and nvfp4 against their packages. 2:4 sparsity zeros weights on purpose:
# below.
ELSEWHERE = ("none", "bnb", "nvfp4", "sparse")
NAMES = [n for n in SHOWN if not n.startswith(ELSEWHERE) and not parse_scheme(n).way]
BF16 = 2.0**-8  # the largest relative error of a scale or zero that is stored in bfloat16


def largest(groups):
    return groups.abs().amax(-1, keepdim=True)


def symmetric(groups, steps, relative=0.0):
    """Half a step of 2 · max|w| / steps; the largest weight may be clipped by half a step."""
    step = 2 * largest(groups) / steps
    return step / 2 + relative * largest(groups)


def asymmetric(groups, bits, unit):
    """Half a step of the range; the scale's rounding is multiplied by up to 2^(bits-1) steps.

    unit: the relative error of scale and zero.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return step / 2 + unit * ((high - low) / 2 + (high + low).abs() / 2 + step)


def floating(groups, largest_number, mantissa_bits, smallest_step, scale_ratio=1.0):
    """Half the distance of neighbouring numbers around w, with the scale max|w| / largest_number;
    scale_ratio: how much larger than that the scale may be."""
    scale = largest(groups) / largest_number * scale_ratio
    return torch.maximum(groups.abs() * 2.0 ** -(mantissa_bits + 1), scale * smallest_step / 2)


def allowed(name, w, unit=BF16):
    """|dequantized - w| at most, of w (N, K) float32; with unit 0, were scales not rounded."""
    N, K = w.shape

    def grouped(size):
        return w.unflatten(-1, (-1, size))

    family, *numbers = name.split("-")
    if name in ("int8wo", "int8dq", "embed-int8"):
        return symmetric(w, 255)
    if name == "int8dq-int4wo-32":
        return symmetric(grouped(32), 15, unit)
    if family in ("int4wo", "uintx"):
        bits, size = (4, int(numbers[0])) if family == "int4wo" else map(int, numbers)
        return asymmetric(grouped(size), bits, unit)
    if name in ("float8wo", "float8dq-row"):
        return floating(w, 448, 3, 2.0**-9)
    if name == "float8dq-tensor":
        return floating(w.view(1, -1), 448, 3, 2.0**-9).view(N, K)
    if name == "fp6":
        return floating(w, 28, 2, 2.0**-4)
    assert name == "mxfp4"  # the power of two above max|w| / 6: less than twice that
    return floating(grouped(32), 6, 1, 0.5, 2.0 if unit else 1.0)


@OF_EVERY_KIND
@pytest.mark.parametrize("name", NAMES)
def test_no_weight_is_further_than_half_a_step_of_its_groups_range(name, kind):
    w = drawn(kind, 32)
    limit = allowed(name, w)
    error = (packed(name, w).dequantize() - w).abs()
    error = error.view(limit.shape if limit.shape[-1] > 1 else (*limit.shape[:-1], -1))
    assert (error <= limit * (1 + 1e-4) + 1e-7).all()
    # And no step is smaller than it has to be: of 8192 errors within half a step the largest is
    # above 0.9 of it. Floating-point numbers just above a power of two, where that is, are up to
    # 1 + 2^-2 (E2M1) times the power of two that `floating` would need there: 0.9 / 1.25 = 0.72.
    assert (error / allowed(name, w, unit=0)).max() > 0.7


@OF_EVERY_KIND
def test_sparse_marlin_keeps_two_of_four_by_size_with_a_scale_of_what_it_keeps(kind):
    w = drawn(kind, 32)
    fours = w.view(32, -1, 4)
    least_kept = fours.abs().sort(-1).values[..., 2:3]
    kept = torch.where(fours.abs() >= least_kept, fours, 0.0).view(w.shape)
    assert ((kept != 0).view(fours.shape).sum(-1) == 2).all()  # no two are equal
    made = packed("sparse-marlin", w).dequantize()
    assert (made[kept == 0] == 0).all()
    groups = kept.view(32, -1, 64)
    error = made.view(groups.shape) - groups
    assert (error.abs() <= symmetric(groups, 15, BF16) * (1 + 1e-4)).all()
    assert (error.abs() / symmetric(groups, 15)).max() > 0.9
