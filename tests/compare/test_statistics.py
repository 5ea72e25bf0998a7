"""The statistics on rounds whose truth is known: how often they err, how often they find."""

import functools
import math

import numpy as np
import pytest

from compare.figures import statistics
from compare.figures.statistics import Estimate, estimate, is_look, paired, student, verdict

PROCESSES, EACH, PRECISION = 10, 10, 0.02
MOST_ROUNDS = PROCESSES * EACH
TRIALS = 200


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
# Two processes of one arm differ, by as much as docs/LOG.md says, by less or by more; every other
# time the arms are loaded in the opposite order, which tells.
BETWEEN = [0, 0.02, 0.03]
# Or by 2 %, and one process in twenty by 40 more, one way or the other, for as long as it lives.
LONELY = "lonely"
ORDER = 0.01


def runs(noise, ratio, count, between=0.02, spread=0.02):
    """`count` lists of processes' log ratios, of two arms whose true ratio is given."""
    lonely, between = between == LONELY, 0.02 if between == LONELY else between
    generator = np.random.default_rng(NOISES.index(noise))
    arms = noise(generator, (count, 2, MOST_ROUNDS)) * spread
    logs = (arms[:, 1] - arms[:, 0] + math.log(ratio)).reshape(count, PROCESSES, EACH)
    logs += generator.standard_normal((count, PROCESSES, 1)) * between
    if lonely:
        slow = generator.random((count, PROCESSES, 1)) < 0.05
        logs += slow * generator.choice([-0.4, 0.4], slow.shape)
    if between:
        logs += ORDER * (-1) ** np.arange(PROCESSES)[:, None]
    return [list(processes) for processes in logs]


def looks():
    """How many whole processes there are when widths are looked at."""
    found = [n // EACH for n in range(EACH, MOST_ROUNDS + 1) if is_look(n, EACH, PROCESSES)]
    assert found == [2, 4, 6, 8, 10]
    return found


@functools.cache
def stopped(noise, between):
    """What real runs of equal arms would have stopped with; the ratio does not change where."""
    found = []
    for logs in runs(noise, 1, TRIALS, between):
        precise = (
            logs[:count]
            for count in looks()
            if statistics.is_precise([estimate(logs[:count])], PRECISION)
        )
        found.append(next(precise, logs))
    return found


@pytest.mark.parametrize("between", [*BETWEEN, LONELY])
@pytest.mark.parametrize("noise", NOISES)
def test_arms_that_are_alike_are_seldom_told_apart(noise, between):
    verdicts = [verdict(logs) for logs in stopped(noise, between)]
    assert sum(said != "no difference shown" for said in verdicts) <= 0.05 * TRIALS


@pytest.mark.parametrize("between", [*BETWEEN, LONELY])
@pytest.mark.parametrize("noise", NOISES)
def test_intervals_hold_the_truth_though_the_run_stops_by_them(noise, between):
    found = [estimate(logs) for logs in stopped(noise, between)]
    # 95 % are promised; 200 trials of 93 % stay above 0.9 nineteen times in twenty
    assert sum(one.low <= 1 <= one.high for one in found) >= 0.9 * len(found)


@pytest.mark.parametrize("between", [statistics.BETWEEN_PROCESSES, LONELY])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("ratio, expected", [(1.05, "slower"), (0.95, "faster")])
def test_five_percent_are_found(noise, ratio, expected, between):
    verdicts = [
        verdict([one + math.log(ratio) for one in logs]) for logs in stopped(noise, between)
    ]
    assert verdicts.count(expected) >= 0.9 * TRIALS
    assert set(verdicts) <= {expected, "no difference shown"}


@pytest.mark.parametrize("noise", [independent, autocorrelated])
def test_somebody_who_interrupts_at_the_best_moment_gains_little(noise):
    """Ending a run as soon as the verdict is a difference, after any round of any process."""
    errors = 0
    for logs in runs(noise, 1, TRIALS // 3):
        seen = [[*logs[:n], logs[n][:m]] for n in range(5) for m in range(1, EACH + 1)]
        errors += any(verdict(some, interrupted=True) != "no difference shown" for some in seen)
    assert errors <= 0.05 * (TRIALS // 3)


def test_a_process_that_was_disturbed_counts_little():
    generator = np.random.default_rng(5)
    logs = [generator.standard_normal(10) * 0.01 + math.log(1.05) for _ in range(8)]
    logs[3] = generator.standard_normal(10) * 0.4 - 0.15
    found = estimate(logs)
    assert found.ratio == pytest.approx(1.05, abs=0.01) and found.half_width < 0.023
    assert verdict(logs) == "slower"


def test_a_process_that_was_cut_short_counts_little():
    generator = np.random.default_rng(6)
    logs = [generator.standard_normal(10) * 0.1 for _ in range(4)]
    means = [float(statistics.trimmed_mean(one)) for one in logs]
    found = estimate([*logs, np.array([1.0])])
    # a round of 0.1 against processes of ten: it weighs some 1 / 8 of one of the four
    assert np.mean(means) < math.log(found.ratio) < np.mean([*means, 1.0]) / 2


def test_many_candidates_share_the_errors():
    """One of ten is declared different in at most 5 % of the runs, though none is."""
    logs = runs(independent, 1, 10 * 100)
    wrong = [
        any(
            verdict(one[:4], candidates=10) != "no difference shown"
            for one in logs[start : start + 10]
        )
        for start in range(0, len(logs), 10)
    ]
    assert sum(wrong) <= 5


def test_one_process_an_arm_shows_little_however_many_rounds():
    logs = np.random.default_rng(0).standard_normal(400) * 1e-4
    assert verdict([logs + math.log(1.05)]) == "no difference shown"
    assert verdict([logs + math.log(1.15)]) == "slower"
    processes = np.split(logs, 10)
    assert verdict([one + math.log(1.03) for one in processes]) == "slower"
    assert verdict([one - math.log(1.03) for one in processes]) == "faster"
    assert verdict([one + math.log(1.005) for one in processes]) == "no difference shown"


def test_the_error_by_hand():
    """Four processes of means 0.01, 0.03, -0.02 and 0.02, no difference between rounds."""
    means = [0.01, 0.03, -0.02, 0.02]
    found = estimate([np.full(10, mean) for mean in means])
    # the mean is 0.01; squares of the rest add up to 0 + 4 + 9 + 1 = 14e-4, over 3 degrees of
    # freedom; 3 more expect 4e-4 each: (14 + 12) / 6 = 4.333e-4 a process, a quarter for the mean;
    # Student's t at 97.5 % and 6 degrees of freedom is 2.447
    reach = 2.447 * math.sqrt(26e-4 / 6 / 4)
    assert math.log(found.ratio) == pytest.approx(0.01)
    assert math.log(found.high) == pytest.approx(0.01 + reach, rel=1e-3)
    assert math.log(found.low) == pytest.approx(0.01 - reach, rel=1e-3)


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4])
def test_few_rounds_show_nothing(rounds):
    logs = np.full(rounds, math.log(2.0)) + np.random.default_rng(1).standard_normal(rounds)
    assert verdict([logs]) == "no difference shown"
    assert estimate([logs]).high > 2 and estimate([logs][:rounds]).rounds == rounds


def test_a_few_turns_show_what_is_plain():
    """Arms loaded in turn have one round a process."""
    turns = [np.array([math.log(ratio)]) for ratio in (0.54, 0.5, 0.56)]
    assert verdict(turns) == "faster" and verdict(turns[:2]) == "no difference shown"


def test_rounds_that_are_all_the_same():
    """A clock too coarse to tell samples apart: what processes differ by remains."""
    found = estimate([np.full(10, math.log(0.5))] * 4)
    assert found.ratio == pytest.approx(0.5) and 0.005 < found.half_width < 0.03


def test_pairs_are_made_by_round():
    target = {(0, 0): [2.0], (0, 1): [3.0], (1, 3): [8.0, 100.0, 8.0]}
    baseline = {(0, 0): [1.0], (1, 2): [5.0], (1, 3): [4.0, 4.0, 0.1]}
    assert paired(target, baseline) == [pytest.approx([math.log(2)])] * 2
    assert paired(target, {}) == []


def test_the_trimmed_mean_leaves_out_three_tenths_on_either_side():
    values = np.array([1e9, 3.0, 1.0, 2.0, -1e9, 4.0, 1e8, 1e7, -1e8, -1e7])
    assert statistics.trimmed_mean(values) == pytest.approx(2.5)


def test_a_step_that_was_halted_does_not_count():
    assert statistics.typical([1.0] * 18 + [30.0, 0.1]) == pytest.approx(1.0)
    assert statistics.typical([1.0, 2.0, 6.0]) == pytest.approx(3.0)  # too few to leave any out
    # what slows a step in five is the arm's own
    assert statistics.typical([1.0, 1.0, 1.0, 1.0, 5.0] * 4) > 1.4


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
    after = [rounds for rounds in range(200) if is_look(rounds, 10, 2)]
    assert after[:6] == [20, 24, 28, 33, 39, 46]
    assert [rounds for rounds in range(20) if is_look(rounds, 10, 1)] == [10, 12, 14, 16, 19]
    assert [rounds for rounds in range(8) if is_look(rounds, 1, 6)] == [2, 4, 6]
    assert not is_look(0, 10, 1)


def test_dependent_rounds_give_wider_intervals():
    """Of one process, whose rounds are all there is to learn from."""
    generator = np.random.default_rng(3)
    alone = statistics.bootstrapped(independent(generator, (100,)))[0]
    together = [statistics.bootstrapped(logs)[0] for logs in autocorrelated(generator, (50, 100))]
    # the variance of an AR(1)'s mean is (1 + 0.5) / (1 - 0.5) = 3 times that of independent ones
    assert 1.3 < np.median(together) / alone < 2.5
