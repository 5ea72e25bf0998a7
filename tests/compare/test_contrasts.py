"""Seconds per token of processes, and least squares over blocks of processes."""

import math

import numpy as np
import pytest
from scipy import stats

from quantbench.compare.figures.contrasts import (
    Contrasts,
    ProcessTiming,
    SampleTimes,
    contrasts,
    fit,
    interpolation,
    process_timing,
    with_bandwidth,
)
from tests.seeds import new_generator


def timing(arm, block, seconds, time=0.0, variance=0.0, typical=None):
    return ProcessTiming(arm, block, time, seconds, typical or seconds, variance)


def complete(values, noise=None):
    """Contrasts of arms side by side, from the logarithms (P, J + 1), baseline first."""
    arms = values.shape[1] - 1
    noise = np.zeros(arms + 1) if noise is None else noise
    weights = np.ones((len(values), arms, 1))
    return Contrasts(tuple(range(1, arms + 1)), values[:, 1:] - values[:, :1], weights, noise)


def test_seconds_per_token_are_those_of_whole_samples():
    samples = [
        SampleTimes(0.5, [0.1, 0.1, 0.1, 0.9], started=10.0),
        SampleTimes(0.7, [0.1, 0.1, 0.1, 0.1], started=20.0),
    ]
    process = process_timing(2, 3, samples)
    assert process.seconds_per_token == pytest.approx((0.5 + 1.2 + 0.7 + 0.4) / 10)
    assert process.typical_step == pytest.approx(0.1)
    assert (process.arm, process.block, process.time) == (2, 3, 15.0)
    # samples of 1.7 and 1.1 s: variance of their mean 0.18 / 2, relative to 1.4 s squared
    assert process.relative_variance == pytest.approx(0.18 / 2 / 1.4**2)


def test_one_sample_tells_no_variance_and_one_token_has_no_step():
    process = process_timing(0, 0, [SampleTimes(0.5, [])])
    assert math.isnan(process.relative_variance)
    assert process.seconds_per_token == process.typical_step == 0.5


@pytest.mark.parametrize("samples", [[], [SampleTimes(0.0, [])], [SampleTimes(1.0, [-2.0])]])
def test_samples_that_cannot_be_are_refused(samples):
    with pytest.raises(ValueError, match="arm 1, block 0: .* needed"):
        process_timing(1, 0, samples)


def test_two_arms_are_the_paired_t_test():
    logs = new_generator().standard_normal((6, 2)) * 0.02
    fitted = fit(complete(logs))
    paired = stats.ttest_rel(logs[:, 1], logs[:, 0])
    assert fitted.log_ratios[0] == pytest.approx(np.mean(logs[:, 1] - logs[:, 0]))
    assert fitted.log_ratios[0] / fitted.standard_errors[0] == pytest.approx(paired.statistic)
    assert fitted.freedom[0] == paired.df == 5


@pytest.mark.parametrize("missing", [(), ((0, 1),), ((2, 3), (3, 3), (4, 2), (4, 3))])
def test_many_arms_are_least_squares_with_block_effects(missing):
    """Against ordinary least squares on the logarithms themselves, a dummy for each block."""
    generator = new_generator()
    blocks, arms = 5, 4
    logs = generator.standard_normal((blocks, arms)) * 0.02 + generator.standard_normal((blocks, 1))
    for cell in missing:
        logs[cell] = np.nan
    rows, observed = [], []
    for block in range(blocks):
        for arm in range(arms):
            if np.isfinite(logs[block, arm]):
                arm_dummies = np.eye(arms)[arm][1:]
                rows.append(np.concatenate([np.eye(blocks)[block], arm_dummies]))
                observed.append(logs[block, arm])
    design, observed = np.array(rows), np.array(observed)
    inverse = np.linalg.inv(design.T @ design)
    solution = inverse @ design.T @ observed
    freedom = len(observed) - design.shape[1]
    scale = ((observed - design @ solution) ** 2).sum() / freedom
    fitted = fit(complete(logs))
    assert fitted.log_ratios == pytest.approx(solution[blocks:])
    if not fitted.uneven.any():
        assert set(fitted.freedom) == {freedom}
    assert fitted.covariance == pytest.approx(inverse[blocks:, blocks:] * scale)
    assert fitted.scatter == pytest.approx(math.sqrt(scale))


def test_drift_between_the_baselines_of_a_turn_cancels():
    """Twice A B A C A while the machine slows by a thousandth a second: B 1.5, C 0.8."""
    timings, ratios = [], {0: 1.0, 1: 1.5, 2: 0.8}
    for block in range(2):
        for place, arm in enumerate([0, 1, 0, 2, 0]):
            time = 100.0 * block + [0, 13, 20, 31, 50][place]
            timings.append(timing(arm, block, ratios[arm] * math.exp(0.001 * time), time))
    turns = contrasts(timings)
    assert turns.arms == (1, 2) and turns.weights.shape == (2, 2, 3)
    assert turns.values == pytest.approx(np.log([[1.5, 0.8], [1.5, 0.8]]))
    assert turns.weights[0, 0] == pytest.approx([7 / 20, 13 / 20, 0])
    assert fit(turns).log_ratios == pytest.approx(np.log([1.5, 0.8]))


def test_a_shared_baseline_correlates_the_arms():
    """A B A C A: B and C lie in the middle of their baselines and share one."""
    turns = Contrasts(
        (1, 2),
        new_generator().standard_normal((6, 2)),
        np.broadcast_to([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]], (6, 2, 3)),
        np.zeros(3),
    )
    covariance = fit(turns).covariance
    assert covariance[0, 1] / covariance[0, 0] == pytest.approx(0.25 / 1.5)


@pytest.mark.parametrize(
    "time, weights", [(-1, [1, 0, 0]), (0, [1, 0, 0]), (3, [0.25, 0.75, 0]), (9, [0, 0, 1])]
)
def test_interpolation(time, weights):
    assert interpolation([0, 4, 8], time) == pytest.approx(weights)


def test_blocks_without_a_baseline_are_left_out_and_absent_arms_are_nan():
    timings = [timing(0, 0, 1.0), timing(1, 0, 2.0), timing(2, 0, 3.0)]
    timings += [timing(1, 1, 2.0), timing(0, 2, 1.0), timing(2, 2, 3.0)]
    values = contrasts(timings).values
    assert values == pytest.approx(np.log([[2, 3], [np.nan, 3]]), nan_ok=True)


def test_nothing_is_assumed_about_the_scatter():
    one = fit(complete(np.zeros((1, 2)) + [0.0, 0.3]))
    assert one.log_ratios[0] == pytest.approx(0.3)
    assert math.isinf(one.standard_errors[0]) and one.freedom[0] == 0
    assert math.isnan(one.scatter)
    same = fit(complete(np.zeros((5, 2)) + [0.0, 0.3]))
    assert same.standard_errors[0] < 1e-12 and same.scatter < 1e-12


def test_an_arm_whose_samples_scatter_has_a_wider_interval_than_the_others():
    logs = np.random.default_rng(1).standard_normal((4, 5)) * 1e-3
    plain = fit(complete(logs, np.full(5, 1e-6)))
    noisy = fit(complete(logs, np.array([1e-6, 1e-6, 9e-6, 1e-6, 1e-6])))
    assert plain.standard_errors == pytest.approx(plain.standard_errors[0])
    assert noisy.standard_errors[1] > 1.5 * noisy.standard_errors[0]
    assert noisy.log_ratios == pytest.approx(plain.log_ratios)  # weighs no process differently


@pytest.mark.parametrize("unlike, expected", [(3, [False, False, True, False]), (0, [True] * 4)])
def test_an_arm_that_scatters_grossly_is_judged_by_itself(unlike, expected):
    """At the test's level of 1 % another arm is taken for uneven now and then: most of 20 runs."""
    right = 0
    for _ in range(20):
        logs = new_generator().standard_normal((8, 5)) * 0.01
        logs[:, unlike] *= 20
        fitted = fit(complete(logs))
        right += list(fitted.uneven) == expected
        own = (logs[:, 3] - logs[:, 0]).std(ddof=1) / math.sqrt(8)
        if fitted.uneven[2]:
            assert fitted.standard_errors[2] == pytest.approx(own) and fitted.freedom[2] == 7
    assert right >= 15


def test_trials_can_be_stacked():
    stacked = new_generator().standard_normal((3, 4, 5, 2)) * 0.01
    weights, noise = np.ones((5, 2, 1)), np.array([1e-5, 2e-5, 3e-5])
    together = fit(Contrasts((1, 2), stacked, weights, noise))
    alone = fit(Contrasts((1, 2), stacked[2, 3], weights, noise))
    assert together.standard_errors[2, 3] == pytest.approx(alone.standard_errors)
    assert together.log_ratios[2, 3] == pytest.approx(alone.log_ratios)


def with_speed(slope, generator, blocks=12):
    speed = generator.standard_normal((blocks, 2)) * 0.05
    values = 0.1 + slope * speed + generator.standard_normal((blocks, 2)) * 0.005
    return Contrasts((1, 2), values, np.ones((blocks, 2, 1)), np.zeros(3), speed)


def test_a_bandwidth_reading_that_explains_scatter_is_used():
    turns = with_speed(-0.8, new_generator())
    fitted = fit(turns)
    plain = fit(Contrasts(turns.arms, turns.values, turns.weights, turns.noise))
    assert fitted.slope == pytest.approx(-0.8, abs=0.15)
    assert fitted.standard_errors[0] < plain.standard_errors[0] / 2
    assert fitted.log_ratios == pytest.approx([0.1, 0.1], abs=0.02)


def test_a_bandwidth_reading_that_explains_nothing_is_not():
    kept = sum(fit(with_speed(0.0, new_generator())).slope is not None for _ in range(300))
    assert kept <= stats.binom.isf(1e-4, 300, 0.01)


def test_readings_enter_as_the_same_contrast():
    """A B A, the reading beside B 10 % below the mean of the two beside A (in logarithms)."""
    timings = []
    for block in range(2):
        for place, (arm, reading) in enumerate([(0, 20e9), (1, 18e9), (0, 20e9)]):
            sample = SampleTimes(1.0, [1.0], 10.0 * place)
            timings.append(process_timing(arm, block, [sample], reading))
    assert with_bandwidth(timings).speed == pytest.approx(np.log([[0.9], [0.9]]))
    assert with_bandwidth([timing(0, 0, 1.0), timing(1, 0, 2.0)]).speed is None


def test_a_run_of_which_nothing_is_known_yet():
    empty = fit(contrasts([timing(1, 0, 1.0), timing(2, 0, 1.0)]))
    assert list(empty.blocks) == [0, 0] and np.isnan(empty.log_ratios).all()
