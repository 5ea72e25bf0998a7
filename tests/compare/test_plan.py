"""How many processes, how many looks, and that all looks together keep the level."""

import math

import numpy as np
import pytest

from quantbench.compare.figures.contrasts import Contrasts, fit
from quantbench.compare.figures.families import AgainstBest, Interval, against_best
from quantbench.compare.figures.plan import (
    Look,
    Plan,
    arms_to_drop,
    settled_arms,
    shown,
    wanted,
)

NO_DIFFERENCE = "no difference shown"


def fitted(blocks, effects=(0.0,), scatter=0.015, seed=None):
    """`blocks` whole blocks of arms with these log ratios; exact scatter where a seed is given."""
    generator = np.random.default_rng(seed)
    logs = generator.standard_normal((blocks, len(effects) + 1)) * scatter
    values = logs[:, 1:] - logs[:, :1] + effects
    arms = tuple(range(1, len(effects) + 1))
    weights = np.ones((blocks, len(effects), 1))
    return fit(Contrasts(arms, values, weights, np.zeros(len(effects) + 1)))


def interval(arm, ratio, reach, confidence=0.98):
    ends = ratio * math.exp(-reach), ratio * math.exp(reach)
    return Interval(arm, ratio, *ends, confidence, 4, 3)


def all_looks(plan, effects, scatter=0.015, seed=0):
    """Until the plan ends."""
    looks, blocks = [], plan.first_blocks
    while blocks is not None:
        data = fitted(blocks, effects, scatter, seed)
        looks.append(plan.look(looks, data))
        blocks = plan.next_blocks(looks, data)
    return looks


@pytest.mark.parametrize("candidates, blocks", [(1, 4), (2, 4), (3, 2), (7, 2), (32, 2)])
def test_the_first_look_has_degrees_of_freedom_for_an_interval(candidates, blocks):
    assert Plan(candidates, 16).first_blocks == blocks
    assert candidates * (blocks - 1) >= 3


@pytest.mark.parametrize("scatter", [0.001, 0.01, 0.03])
@pytest.mark.parametrize("candidates", [1, 7])
def test_all_looks_that_can_be_together_spend_no_more_than_the_level(candidates, scatter):
    """Planned looks, ten extensions, and an interruption after every block there may be."""
    plan = Plan(candidates, 16, level=0.02)
    looks = all_looks(plan, (0.0,) * candidates, scatter)
    assert [look.kind for look in looks][0] == "first"
    assert all(
        before.blocks < after.blocks for before, after in zip(looks, looks[1:], strict=False)
    )
    for more in range(10):
        looks.append(plan.look(looks, fitted(18 + 2 * more, (0.0,) * candidates, scatter)))
    assert looks[-1].kind == "extension"
    interruptions = [plan.interrupted(fitted(blocks)) for blocks in range(1, 50)]
    assert sum(look.level for look in [*looks, *interruptions]) <= 0.02
    assert all(0 < look.level for look in looks)


def test_thirty_percent_are_declared_at_the_first_look():
    looks = all_looks(Plan(1, 16), (math.log(1.3),))
    assert [(look.kind, look.blocks) for look in looks] == [("first", 4)]
    assert shown(looks)[1].verdict == "slower"


def test_near_one_the_run_goes_on_until_it_is_precise_or_the_budget_is_spent():
    looks = all_looks(Plan(1, 60), (0.0,), scatter=0.02)
    assert looks[-1].kind == "final" and looks[-1].blocks < 60
    assert shown(looks)[1].half_width < 0.025
    looks = all_looks(Plan(1, 8), (0.0,), scatter=0.05)
    assert (looks[-1].kind, looks[-1].blocks) == ("final", 8)
    assert shown(looks)[1].half_width > 0.02


def test_a_budget_below_the_first_look_is_one_final_look():
    looks = all_looks(Plan(1, 3), (0.0,))
    assert [(look.kind, look.blocks) for look in looks] == [("final", 3)]
    assert shown(looks)[1].word == "range"


def test_sizes_depend_on_scatter_and_not_on_ratios():
    near, far = (fitted(4, (effect,), 0.015, seed=5) for effect in (0.0, 0.12))
    plan = Plan(1, 200)
    assert plan.size(near, [1]) == plan.size(far, [1])
    assert plan.size(fitted(4, (0.0,), 0.03, seed=5), [1]) > 2 * plan.size(near, [1])


def test_size_makes_the_interval_as_narrow_as_asked():
    """For a scatter that is known, from 10000 blocks; 0.4 of the level is left for the end."""
    known = fitted(10000, (0.0,), 0.01)
    size = Plan(1, 10000, precision=0.02).size(known, [1])
    # sqrt(2) 1 % / sqrt(n) × t at 0.4 × 2 % = 0.8 %: n = 8: t(7) = 3.64 gives 1.8 %; 6: 2.5 %
    assert size == 8


def test_looks_at_even_blocks_so_that_orders_of_loading_balance():
    for seed in range(5):
        looks = all_looks(Plan(1, 40), (0.0,), 0.02, seed)
        assert looks and all(look.blocks % 2 == 0 for look in looks)


def test_a_run_that_was_interrupted_goes_on_as_planned():
    plan, data = Plan(1, 16), fitted(4, seed=1)
    first = plan.look([], data)
    stopped = plan.interrupted(fitted(5, seed=1))
    assert stopped.level < first.level
    assert plan.next_blocks([first, stopped], data) == plan.next_blocks([first], data)
    assert plan.look([first, stopped], fitted(6, (0.0,), 0.05)).kind == "middle"
    assert plan.next_blocks([stopped], fitted(2)) == 4


def test_a_run_that_ended_does_not_go_on_by_itself():
    plan = Plan(1, 8)
    looks = all_looks(plan, (0.0,), 0.05)
    assert plan.next_blocks(looks, fitted(8)) is None
    extended = plan.look(looks, fitted(24, (0.0,), 0.05))
    assert extended.kind == "extension" and extended.level < looks[-1].level / 5


@pytest.mark.parametrize(
    "ratio, expected", [(1.0, 0.02), (1.05, 0.02), (0.95, 0.02), (2.0, 0.149), (0.5, 0.149)]
)
def test_precision_is_relative_to_the_effect(ratio, expected):
    assert wanted(ratio, 0.02) == pytest.approx(expected, abs=1e-3)


def test_what_settles_an_arm():
    intervals = (
        interval(1, 1.0, 0.019),  # as narrow as asked
        interval(2, 1.0, 0.03),  # not
        interval(3, 1.4, 0.2),  # plainly slower, though wide
        interval(4, 1.1, 0.05),  # shown, but neither large nor precise
        interval(5, 1.4, 0.4),  # large, but not shown
        interval(6, 3.0, 0.2),  # a fifth of its effect
        interval(7, 1.4, 0.2, None),  # a range
    )
    looks = [Look("first", 4, 0.003, intervals)]
    assert settled_arms(looks, 0.02) == {1, 3, 6}
    beaten = [AgainstBest(arm, 1.0, 2.0, arm in (0, 1)) for arm in range(8)]
    assert arms_to_drop(looks, beaten, 0.02) == {3, 6}


def test_the_narrowest_interval_is_shown():
    wide, narrow = interval(1, 1.01, 0.2), interval(1, 1.03, 0.02)
    early, late = Look("first", 4, 0.003, (wide,)), Look("final", 12, 0.008, (narrow,))
    assert shown([early, late])[1] == narrow and shown([late, early])[1] == narrow
    nothing = interval(1, 1.0, 0.01, None)
    assert shown([Look("first", 1, 0.003, (nothing,))])[1] == nothing
    assert shown([Look("first", 1, 0.003, (nothing,)), late])[1] == narrow


def test_every_interval_of_a_run_is_named_by_the_runs_confidence():
    looks = all_looks(Plan(7, 16), (0.0,) * 7)
    assert {one.word for look in looks for one in look.intervals} == {"98 % interval"}


def test_a_clear_loser_is_dropped_and_its_interval_stays():
    effects = (0.0, math.log(2), -0.3)
    data = fitted(2, effects, 0.005, seed=2)
    plan = Plan(3, 16)
    looks = [plan.look([], data)]
    dropped = arms_to_drop(looks, against_best(data, looks[0].level), plan.precision)
    assert 2 in dropped and 3 not in dropped
    later = fitted(8, effects, 0.005, seed=2)
    looks.append(plan.look(looks, later))
    assert shown(looks)[2].verdict == "slower"
