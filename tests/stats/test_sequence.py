"""Critical values: against scipy, and against simulated random walks."""

import math

import numpy as np
import pytest
from scipy import stats

from quantbench.stats.sequence import FIRST, TUNED, largest, reach


@pytest.mark.parametrize(("level", "freedom"), [(0.05, 4), (0.01, 4.5), (0.05, 30), (0.02, 1e5)])
def test_the_largest_of_one_is_students_t(level, freedom):
    expected = stats.t.isf(level / 2, round(freedom, 1))
    assert largest(level, 1, freedom) == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(("count", "freedom"), [(2, 3), (3, 4), (3, 40), (7, 10), (29, 6)])
def test_the_largest_of_many_against_drawn_ones(count, freedom):
    generator = np.random.default_rng(3)
    shape = (200_000, 1)
    deviations = np.sqrt(generator.chisquare(freedom, shape) / freedom)
    drawn = np.abs(generator.normal(0, 1, (shape[0], count)) / deviations).max(axis=1)
    assert (drawn > largest(0.05, count, freedom)).mean() == pytest.approx(0.05, abs=0.002)


def test_it_lies_between_dunnett_and_bonferroni():
    """scipy's Dunnett with a control, 11 values each: 4 groups, 40 degrees of freedom."""
    generator = np.random.default_rng(4)
    control, *arms = generator.normal(0, 1, (4, 11))
    result = stats.dunnett(*arms, control=control)
    ends = result.confidence_interval(0.95)
    groups = [control, *arms]
    error = math.sqrt(sum(group.var(ddof=1) for group in groups) / 4 * 2 / 11)
    dunnett = (ends.high - ends.low)[0] / 2 / error
    assert dunnett < largest(0.05, 3, 40) < stats.t.isf(0.05 / 6, 40)


def test_there_is_no_interval_before_the_first_look():
    assert reach(FIRST - 1, 10, 0.05) == math.inf and reach(100, 0, 0.05) == math.inf
    assert reach(FIRST, FIRST - 1, 0.05) < math.inf


def test_students_t_takes_the_place_of_the_normal_boundary():
    """By hand, after 9 × TUNED cycles: (10 / 9) (log 10 + 2 log 20) = 9.216, the root is 3.036."""
    assert reach(9 * TUNED, 10**9, 0.05) == pytest.approx(3.036, abs=1e-3)
    expected = stats.t.isf(stats.norm.sf(3.036), 20)
    assert reach(9 * TUNED, 20, 0.05) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("level", [0.05, 0.2])
def test_random_walks_leave_the_boundary_as_rarely_as_promised(level):
    """2,000 walks looked at after every of 3,000 cycles. The share outside is at most the level;
    what is spent before FIRST and after 3,000 cycles is at most two thirds of it."""
    generator = np.random.default_rng(5)
    cycles = np.arange(1, 3000)
    edge = np.array([reach(int(n), 10**9, level) for n in cycles]) * np.sqrt(cycles)
    outside = sum(
        bool((np.abs(np.cumsum(generator.normal(0, 1, len(cycles)))) > edge).any())
        for _ in range(2000)
    )
    assert level / 3 < outside / 2000 < level + 2 * math.sqrt(level / 2000)
