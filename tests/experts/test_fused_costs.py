"""The fused step's cost model: constants from made-up steps, and what is expected from them; never
how long anything took."""

import time
from dataclasses import replace

import pytest

from quantbench.experts.costs import Decider
from quantbench.experts.fused_costs import (
    LEAST_LOSS,
    Measured,
    Rehearsed,
    _mean,
    _measured,
    _through,
)
from quantbench.experts.plan import Costs, Line
from quantbench.experts.store import POLICIES, Share, Turn

NONE = Share(0, 0)
FETCH = POLICIES["fetch"]
AHEAD = replace(FETCH, ahead=True)
COSTS = Costs(fast=Line(2, 1), slow=Line(20, 5), fetch=Line(40, 8), begin=Line(10, 1), ask=7)


def turn(here=NONE, late=NONE, there=NONE, begun=0, ahead=0, asked=(), started=100.0):
    return Turn(Share(*here), Share(*late), Share(*there), begun, ahead, asked, started)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        # Two are there and computed, 2 · 3, while one arrives, 48; then it is computed, 3.
        (turn((2, 2), (1, 1), begun=1), 7 + 48 + 3),
        # Computing what is there, and beginning to copy, 11, take longer than the copy.
        (turn((30, 30), (1, 1), begun=1), 7 + 90 + 11 + 3),
        # A guess is copied with it: both arrive together.
        (turn((2, 2), (1, 1), begun=1, ahead=1), 7 + 56 + 3),
        # Nothing is missing; what is guessed is asked for, 11, and not waited for.
        (turn((3, 3), ahead=1), 7 + 9 + 11),
        # It was asked for 30 seconds ago, and needs 48.
        (turn((2, 2), (1, 1), asked=[70.0]), 7 + 18 + 3),
        (turn((2, 2), (1, 1), asked=[10.0]), 7 + 6 + 3),  # it has long been there
        # … and nobody waits for what is asked for now, for the next layer.
        (turn((2, 2), (1, 1), ahead=1, asked=[10.0]), 7 + 6 + 11 + 3),
        # Behind a copy that takes 18 more, another takes 8.
        (turn((2, 2), (1, 1), begun=1, asked=[70.0]), 7 + 26 + 3),
        # What nobody waits for delays nothing.
        (turn((3, 3), asked=[99.0]), 7 + 9),
        # The processor computes in the slow tier, 25, before the copy of 48 has arrived.
        (turn((1, 1), (1, 1), (1, 1), begun=1), 7 + 48 + 3),
        (turn((1, 1), (1, 2), (2, 2), begun=1), 7 + 3 + 50 + 11 + 4),
    ],
)
def test_what_is_expected_of_a_turn_beside_copies(turn, expected):
    policy = replace(AHEAD, computes_there=True)
    assert Decider(COSTS, policy, fused=True).turn(turn) == expected


def test_what_is_expected_of_a_turn_without_overlap():
    costs = replace(COSTS, fetch=Line(0, 48), begin=Line(0, 0))
    decider = Decider(costs, FETCH, fused=True)
    assert decider.turn(turn((2, 2), (2, 2), begun=2)) == 7 + 4 * 3 + 2 * 48
    assert decider.resident(2, 2) == 6


def test_a_choice_sees_what_the_step_does():
    """One expert is on its way for long. The other one may be computed where it lies meanwhile, in
    25 seconds; to fetch it as well takes 8 more, and 3."""
    decider = Decider(COSTS, replace(AHEAD, computes_there=True), fused=True)
    there, _ = decider([1, 1], {0}, [time.perf_counter() + 1000], {0})
    assert there == {1}
    there, _ = replace(decider, costs=replace(COSTS, slow=Line(200, 0)))([1, 1], {0}, (), {0})
    assert there == set()


# ---------------------------------------------------------------------------------- constants


REST, AFTER = 40.0, 3.0  # seconds of a step without experts; longer for each turn that asks


class World:
    """A machine on which everything takes what COSTS says, and steps are as long as that gives."""

    def __init__(self, costs):
        self.costs = costs

    def step(self, way, missing):
        """A step of layers that miss so many of four experts each; what the op takes for them."""
        costs, turns, asking, begin, calm = self.costs, [], 0.0, 0.0, 0
        for count in missing:
            if not count:
                calm += 4
                continue
            each = turn((4 - count, 4 - count), (count, count), begun=count)
            copying = {"asked": 0, "waited": 0, "copied": costs.fetch.seconds(count)}[way]
            turns.append(each)
            asking += costs.ask + costs.fast.total(4, 4) + copying
            begin += costs.begin.seconds(count) if way == "copied" else 0
        computing = costs.fast.total(calm, calm)
        seconds = REST + AFTER * len(turns) + computing + asking
        return Rehearsed(seconds, Share(calm, calm), computing, turns, asking, begin)


@pytest.mark.parametrize("ahead", [True, False])
def test_the_constants_of_a_world_are_found_again(ahead):
    if ahead:
        costs = COSTS
    else:
        costs = replace(COSTS, fetch=Line(0, 48), begin=Line(0, 0))
    world, few, every = World(costs), [0, 1, 2, 1, 0], [4] * 5
    steps = {"calm": [world.step("asked", [0] * 5)] * 5}
    for way in ("asked", "waited", "copied"):
        steps[f"few {way}"] = [world.step(way, few)] * 5
        steps[f"all {way}"] = [world.step(way, every)] * 5
    by_modules = replace(COSTS, fast=Line(4, 2), fetch=Line(0, 1))
    measured = _measured(steps, by_modules, AHEAD if ahead else FETCH, layers=5)
    assert measured.lead == pytest.approx((REST + costs.fast.total(20, 20)) / 5)
    assert measured.after == pytest.approx(AFTER)
    found = measured.costs
    for name in ("fast", "fetch", "begin"):
        line, same = getattr(found, name), getattr(costs, name)
        assert (line.fixed, line.each) == pytest.approx((same.fixed, same.each)), name
    assert found.ask == pytest.approx(costs.ask)


def test_a_line_through_few_and_many():
    assert _through((1.5, 11.0), (4.0, 16.0)) == Line(8.0, 2.0)
    assert _through((1.5, 11.0), (4.0, 6.0)) == Line(11.0, 0.0)  # no part is below zero
    assert _through((2.0, 10.0), (4.0, 90.0)) == Line(0.0, 5.0)  # exact for a few
    assert _through((2.0, 10.0), (2.0, 10.0)) == Line(0.0, 5.0)


def test_a_step_that_was_held_up_counts_as_a_long_one():
    assert _mean([]) == 0
    assert _mean([1.0, 2.0, 3.0]) == 2
    assert _mean([1.0] * 9 + [1000.0]) == pytest.approx(1.7)


def test_the_price_of_guesses():
    prices = Measured(COSTS, lead=30.0, after=0.0).prices
    assert (prices.saving, prices.loss) == (48, LEAST_LOSS * 48)
    assert (prices.saving_alone, prices.asking) == (30, 7 + 11)
