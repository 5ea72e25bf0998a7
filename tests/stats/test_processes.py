"""The floor that processes put under every interval."""

import dataclasses

import numpy as np
import pytest

from quantbench.stats import Floor, Turns
from quantbench.stats.paired import contrast
from quantbench.stats.processes import updated
from tests.stats import test_arms


def session(generator, between, arms=3, cycles=200, noise=0.01, processes=2):
    """The baseline and arms as fast as it is, restarted together."""
    return test_arms.session(generator, (0.0,) * arms, cycles, noise, between, processes)


def floor_after(baseline, arms, prior=Floor()):  # noqa: B008
    return updated(prior, [contrast(arm, baseline) for arm in arms.values()])


def test_one_arm_by_hand():
    """Two segments that differ by 0.2, without noise: the difference has four processes in it, so
    one degree of freedom says 0.04 / 4 = 0.01, and a prior of 0.12² with four agrees: 0.01 / 0.0144
    is below AGREES. (4 × 0.0144 + 0.01) / 5 = 0.01352."""
    process = np.repeat([0, 1], 50)
    baseline = Turns(np.arange(100), process, np.ones(100))
    arm = Turns(np.arange(100), process, np.exp(0.2 * process))
    found = floor_after(baseline, {1: arm}, Floor(0.12, 4))
    assert found.deviation**2 == pytest.approx(0.01352) and found.freedom == pytest.approx(5)


def test_without_restarts_nothing_is_learned():
    alone = floor_after(*session(np.random.default_rng(6), 0.03, processes=1))
    for found, prior in ((alone, Floor()), (updated(Floor(0.02, 7), []), Floor(0.02, 7))):
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(prior))


def test_noisy_turns_teach_next_to_nothing():
    found = floor_after(*session(np.random.default_rng(7), 0.0, noise=0.5, cycles=40))
    assert found.freedom < 3.1 and found.deviation == pytest.approx(0.016, rel=0.1)


@pytest.mark.parametrize("between", [0.004, 0.015, 0.05])
def test_a_session_of_many_arms_teaches_what_processes_differ_by(between):
    """Two processes of 36 arms have 36 degrees of freedom, so that the estimate scatters by 12 %,
    and the prior has three."""
    found = floor_after(*session(np.random.default_rng(8), between, arms=36))
    expected = np.sqrt((36 * between**2 + 3 * Floor().deviation ** 2) / 39)
    assert found.deviation == pytest.approx(expected, rel=0.36)


def test_a_session_that_contradicts_the_prior_is_believed():
    """Pooled by degrees of freedom alone, 3 of 1.6 % and 3 of 8 % would be 5.8 %."""
    generator = np.random.default_rng(9)
    found = [floor_after(*session(generator, 0.08)).deviation for _ in range(100)]
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(0.08, rel=0.15)


def test_a_prior_that_is_contradicted_gives_its_degrees_of_freedom_up():
    """One arm that differs by 20 % and one degree of freedom: of the prior's three of 1.6 % nearly
    none are left, and what is left is measured. A session that agrees adds its own to the three."""
    process = np.repeat([0, 1], 50)
    baseline = Turns(np.arange(100), process, np.ones(100))
    found = floor_after(baseline, {1: Turns(np.arange(100), process, np.exp(0.2 * process))})
    assert found.freedom == pytest.approx(1, abs=0.1) and found.assumed < 0.1
    agrees = floor_after(baseline, {1: Turns(np.arange(100), process, np.exp(0.02 * process))})
    assert agrees.freedom == pytest.approx(4) and agrees.assumed == pytest.approx(0.75)


def test_only_the_baseline_restarts():
    """Its one difference is shared by all arms: not one degree of freedom for each of them."""
    baseline, arms = session(np.random.default_rng(10), 0.02, arms=5)
    kept = {arm: Turns(t.cycle, 0 * t.process, t.seconds) for arm, t in arms.items()}
    assert floor_after(baseline, kept).freedom <= 5.0001
