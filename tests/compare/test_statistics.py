"""The statistics on rounds whose truth is known: how often they err, how often they find."""

import math

import numpy as np
import pytest

from compare import statistics
from compare.statistics import Estimate, estimate, is_look, paired, student, verdict

MOST_ROUNDS, PRECISION = 150, 0.02
TRIALS, POWER_TRIALS = 500, 150


def independent(generator, shape):
    return generator.standard_normal(shape)


def heavy_tailed(generator, shape):
    return generator.standard_t(3, shape)


def with_outliers(generator, shape):
    """One in ten is late by some thirty times the usual spread."""
    late = generator.random(shape) < 0.1
    return generator.standard_normal(shape) + late * generator.exponential(30, shape)


def skewed(generator, shape):
    return np.exp(generator.standard_normal(shape))


def autocorrelated(generator, shape):
    """AR(1) of 0.5, along the rounds."""
    values = generator.standard_normal(shape)
    for round in range(1, shape[-1]):
        values[..., round] = 0.5 * values[..., round - 1] + math.sqrt(0.75) * values[..., round]
    return values


def drifting(generator, shape):
    """A machine that slows by a tenth of the spread from sample to sample, and wanders besides;
    the two arms of a round are taken in a random order."""
    rounds = shape[-1]
    steps = generator.standard_normal((*shape[:-2], 2 * rounds)) * 0.5 + 0.1
    machine = np.cumsum(steps, -1)
    first = generator.random(rounds) < 0.5
    position = 2 * np.arange(rounds)
    arms = (machine[..., position + ~first], machine[..., position + first])
    return generator.standard_normal(shape) + np.stack(arms, -2)


NOISES = [independent, heavy_tailed, with_outliers, skewed, autocorrelated, drifting]


def runs(noise, ratio, count, spread=0.02):
    """Log ratios, (count, MOST_ROUNDS), of two arms whose true ratio is given."""
    generator = np.random.default_rng(NOISES.index(noise))
    arms = noise(generator, (count, 2, MOST_ROUNDS)) * spread
    return arms[:, 1] - arms[:, 0] + math.log(ratio)


def stopped(logs):
    """The rounds a real run would have taken."""
    for rounds in filter(is_look, range(MOST_ROUNDS)):
        if statistics.is_precise([estimate(logs[:rounds])], PRECISION):
            return logs[:rounds]
    return logs


@pytest.mark.parametrize("noise", NOISES)
def test_arms_that_are_alike_are_seldom_told_apart(noise):
    verdicts = [verdict(stopped(logs), least=0) for logs in runs(noise, 1, TRIALS)]
    assert sum(said != "no difference shown" for said in verdicts) <= 0.05 * TRIALS


@pytest.mark.parametrize("noise", NOISES)
def test_intervals_hold_the_truth_though_the_run_stops_by_them(noise):
    found = [estimate(stopped(logs)) for logs in runs(noise, 0.8, TRIALS // 2)]
    held = sum(one.low <= 0.8 <= one.high for one in found)
    # 95 % are promised; 250 trials of 92.5 % stay above 0.9 nineteen times in twenty
    assert held >= 0.9 * len(found)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("ratio, expected", [(1.05, "slower"), (0.95, "faster")])
def test_five_percent_are_found(noise, ratio, expected):
    verdicts = [verdict(stopped(logs)) for logs in runs(noise, ratio, POWER_TRIALS)]
    assert verdicts.count(expected) >= 0.9 * POWER_TRIALS
    assert set(verdicts) <= {expected, "no difference shown"}


@pytest.mark.parametrize("noise", [independent, autocorrelated])
def test_somebody_who_interrupts_at_the_best_moment_gains_little(noise):
    """Ending a run as soon as the verdict is a difference, at any look."""
    errors = 0
    for logs in runs(noise, 1, TRIALS // 2):
        looks = filter(is_look, range(MOST_ROUNDS))
        errors += any(
            verdict(logs[:rounds], looks=number, least=0) != "no difference shown"
            for number, rounds in enumerate(looks, 1)
        )
    assert errors <= 0.05 * (TRIALS // 2)


def test_many_candidates_share_the_errors():
    """One of ten is declared different in at most 5 % of the runs, though none is."""
    logs = runs(independent, 1, 10 * 100).reshape(100, 10, MOST_ROUNDS)[..., :20]
    wrong = [
        any(verdict(one, candidates=10, least=0) != "no difference shown" for one in arms)
        for arms in logs
    ]
    assert sum(wrong) <= 5


def test_less_than_the_least_difference_is_none():
    logs = np.random.default_rng(0).standard_normal(400) * 1e-4
    assert verdict(logs + math.log(1.005), least=0) == "slower"
    assert verdict(logs + math.log(1.005), least=0.01) == "no difference shown"
    assert verdict(logs + math.log(1.02), least=0.01) == "slower"
    assert verdict(logs - math.log(1.02), least=0.01) == "faster"


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4])
def test_few_rounds_show_nothing(rounds):
    logs = np.full(rounds, math.log(2.0)) + np.random.default_rng(1).standard_normal(rounds)
    assert verdict(logs) == "no difference shown"
    assert estimate(logs).high > 2


def test_rounds_that_are_all_the_same():
    """A clock too coarse to tell samples apart: an interval without width, and no failure."""
    found = estimate(np.full(20, math.log(0.5)))
    assert found.low == pytest.approx(0.5) and found.high == pytest.approx(0.5)


def test_pairs_are_made_by_round():
    target = {0: [2.0], 1: [3.0], 3: [8.0, 100.0, 8.0]}
    baseline = {0: [1.0], 2: [5.0], 3: [4.0, 4.0, 0.1]}
    assert paired(target, baseline) == pytest.approx([math.log(2), math.log(2)])
    assert len(paired(target, {})) == 0


def test_the_trimmed_mean_leaves_out_a_fifth_on_either_side():
    values = np.array([1e9, 3.0, 1.0, 2.0, -1e9])
    assert statistics.trimmed_mean(values) == pytest.approx(2.0)


def test_half_width_is_relative():
    found = Estimate(0.5, 0.5 / 1.02, 0.5 * 1.02, 30)
    assert found.half_width == pytest.approx(0.02)
    assert statistics.is_precise([found], 0.0201) and not statistics.is_precise([found], 0.0199)


@pytest.mark.parametrize(
    "probability, freedom, quantile",  # printed tables of Student's t
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 5, 2.571), (0.995, 7, 3.499),
     (0.995, 10, 3.169), (0.975, 30, 2.042), (0.975, 120, 1.980), (0.9995, 3, 12.924),
     (0.5, 4, 0.0), (0.025, 2, -4.303), (0.975, 10**6, 1.960)],
)  # fmt: skip
def test_student(probability, freedom, quantile):
    assert student(probability, freedom) == pytest.approx(quantile, abs=6e-4)


def test_looks_thin_out():
    looks = [rounds for rounds in range(200) if is_look(rounds)]
    assert looks[:6] == [10, 12, 14, 16, 19, 22]
    assert all(later - look <= look / 5 for look, later in zip(looks, looks[1:], strict=False))
    assert statistics.looks_until(9) == 0 and statistics.looks_until(16) == 4


def test_dependent_rounds_give_wider_intervals():
    generator = np.random.default_rng(3)
    alone = independent(generator, (100,)) * 0.02
    together = autocorrelated(generator, (50, 100)) * 0.02
    width = np.median([estimate(logs).half_width for logs in together])
    # the variance of an AR(1)'s mean is (1 + 0.5) / (1 - 0.5) = 3 times that of independent ones
    assert 1.3 < width / estimate(alone).half_width < 2.5
