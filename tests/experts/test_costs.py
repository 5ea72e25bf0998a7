"""What is measured of an expert, and what is decided from it; never how long anything took."""

import dataclasses
import time

import pytest
import torch

from quantbench.experts.costs import Decider, _fetch, _line, _pending, measure
from quantbench.experts.plan import Costs, Line
from quantbench.experts.rehearsal import ratio_of
from quantbench.experts.store import POLICIES
from tests.experts.small import logits, tiered, whole


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ({1: 3.0, 4: 9.0, 16: 33.0}, Line(1.0, 2.0)),  # on a line
        ({1: 2.0, 4: 2.0, 16: 2.0}, Line(2.0, 0.0)),
        ({1: 1.0, 4: 4.0, 16: 16.0}, Line(0.0, 1.0)),
        ({1: 10.0, 4: 10.0, 16: 40.0}, Line(10 - 450 / 234, 450 / 234)),  # exact for one token
    ],
)
def test_a_line_through_seconds(seconds, line):
    found = _line(seconds)
    assert (found.fixed, found.each) == pytest.approx((line.fixed, line.each))


def test_no_part_of_a_line_is_below_zero():
    falling, steep = _line({1: 5.0, 4: 4.0, 16: 1.0}), _line({1: 0.1, 4: 4.0, 16: 40.0})
    assert falling == Line(5.0, 0.0)
    assert steep.fixed == 0 and steep.each > 0


def test_who_computes_follows_from_the_costs():
    near = Costs(fast=Line(1, 0), slow=Line(2, 0), fetch=Line(0, 3))
    far = Costs(fast=Line(1, 0), slow=Line(9, 0), fetch=Line(0, 3))
    tokens, fast = [1, 0, 2, 1], {3}
    auto = POLICIES["auto"]
    assert Decider(near, auto)(tokens, fast) == ({0, 2}, 2 + 2 + 1)
    assert Decider(far, auto)(tokens, fast) == (set(), 4 + 4 + 1)
    assert Decider(near, POLICIES["cache"])(tokens, fast) == (set(), 4 + 4 + 1)
    there = Decider(far, POLICIES["compute_there"])
    assert there(tokens, fast) == ({0, 2}, 9 + 9 + 1)
    ahead = dataclasses.replace(auto, ahead=True)
    # Two copies beside what is computed, and the last expert after them.
    assert Decider(far, ahead)(tokens, fast) == (set(), 3 + 3 + 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_two_processors_share_what_is_missing(ahead):
    """A CPU under a card computes one expert in 5 seconds, while the card fetches and computes the
    other one. One processor would take as long as it takes to fetch both."""
    costs = Costs(fast=Line(1, 0), slow=Line(5, 0), fetch=Line(0, 3))
    auto = dataclasses.replace(POLICIES["auto"], ahead=ahead)
    assert Decider(costs, auto)([1, 0, 2, 1], {3})[1] == (7 if ahead else 9)
    there, seconds = Decider(costs, auto, beneath=True)([1, 0, 2, 1], {3})
    assert (len(there), seconds) == (1, 5)


@pytest.mark.parametrize(
    ("turn", "fast", "ahead", "fetch"),
    [
        (8.0, 1.0, False, 3.0),  # two copies of 3 and two products of 1, in turn
        (7.0, 1.0, True, 3.0),  # two copies of 3, and the last product
        (7.0, 3.0, True, 1.0),  # a copy of 1, and then products of 3 without a pause
        (1.0, 1.0, False, 0.0),  # a turn that scattered
        (1.0, 1.0, True, 0.0),
    ],
)
def test_what_a_copy_takes_of_a_turn(turn, fast, ahead, fetch):
    assert _fetch(turn, fast, 2, ahead) == fetch


def test_how_long_copies_are_still_under_way():
    fetch = Line(0, 2)
    assert _pending([], fetch, 10.0) == 0
    assert _pending([1.0, 9.0], fetch, 10.0) == 1  # the first is done long since
    assert _pending([9.0, 9.5, 9.5], fetch, 10.0) == 5  # one after the other
    assert _pending([9.0, 9.5, 9.5], Line(1, 2), 10.0) == 6  # … and the first begins with 1 more
    assert _pending([1.0, 9.5, 9.5], Line(1, 2), 10.0) == 4.5  # the second does, when it begins
    near = Costs(fast=Line(1, 0), slow=Line(9, 0), fetch=Line(0, 5))
    ahead = dataclasses.replace(POLICIES["auto"], ahead=True)
    there, seconds = Decider(near, ahead)([1, 1], {0, 1}, [time.perf_counter() + 100])
    assert there == set() and seconds == pytest.approx(106, abs=1)  # the copy, and a product


def test_costs_times_a_factor():
    costs = Costs(fast=Line(1, 2), slow=Line(3, 4), fetch=Line(0, 5))
    assert costs.times(2) == Costs(fast=Line(2, 4), slow=Line(6, 8), fetch=Line(0, 10))


def test_costs_are_what_steps_of_the_model_take():
    """Steps that take three times what is expected of them, now and then twelve times."""
    model, tiers = tiered("tiny_moe", "int8wo", POLICIES["fetch"], None)
    tiers.hold([{0}, {1, 2}, set(), set(), {7}], 8)
    made_up = Costs(fast=Line(1, 0), slow=Line(2, 0), fetch=Line(0, 3))
    seen = []

    def step(tokens, positions):
        tiers.traffic.expected_seconds += 5
        tiers.traffic.expert_seconds += 15 if len(seen) % 3 else 60  # now and then a slow one
        seen.append(tokens)

    before = tiers.counted()
    assert ratio_of(tiers, made_up, model, step) == 3
    assert tiers.counted() == before and all(tokens.shape == (1, 1) for tokens in seen)


@pytest.mark.parametrize("over_disk", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_measuring_leaves_everything_as_it_was(policy, over_disk, tmp_path):
    expected = logits(whole("tiny_moe", "int8wo"))
    made = dataclasses.replace(POLICIES[policy], ahead=POLICIES[policy].fetches)
    model, tiers = tiered("tiny_moe", "int8wo", made, tmp_path if over_disk else None)
    tiers.hold([{0}, {1, 2}, set(), set(), {7}], 8)
    landing, traffic = list(tiers.landing), tiers.counted()
    with torch.no_grad():
        costs = measure(tiers, model)
    assert tiers.policy is made and tiers.decide is None
    assert tiers.landing == landing and tiers.counted() == traffic
    assert costs.fast.seconds(1) > 0 and costs.fetch.seconds(1) >= 0
    tiers.decide = Decider(costs, made)
    assert torch.equal(logits(model), expected)
    assert tiers.counted().expected_seconds > 0
