"""-hqq's scales and zeros: the same bits in C++ as in torch, on every instruction set."""

import pytest
import torch

from quantbench.ops import hqq
from quantbench.ops.cpu import hqq as cpp
from tests.ops.instructions import NEEDS_COMPILER

BOTH = pytest.mark.parametrize(
    "implementation", [hqq, pytest.param(cpp, marks=NEEDS_COMPILER)], ids=["torch", "cpp"]
)
SIZES = [(1, 8), (2, 64), (3, 32), (4, 64), (4, 256), (7, 16)]  # bits, columns of a group


def weights(kind, dtype):
    """(21, 512): the last block of 16 groups is not whole; with groups of equal weights."""
    w = torch.randn(21, 512)
    if kind == "heavy-tailed":  # some errors are large enough to be shrunk by less than all
        w = torch.distributions.StudentT(2.0).sample((21, 512))
    w = w + 300 if kind == "off-centre" else w * 0.02 if kind == "small" else w
    w[3], w[5], w[7, ::3] = 0, 1.5, 0
    return w.to(dtype)


def of_range(w, bits, size):
    """Scale and zero that span each group, in 16 bits."""
    groups = w.float().unflatten(-1, (-1, size))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / (2**bits - 1)).clamp(min=2.0**-20)
    dtype = torch.float16 if w.dtype == torch.float16 else torch.bfloat16
    return scale.to(dtype), (low + scale * 2 ** (bits - 1)).to(dtype)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["gaussian", "heavy-tailed", "off-centre", "small"])
def test_cpp_gives_the_bits_of_torch(isa, kind):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        w = weights(kind, dtype)
        for bits, size in SIZES:
            pair = of_range(w, bits, size)
            assert same(cpp.fit(w, *pair, bits), hqq.fit(w, *pair, bits)), (dtype, bits, size)


@NEEDS_COMPILER
def test_a_group_does_not_know_of_others_nor_of_threads(threads):
    w = torch.randn(2100, 64)
    scale, zero = of_range(w, 4, 32)
    whole = cpp.fit(w, scale, zero, 4)
    assert same([x[7:9] for x in whole], cpp.fit(w[7:9], scale[7:9], zero[7:9], 4))
    threads(1 + torch.get_num_threads() % 2)
    assert same(whole, cpp.fit(w, scale, zero, 4))


@BOTH
def test_by_hand(implementation):
    """Two codes for four zeros, three times 1.25 and 2: best are 0 and the others' mean, 1.4375;
    the range has 0 and 2. Weights that the range fits exactly keep it."""
    w = torch.tensor([[0, 1.25, 0, 1.25, 0, 1.25, 0, 2], [3, 3, 5, 5, 3, 5, 5, 5]])
    scale, zero = implementation.fit(w, *of_range(w, 1, 8), 1)
    assert scale.tolist() == [[1.4375], [2]] and zero.tolist() == [[1.4375], [5]]


@BOTH
def test_numbers_that_are_none_disturb_only_their_group(implementation):
    w = torch.randn(4, 64)
    pair = of_range(w, 4, 32)
    expected = implementation.fit(w, *pair, 4)
    w[1, 3], w[2, 40] = float("nan"), float("inf")
    found = implementation.fit(w, *pair, 4)
    clean = torch.ones(4, 2, dtype=torch.bool)
    clean[1, 0] = clean[2, 1] = False
    assert all(torch.equal(a[clean], b[clean]) for a, b in zip(found, expected, strict=True))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "shape, scales, dtype",
    [((2, 6), (2, 1), torch.bfloat16), ((2, 512), (2, 1), torch.bfloat16),
     ((2, 64), (2, 2), torch.float32), ((2, 64), (1, 4), torch.bfloat16)],
    ids=["columns", "large", "dtype", "rows"],
)  # fmt: skip
def test_what_it_refuses(shape, scales, dtype):
    scale = torch.ones(scales, dtype=dtype)
    with pytest.raises(RuntimeError, match="groups have|scale and zero|Sizes of tensors"):
        cpp.fit(torch.ones(shape), scale, scale, 4)
