"""Dunnett's and Hsu's comparisons, against published tables, scipy and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from quantbench.compare.figures.contrasts import Contrasts, Fit, fit
from quantbench.compare.figures.families import (
    Interval,
    against_baseline,
    against_best,
    critical,
    smallest_correlation,
)
from tests.seeds import new_generator


def side_by_side(logs) -> Fit:
    """The fit of logarithms (P, J + 1), baseline first."""
    arms = logs.shape[1] - 1
    values, weights = logs[:, 1:] - logs[:, :1], np.ones((len(logs), arms, 1))
    return fit(Contrasts(tuple(range(1, arms + 1)), values, weights, np.zeros(arms + 1)))


@pytest.mark.parametrize(
    "count, freedom, sides, table",  # Dunnett 1955 and 1964, 5 %
    [(2, 10, 2, 2.57), (3, 10, 2, 2.76), (3, 20, 2, 2.54), (9, 20, 2, 2.95),
     (2, 10, 1, 2.15), (3, 10, 1, 2.34), (9, 10, 1, 2.81), (1, 10, 2, 2.23)],
)  # fmt: skip
def test_critical_values_are_those_of_the_tables(count, freedom, sides, table):
    assert critical(0.05, count, freedom, 0.5, sides) == pytest.approx(table, abs=0.006)


def test_critical_values_are_those_of_scipys_dunnett():
    generator = new_generator()
    groups = generator.standard_normal((5, 6))
    outcome = stats.dunnett(*groups[1:], control=groups[0], random_state=generator)
    interval = outcome.confidence_interval(0.95)
    deviation = math.sqrt(groups.var(axis=1, ddof=1).mean())
    expected = (interval.high - interval.low)[0] / 2 / (deviation * math.sqrt(2 / 6))
    assert critical(0.05, 4, 25) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("count, correlation", [(7, 0.15), (32, 0.5), (32, 0.0)])
def test_the_largest_of_many_exceeds_the_critical_value_as_often_as_it_should(count, correlation):
    generator, trials, freedom = new_generator(), 40000, 9
    common = generator.standard_normal((trials, 1)) * math.sqrt(correlation)
    own = generator.standard_normal((trials, count)) * math.sqrt(1 - correlation)
    scale = np.sqrt(generator.chisquare(freedom, (trials, 1)) / freedom)
    largest = np.abs((common + own) / scale).max(1)
    beyond = int((largest > critical(0.02, count, freedom, correlation)).sum())
    assert stats.binomtest(beyond, trials, 0.02).pvalue > 1e-5


def test_smaller_correlation_and_rounding_only_widen():
    values = [critical(0.02, 8, 12, correlation) for correlation in (0.0, 0.2, 0.499, 0.5, 0.8)]
    assert values == sorted(values, reverse=True)
    assert critical(0.02, 8, 12, 0.539) == critical(0.02, 8, 12, 0.5)


@pytest.mark.parametrize("level, correlation", [(0, 0.5), (1, 0.5), (0.02, 1.0), (0.02, -0.1)])
def test_impossible_levels_are_refused(level, correlation):
    with pytest.raises(ValueError, match="level .*, correlation .*: both"):
        critical(level, 2, 10, correlation)


def test_the_interval_by_hand():
    """Four processes of 0.01, 0.03, -0.02 and 0.02: mean 0.01, variance 14e-4 / 3, t 3.182."""
    logs = np.array([[0, 0.01], [0, 0.03], [0, -0.02], [0, 0.02]])
    (interval,) = against_baseline(side_by_side(logs), 0.05)
    reach = 3.182 * math.sqrt(14e-4 / 3 / 4)
    assert math.log(interval.ratio) == pytest.approx(0.01)
    assert math.log(interval.low) == pytest.approx(0.01 - reach, rel=1e-3)
    assert math.log(interval.high) == pytest.approx(0.01 + reach, rel=1e-3)
    assert interval.half_width == pytest.approx(math.expm1(reach), rel=1e-3)
    assert interval.word == "95 % interval" and interval.verdict == "no difference shown"


def test_few_processes_give_a_range_and_no_verdict():
    logs = np.array([[0, 0.7], [0, 0.71], [0, 0.69]])
    (interval,) = against_baseline(side_by_side(logs))
    assert interval.confidence is None and interval.word == "range"
    assert interval.verdict == "no difference shown" and math.isinf(interval.half_width)
    assert math.log(interval.low) == pytest.approx(0.69)
    assert math.log(interval.high) == pytest.approx(0.71)
    (interval,) = against_baseline(side_by_side(np.vstack([logs, [[0, 0.7]]])))
    assert interval.verdict == "slower" and interval.word == "98 % interval"


def test_two_processes_suffice_where_many_arms_share_a_variance():
    """In most of 20 runs: one arm in a hundred is taken for uneven by chance, and gets a range."""
    right = 0
    for _ in range(20):
        logs = new_generator().standard_normal((2, 8)) * 0.01
        logs[:, 1] += math.log(2)
        first = against_baseline(side_by_side(logs))[0]
        right += first.verdict == "slower" and first.freedom == 7
    assert right >= 15


@pytest.mark.parametrize(
    "low, high, verdict",
    [(0.9, 0.99, "faster"), (1.01, 1.1, "slower"), (0.9, 1.1, "no difference shown"),
     (1.0, 1.1, "no difference shown")],
)  # fmt: skip
def test_a_verdict_is_read_off_the_interval(low, high, verdict):
    assert Interval(1, 1.0, low, high, 0.98, 4, 3).verdict == verdict


def test_an_arm_that_was_never_measured_is_left_out():
    logs = np.random.default_rng(0).standard_normal((4, 4)) * 0.01
    logs[:, 2] = np.nan
    assert [interval.arm for interval in against_baseline(side_by_side(logs))] == [1, 3]
    assert {one.arm for one in against_best(side_by_side(logs))} == {0, 1, 3}


def test_hsu_by_hand():
    """Means 0, -0.5, -0.51 and -0.2, standard deviation of a process 0.02, four processes."""
    residuals = np.array([[1, -1, -1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [-1, -1, -1, -1]]).T
    logs = np.array([0, -0.5, -0.51, -0.2]) + residuals * 0.02
    fitted = side_by_side(logs)
    # Squared deviations within arms, less those of the blocks' means
    centred = logs - logs.mean(0) - logs.mean(1, keepdims=True) + logs.mean()
    error = math.sqrt((centred**2).sum() / 9 * 2 / 4)
    reach = critical(0.02, 3, 9, 0.5, sides=1) * error
    means = logs.mean(0)
    best = {one.arm: one for one in against_best(fitted, 0.02)}
    assert [arm for arm, one in best.items() if one.can_be_best] == [1, 2]
    assert math.log(best[2].low) == pytest.approx(means[2] - means[1] - reach)
    assert math.log(best[2].high) == pytest.approx(means[2] - means[1] + reach)
    assert math.log(best[3].high) == pytest.approx(means[3] - means[2] + reach)
    assert best[3].low == 1.0 and best[0].low == 1.0
    assert [one.arm for one in against_best(fitted, among=[0, 3]) if one.can_be_best] == [3]
    alone = against_best(fitted, among=[0, 3])
    assert {one.arm: one.high for one in alone}[3] == 1.0


def test_the_fastest_stays_among_the_candidates():
    """The least favourable case: all arms equal, so that any may be 'the fastest'."""
    generator, lost, trials = new_generator(), 0, 1500
    for _ in range(trials):
        best = against_best(side_by_side(generator.standard_normal((4, 6)) * 0.01), 0.05)
        lost += not best[2].can_be_best
    assert lost <= stats.binom.isf(1e-4, trials, 0.05)
    assert lost > 0.01 * trials  # not so wide as to say nothing


def test_without_degrees_of_freedom_any_arm_can_be_the_fastest():
    best = against_best(side_by_side(np.array([[0.0, 0.5, 0.7]])))
    assert [one.can_be_best for one in best] == [True] * 3 and best[0].high == math.inf


def test_the_smallest_correlation():
    assert smallest_correlation(np.array([[2.0, 1.0], [1.0, 2.0]])) == pytest.approx(0.5)
    assert smallest_correlation(np.array([[2.0, -1.0], [-1.0, 2.0]])) == 0
    assert smallest_correlation(np.array([[2.0]])) == 0
