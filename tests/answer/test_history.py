"""What replay --history concludes from speeds of different days, each relative to its own limit."""

import math

import numpy as np
import pytest
from scipy import stats

from quantbench.answer.history import change
from tests.seeds import new_generator


def is_shown(ratio):
    if ratio.low is None or ratio.low <= 1 <= ratio.high:
        return None
    return "slower" if ratio.low > 1 else "faster"


def test_a_change_between_days_is_welchs_t():
    generator = new_generator()
    now, then = np.exp(generator.standard_normal(6) * 0.01), np.exp(generator.standard_normal(9))
    interval = change(now, [then])
    welch = stats.ttest_ind(np.log(now), np.log(then), equal_var=False)
    ends = welch.confidence_interval(0.95)
    assert math.log(interval.low) == pytest.approx(ends.low)
    assert math.log(interval.high) == pytest.approx(ends.high)


def test_a_machine_that_slows_is_no_change_where_the_limit_slows_with_it():
    generator = np.random.default_rng(4)
    fast = [0.010 * bandwidth for bandwidth in 30e9 * (1 + 0.01 * generator.standard_normal(6))]
    slow = [0.020 * bandwidth for bandwidth in 15e9 * (1 + 0.01 * generator.standard_normal(6))]
    assert is_shown(change(slow, [fast])) is None
    regressed = [value * 1.1 for value in slow]
    assert is_shown(change(regressed, [fast])) == "slower"


def test_a_gate_does_not_fire_on_few_processes():
    few, many = [1.3, 1.3, 1.31], [1.0, 1.01, 0.99, 1.0, 1.0]
    for ratio in (change(few, [many]), change(many, [few])):
        assert ratio.low is None and is_shown(ratio) is None


def test_what_differs_from_day_to_day_is_added():
    """5 % between days and 1 % within one: a tenth is a change of two such days, and a common one
    of many."""
    generator = new_generator()
    days = [np.exp(generator.normal(level, 0.01, 6)) for level in generator.normal(0, 0.05, 200)]
    then = np.exp(generator.normal(0.0, 0.01, 10))
    now = np.exp(0.1) * then
    assert is_shown(change(now, [then])) == "slower"
    known = change(now, [*days, then])
    assert is_shown(known) is None
    assert math.log(known.high / known.low) / 2 == pytest.approx(1.97 * 2**0.5 * 0.05, rel=0.25)


def test_the_gate_seldom_fires_when_days_differ_and_their_scatter_is_known():
    generator, fired, trials = new_generator(), 0, 1000
    for _ in range(trials):
        days = generator.standard_normal(10) * 0.04
        runs = [np.exp(generator.normal(day, 0.01, 5)) for day in days]
        fired += is_shown(change(runs[9], runs[:9])) is not None
    assert fired <= stats.binom.isf(1e-4, trials, 0.06)  # 5 %, and Welch's t is no exact one
