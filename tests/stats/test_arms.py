"""Intervals, and the arms that may be the fastest."""

import dataclasses
import math

import numpy as np
import pytest

from quantbench.stats import Floor, Interval, Turns, best, intervals, ratios
from quantbench.stats.sequence import FIRST

FLOOR = Floor()


def session(generator, effects, cycles=100, noise=0.05, between=0.015, processes=2):
    """The baseline and arms with these log ratios, restarted together."""
    process = np.arange(cycles) * processes // cycles
    found = []
    for effect in (0.0, *effects):
        logs = effect + generator.normal(0, between, processes)[process]
        logs = logs + generator.normal(0, noise, cycles)
        found.append(Turns(np.arange(cycles), process, 0.01 * np.exp(logs)))
    return found[0], dict(enumerate(found[1:], start=1))


def test_an_exchange_of_arm_and_baseline_inverts_the_interval():
    baseline, arms = session(np.random.default_rng(12), (0.2,))
    found = intervals(baseline, arms, FLOOR)[1]
    inverse = intervals(arms[1], {1: baseline}, FLOOR)[1]
    ends = (1 / inverse.ratio, 1 / inverse.high, 1 / inverse.low)
    assert ends == pytest.approx((found.ratio, found.low, found.high))


def test_the_unit_of_seconds_does_not_matter_and_further_arms_widen():
    baseline, arms = session(np.random.default_rng(13), (0.1,) * 5, between=0.0)
    scaled = {arm: dataclasses.replace(t, seconds=1000 * t.seconds) for arm, t in arms.items()}
    inverse = dataclasses.replace(baseline, seconds=1000 * baseline.seconds)
    found = intervals(baseline, arms, FLOOR)
    assert intervals(inverse, scaled, FLOOR)[3].high == pytest.approx(found[3].high)
    assert intervals(baseline, {3: arms[3]}, FLOOR)[3].half_width < found[3].half_width


def test_the_half_width_ends_at_the_floor_of_processes():
    """By hand: two processes on either side have share 1; 1.96 of 1000 degrees of freedom."""
    drawn = np.random.default_rng(14)
    baseline, arms = session(drawn, (0.0,), cycles=4000, noise=0.01, between=0.0)
    found = intervals(baseline, arms, Floor(0.015, 1000))[1]
    assert found.floor == pytest.approx(1.962 * 0.015, rel=0.01)
    assert found.floor < math.log1p(found.half_width) < 1.05 * found.floor


def test_few_cycles_have_no_interval():
    drawn = np.random.default_rng(15)
    found = intervals(*session(drawn, (1.0,), cycles=FIRST - 1), FLOOR)[1]
    assert (found.low, found.high, found.half_width) == (0, math.inf, math.inf)
    assert found.verdict == "no difference shown" and found.nearer == 1
    baseline, arms = session(drawn, (-2.0, 2.0), cycles=FIRST - 1)
    assert best(baseline, arms, FLOOR, among={0, 1, 2}) == {0, 1, 2}  # any may be the fastest


@pytest.mark.parametrize(
    ("ratio", "nearer", "verdict"),
    [(0.5, 0.55, "faster"), (1.05, 1.0, "no difference shown"), (2.2, 2.0, "slower")],
)
def test_the_nearer_end(ratio, nearer, verdict):
    found = Interval(ratio, ratio / 1.1, ratio * 1.1, 100, 2, 0.05, 0.0)
    assert (found.nearer, found.verdict) == (pytest.approx(nearer), verdict)


def test_arms_of_different_groups_are_compared_through_the_baseline():
    baseline, arms = session(np.random.default_rng(17), (-0.5, 0.0), cycles=200)
    groups = {
        arm: Turns(t.cycle[arm % 2 :: 2], t.process[arm % 2 :: 2], t.seconds[arm % 2 :: 2])
        for arm, t in arms.items()
    }
    assert not set(groups[1].cycle) & set(groups[2].cycle)
    assert best(baseline, groups, FLOOR, among={1, 2}) == {1}
    assert best(baseline, groups, FLOOR, among={0, 2}) == {0, 2}
    assert best(baseline, groups, FLOOR, among={2}) == {2}


# ----------------------------------------------------------------------------- ratios, from outside


def table(seed=20, cycles=60, effects=(0.0, 0.1, -0.2), processes=2):
    baseline, arms = session(np.random.default_rng(seed), effects[1:], cycles, processes=processes)
    return np.stack([baseline.seconds, *(arm.seconds for arm in arms.values())], 1), baseline


def test_ratios_are_the_intervals_of_turns():
    seconds, baseline = table()
    found = ratios(seconds, baseline.process)
    turns = [Turns(baseline.cycle, baseline.process, column) for column in seconds.T]
    assert found == list(intervals(turns[0], dict(enumerate(turns[1:], 1)), FLOOR).values())
    assert [one.low < true < one.high for one, true in zip(found, np.exp([0.1, -0.2]), strict=True)]


def test_a_turn_that_is_missing_leaves_out_its_cycle_for_that_arm():
    seconds, baseline = table()
    seconds[3:9, 2] = np.nan
    seconds[20, 0] = np.nan
    assert [one.cycles for one in ratios(seconds, baseline.process)] == [59, 53]
    alone = np.delete(seconds, [*range(3, 9), 20], axis=0)
    kept = np.delete(baseline.process, [*range(3, 9), 20])
    assert ratios(seconds[:, [0, 2]], baseline.process) == ratios(alone[:, [0, 2]], kept)


@pytest.mark.parametrize("cycles", [0, 1, 2, FIRST - 1])
def test_too_few_cycles_leave_the_interval_open(cycles):
    seconds, baseline = table()
    for one in ratios(seconds[:cycles], baseline.process[:cycles]):
        assert (one.low, one.high, one.cycles) == (0, math.inf, cycles)
        assert math.isnan(one.ratio) == (cycles == 0)


def test_one_arm_one_process_no_scatter_and_names_of_processes():
    seconds, baseline = table()
    assert ratios(seconds[:, :1], baseline.process) == []
    one = ratios(seconds)[0]
    assert one.assumed == 1 and one.processes == 1
    constant = ratios(np.ones((60, 2)), baseline.process)[0]
    assert constant.ratio == 1 and constant.low < 0.97 and constant.high > 1.03
    renamed = ratios(seconds, 7 - 9 * baseline.process)
    assert [(a.low, a.high) for a in renamed] == [
        pytest.approx((b.low, b.high)) for b in ratios(seconds, baseline.process)
    ]


@pytest.mark.parametrize(
    ("seconds", "process", "words"),
    [
        (np.ones(5), None, r"seconds is \(cycles, arms\); given: \(5,\)"),
        (np.ones((5, 0)), None, r"given: \(5, 0\)"),
        (np.ones((5, 2)), np.zeros(4), r"a number for each of 5 cycles; given: \(4,\)"),
        (np.zeros((5, 2)), None, "finite seconds above 0 are needed"),
        (np.full((5, 2), math.inf), None, "finite seconds above 0 are needed"),
    ],
)
def test_what_ratios_refuse(seconds, process, words):
    with pytest.raises(ValueError, match=words):
        ratios(seconds, process)


def test_an_interval_narrows_towards_the_end_of_the_session():
    baseline, arms = session(np.random.default_rng(21), (0.0,))
    widths = [intervals(baseline, arms, FLOOR, spent=s)[1].half_width for s in (0.2, None, 1.0)]
    assert widths == sorted(widths, reverse=True)
