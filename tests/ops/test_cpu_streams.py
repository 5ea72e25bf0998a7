"""How a thread's share of a weight is cut into streams. Products of long shares: test_linear.py.

streams_check.cpp prints where ops/cpu/src/common/streams.h lets the streams of ranges begin.
"""

import itertools
import subprocess
from pathlib import Path

import pytest

from quantbench.ops.cpu import build, compiler
from tests.ops.instructions import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

UNEVEN_FROM = 64  # Streams::UNEVEN_FROM


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
