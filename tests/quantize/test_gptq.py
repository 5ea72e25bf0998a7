"""GPTQ against optimal brain quantization, which inverts the Hessian anew for every column, in
float64 (Frantar and Alistarh 2022, arXiv:2208.11580), and against rounding."""

import pytest
import torch

from quantbench.ops.formats import TABLES
from quantbench.quantize.gptq import refined
from tests.quantize.test_numbers import packed as rounded

NAMES = "int4wo-32-gptq uintx-3-8-gptq uintx-2-16-gptq int8dq-int4wo-32-gptq mxfp4-gptq".split()
IN_ORDER = "uintx-3-8-gptq-inorder"


def drawn(rows, columns, tokens):
    """A weight, and inputs whose features differ in size and depend on one another."""
    mixed = torch.randn(columns, columns) / columns**0.5 + torch.eye(columns)
    x = torch.randn(tokens, columns) @ mixed * torch.rand(columns).exp()
    return torch.randn(rows, columns).bfloat16(), x


def brute_force(w, hessian, packed, act_order=True):
    """The weight (N, K) float64 that column-by-column quantization gives."""
    w, hessian = w.double(), hessian.double()
    hessian = hessian + torch.eye(len(hessian)) * hessian.diagonal().mean() * 0.01
    codes = torch.arange(2.0**packed.bits).double() - 2 ** (packed.bits - 1)
    codes = torch.tensor(TABLES["fp4"]).double() if packed.format == "fp4" else codes
    scale, zero = packed.parts.scales
    size, left = packed.group_size, list(range(len(hessian)))
    if act_order:
        left = hessian.diagonal().argsort(descending=True).tolist()
    while left:
        j, inverse = left[0], hessian[left][:, left].inverse()
        offset = 0 if zero is None else zero[:, j // size, None].double()
        grid = codes * scale[:, j // size, None].double() + offset  # (N, codes)
        nearest = grid.gather(1, (grid - w[:, j, None]).abs().argmin(1, keepdim=True))[:, 0]
        w[:, left] -= ((w[:, j] - nearest) / inverse[0, 0])[:, None] * inverse[0]
        w[:, j] = nearest
        left = left[1:]
    return w


@pytest.mark.parametrize("name", [*NAMES, IN_ORDER])
def test_codes_are_those_of_optimal_brain_quantization(name):
    _, x = drawn(3, 32, 100)
    w = torch.randn(3, 32)  # of bfloat16 some lie halfway between two codes, where either is right
    packed, hessian = rounded(name, w), x.T @ x
    found = refined(w, packed, hessian, name != IN_ORDER)
    torch.testing.assert_close(
        found.dequantize(torch.float32).double(),
        brute_force(w, hessian, packed, name != IN_ORDER),
        rtol=1e-6,
        atol=1e-7,
    )
    assert torch.equal(found.scale.float(), packed.scale.float())


def test_features_that_are_independent_are_rounded():
    """Nothing can make up for a column's error; no token reaches some columns."""
    w, _ = drawn(8, 64, 1)
    packed = rounded("uintx-3-64", w)
    found = refined(w, packed, torch.diag(torch.rand(64).mul(9).floor()))
    errors = [(one.dequantize() - w).abs() for one in (found, packed)]
    assert torch.equal(*errors)  # halfway between two codes either is right


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_hessian_without_an_inverse_is_refused(value):
    w, _ = drawn(8, 64, 1)
    assert refined(w, rounded("uintx-3-64", w), torch.full((64, 64), value)) is None


def test_inputs_fewer_than_features_are_damped():
    w, x = drawn(8, 64, 3)
    assert refined(w, rounded("uintx-3-64", w), x.T @ x) is not None
