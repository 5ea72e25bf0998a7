"""What replay --history concludes from speeds of different days, each relative to its own limit."""

import math

import numpy as np
import pytest
from scipy import stats

from quantbench.answer.history import change, day_scatter, level
from quantbench.quality.block_errors import Estimate
from tests.seeds import new_generator


def is_shown(ratio):
    if ratio.confidence is None or ratio.low <= 1 <= ratio.high:
        return None
    return "slower" if ratio.low > 1 else "faster"


def test_a_change_between_days_is_welchs_t():
    generator = new_generator()
    now, then = np.exp(generator.standard_normal(6) * 0.01), np.exp(generator.standard_normal(9))
    interval = change(level(now.tolist()), level(then.tolist()))
    welch = stats.ttest_ind(np.log(now), np.log(then), equal_var=False)
    ends = welch.confidence_interval(0.95)
    assert math.log(interval.low) == pytest.approx(ends.low)
    assert math.log(interval.high) == pytest.approx(ends.high)


def test_a_machine_that_slows_is_no_change_where_the_limit_slows_with_it():
    generator = np.random.default_rng(4)
    fast = [0.010 * bandwidth for bandwidth in 30e9 * (1 + 0.01 * generator.standard_normal(6))]
    slow = [0.020 * bandwidth for bandwidth in 15e9 * (1 + 0.01 * generator.standard_normal(6))]
    assert is_shown(change(level(slow), level(fast))) is None
    regressed = [value * 1.1 for value in slow]
    assert is_shown(change(level(regressed), level(fast))) == "slower"


def test_a_gate_does_not_fire_on_few_processes():
    few, many = level([1.3, 1.3, 1.31]), level([1.0, 1.01, 0.99, 1.0, 1.0])
    for ratio in (change(few, many), change(many, few)):
        assert ratio.confidence is None and is_shown(ratio) is None
    with pytest.raises(ValueError, match="0 values"):
        level([])
    with pytest.raises(ValueError, match="above 0"):
        level([1.0, 0.0])


def test_what_differs_from_day_to_day_is_added():
    generator = new_generator()
    days = [Estimate(generator.standard_normal() * 0.05, 0.01, 5) for _ in range(200)]
    # what scatters beyond 1 % of each day's own; 200 days tell it to 5 %
    scatter = day_scatter(days)
    assert scatter.standard_error == pytest.approx(math.sqrt(0.05**2 - 0.01**2), rel=0.25)
    now, then = Estimate(0.1, 0.005, 9), Estimate(0.0, 0.005, 9)
    assert is_shown(change(now, then)) == "slower"
    assert is_shown(change(now, then, days=scatter)) is None
    with pytest.raises(ValueError, match="3 days"):
        day_scatter(days[:3])


def test_the_gate_seldom_fires_when_days_differ_and_their_scatter_is_known():
    generator, fired, trials = new_generator(), 0, 1000
    for _ in range(trials):
        days = generator.standard_normal(10) * 0.04
        runs = [level(np.exp(day + generator.standard_normal(5) * 0.01).tolist()) for day in days]
        known = day_scatter(runs[:8])
        fired += is_shown(change(runs[8], runs[9], known)) is not None
    assert fired <= stats.binom.isf(1e-4, trials, 0.06)  # 5 %, and Welch's t is no exact one
