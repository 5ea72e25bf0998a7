"""How a thread's share of a weight is cut into streams, and that no cut changes a number.

streams_check.cpp prints where ops/cpu/src/common/streams.h lets the streams of ranges begin.
"""

import dataclasses
import itertools
import subprocess
from pathlib import Path

import pytest
import torch

from quantbench.ops.cpu import build, compiler, linear
from tests.ops.instructions import NEEDS_COMPILER
from tests.ops.packed_weights import packed

pytestmark = NEEDS_COMPILER

UNEVEN_FROM = 64  # Streams::UNEVEN_FROM
BLOCK = 16  # rows of a packed weight that are a unit of the cut


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The streams' beginnings, and the end, of each range (first, last)."""
    program = tmp_path_factory.mktemp("streams") / "check"
    source = Path(__file__).parent / "streams_check.cpp"
    command = [*compiler.command(), "-std=c++20", f"-I{build.SOURCES}", source, "-o", program]
    subprocess.run(command, check=True)

    def begin(ranges):
        numbers = map(str, itertools.chain(*ranges))
        done = subprocess.run([program, *numbers], capture_output=True, text=True, check=True)
        return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]

    return begin


def test_streams_have_each_unit_once_and_the_first_is_the_longest(cut):
    ranges = [(first, first + count) for count in range(400) for first in (0, 7)]
    ranges += [(0, 4748), (4748, 9496), (3, 151936), (2**40, 2**40 + 2**33 + 1)]
    for (first, last), begin in zip(ranges, cut(ranges), strict=True):
        assert len(begin) == 5 and begin[0] == first and begin[-1] == last
        lengths = [end - start for start, end in itertools.pairwise(begin)]
        assert min(lengths) >= 0 and lengths[0] == max(lengths)
        # A round has a unit of each stream: few streams end before the first stream does.
        assert 4 * lengths[0] - sum(lengths) <= 6


def test_streams_begin_at_unequal_distances(cut):
    """The loops for several tokens read more slowly at equal ones, whatever they are."""
    ranges = [(0, count) for count in [*range(UNEVEN_FROM, 400), 4748, 9496, 151936]]
    for begin in cut(ranges):
        one, two, three, _ = (end - start for start, end in itertools.pairwise(begin))
        assert one != two != three
        assert one + two != two + three  # every second stream


@pytest.mark.parametrize(
    "form", [("int", 8, None), ("int", 4, 32), ("fp6", 6, None), ("2:4", 4, 64)], ids=str
)
def test_a_cut_changes_no_bit(isa, form, threads):
    """The product with one thread's long share is what short ones, which are cut evenly, give."""
    N, K, part = BLOCK * (UNEVEN_FROM + 3) - 5, 64, BLOCK * 20
    threads(1)
    weight = packed(form, N, K)
    whole = linear.pack(weight, K)
    for M in (1, 2, 3, 4):
        x = torch.randn(M, K).bfloat16()
        y = linear.linear(x, whole, N)
        for start in range(0, N, part):
            rows = slice(start, min(start + part, N))
            planes, scale = [plane[rows] for plane in weight.planes], weight.scale[rows]
            few = linear.pack(dataclasses.replace(weight, planes=planes, scale=scale), K)
            assert torch.equal(y[:, rows], linear.linear(x, few, rows.stop - start))
