"""Paired turns: against hand-worked examples and known long-run variances."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from quantbench.stats import Turns
from quantbench.stats.paired import contrast


def turns(logs, process=0, cycles=None):
    logs = np.asarray(logs, float)
    cycles = np.arange(len(logs)) if cycles is None else np.asarray(cycles)
    return Turns(cycles, np.broadcast_to(process, logs.shape), np.exp(logs))


def test_two_pairs_of_cycles_by_hand():
    """Log ratios 1, 1, 3, 3: pairs of 1 and 3, whose mean is 2. The variance of one cycle is twice
    that of a pair, 2 × 2; of single cycles it is 4/3. The product of neighbours is half of the
    squares and negative, -1/2 + 1/2: no correlation."""
    compared = contrast(turns([2, 2, 5, 5]), turns([1, 1, 2, 2]))
    assert compared.cycles == 4 and compared.freedom == 1
    assert compared.variance == pytest.approx(4)
    assert compared.noise == pytest.approx(math.sqrt(4 / 3))
    found = compared.estimate(floor=0.015)
    assert found.mean == pytest.approx(2) and found.error == pytest.approx(1)
    assert found.process_share == pytest.approx(2)


def test_what_differs_between_odd_and_even_cycles_is_no_noise():
    """Arms that stand early in A B C stand late in C B A: pairs have both."""
    logs = np.tile([0.3, -0.3], 40)
    assert contrast(turns(logs), turns(np.zeros(80))).variance == pytest.approx(0, abs=1e-20)


def test_states_as_long_as_the_session_leave_few_degrees_of_freedom():
    noise = np.random.default_rng(3).normal(0, 0.01, 800)
    quiet, moved = (
        contrast(turns(noise + shift * (np.arange(800) // 100 % 2)), turns(np.zeros(800)))
        for shift in (0.0, 0.1)
    )
    assert quiet.freedom >= 31 and moved.freedom < 16
    assert moved.variance > 50 * quiet.variance


def test_only_cycles_that_both_have_are_paired():
    baseline = turns([0, 10, 20, 30, 40], cycles=[0, 1, 2, 3, 4])
    arm = turns([11, 31, 99], cycles=[1, 3, 5])
    compared = contrast(arm, baseline)
    assert compared.cycles == 2 and compared.estimate(0.015).mean == pytest.approx(1)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_turns_without_a_logarithm_are_refused(wrong):
    seconds = np.array([1.0, wrong])
    arm = Turns(np.arange(2), np.zeros(2, int), seconds)
    with pytest.raises(ValueError, match="finite seconds above 0 are needed"):
        contrast(arm, turns([0, 0]))


def test_no_shared_cycle_has_an_infinite_error():
    compared = contrast(turns([0, 0], cycles=[0, 1]), turns([0, 0], cycles=[2, 3]))
    assert compared.cycles == 0 and compared.estimate(0.015).error == math.inf


def test_segments_weigh_by_cycles_while_noise_dominates_and_alike_once_processes_do():
    process = np.repeat([0, 1], [20, 180])
    logs = np.repeat([1.0, 3.0], [20, 180]) + np.random.default_rng(1).normal(0, 0.1, 200)
    compared = contrast(turns(logs, process), turns(np.zeros(200), process))
    assert compared.estimate(1e-9).mean == pytest.approx(logs.mean())
    alike = compared.estimate(10.0)
    means = logs[:20].mean(), logs[20:].mean()
    assert alike.mean == pytest.approx(np.mean(means), abs=1e-3)
    assert alike.process_share == pytest.approx(1, abs=1e-3)


def test_a_restart_of_either_side_begins_a_segment_and_adds_no_noise():
    """The logarithm jumps by 5 at the arm's restart and by -7 at the baseline's."""
    generator = np.random.default_rng(1)
    noise = generator.normal(0, 0.1, 300)
    arm = turns(noise + np.repeat([0, 5, 5], 100), np.repeat([0, 1, 1], 100))
    baseline = turns(np.repeat([0, 0, 7], 100), np.repeat([0, 0, 1], 100))
    compared = contrast(arm, baseline)
    assert [len(segment.logs) for segment in compared.segments] == [100, 100, 100]
    assert compared.noise == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.8])
def test_long_run_variance_of_an_autoregression(kept):
    """Of x[n] = kept x[n-1] + e[n] with variance 1 of e, it is 1 / (1 - kept)². 150 estimates of 20
    to 40 degrees of freedom have a mean with a standard error of 2 to 3 %; correlations count where
    they are shown, which lowers it where there are some and raises it where there are none."""
    generator = np.random.default_rng(2)
    found = []
    for _ in range(150):
        values = lfilter([1], [1, -kept], generator.normal(0, 1, 700))
        found.append(contrast(turns(values[100:]), turns(np.zeros(600))).variance)
    assert np.mean(found) * (1 - kept) ** 2 == pytest.approx(1.05, rel=0.15)
