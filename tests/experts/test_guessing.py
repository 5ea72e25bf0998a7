"""Guesses are followed while they pay: scripted routings, and the fused step."""

from dataclasses import replace

import pytest
import torch

from quantbench.experts.guessing import EVERY, FIRST, LAST, Guessing, Prices
from quantbench.experts.store import POLICIES, Guesses
from quantbench.ops.cpu import build
from tests.experts.small import decoded, tiered, whole

REFUSAL = build.refusal()
needs_fused = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def script(guessing, rights, start=0):
    """Turns of two layers in turn, whose guess of one expert is right where `rights` says so."""
    for number, right in enumerate(rights, start):
        guessing.guessed(number % 2, {7})
        guessing.asked(number % 2, {7} if right else {3})


def test_nothing_pays_before_it_is_known():
    guessing = Guessing(Prices())
    script(guessing, [True] * (FIRST - 1))
    assert not guessing.pays and not guessing.pays_alone
    script(guessing, [True])
    assert guessing.pays and guessing.pays_alone


@pytest.mark.parametrize(
    ("prices", "least"),
    [
        (Prices(saving=1, loss=1), 51),  # more than half of them have to be right
        (Prices(saving=3, loss=1), 26),
        (Prices(saving=1, loss=4), 81),
    ],
)
def test_what_right_guesses_save_is_more_than_what_wrong_ones_cost(prices, least):
    for right in range(101):
        guessing = Guessing(prices)
        script(guessing, [number < right for number in range(100)])
        assert guessing.pays == (right >= least)


def test_asking_for_guesses_alone_has_its_price():
    """Six of ten guesses are right. Together they save 6 · 4 and lose 4 · 1; alone they save 6 · 2
    and lose 4 · 1 and 10 · 1."""
    guessing = Guessing(Prices(saving=4, loss=1, saving_alone=2, asking=1))
    script(guessing, [True, False, True, False, True] * 20)
    assert guessing.pays and not guessing.pays_alone
    guessing.prices = replace(guessing.prices, asking=0.7)
    assert guessing.pays_alone


def test_it_follows_a_routing_that_changes():
    guessing = Guessing(Prices())
    script(guessing, [True] * 1000)
    assert guessing.pays
    script(guessing, [False] * LAST)
    assert not guessing.pays
    script(guessing, [True] * 2 * LAST)
    assert guessing.pays


def test_guesses_of_a_layer_that_asks_for_nothing_were_wrong():
    guessing = Guessing(Prices())
    guessing.guessed(3, {1, 2})
    guessing.asked(4, {1, 2})  # layer 3 found all that it wanted
    assert (guessing.right, guessing.wrong) == (0, 2)
    guessing.guessed(3, {1, 2})
    guessing.begin_step()
    assert (guessing.right, guessing.wrong) == (0, 4)
    guessing.guessed(3, {1, 2, 5})
    guessing.asked(3, {0, 2, 5})
    guessing.asked(3, {0, 1})  # the rest of the same layer
    assert (guessing.right, guessing.wrong) == (2, 5)


def test_guesses_are_noted_now_and_then_where_none_is_followed():
    guessing = Guessing(Prices())
    assert guessing.begin_step() and guessing.begin_step()
    script(guessing, [False] * FIRST)
    noted = [guessing.begin_step() for _ in range(4 * EVERY)]
    assert noted.count(True) == 4


# ---------------------------------------------------------------------------------- the op


FAST = [{0, 3}, {1}, set(), {2, 4, 5}, {7}]


def spent(guesses, tokens, prices, scheme="int8wo"):
    policy = replace(POLICIES["cache"], ahead=True, guesses=guesses)
    model, tiers = tiered("tiny_moe", scheme, policy, None, torch.float32)
    tiers.hold(FAST, 15 + tiers.least)  # so that layers keep what they fetch, and need no landing
    tiers.fused.guessing = Guessing(prices)
    before = tiers.counted()
    result = decoded(model, tokens, "cpu-step")
    return tiers.counted().since(before), tiers.fused.guessing, result


@needs_fused
@pytest.mark.parametrize("seed", [1, 2])
def test_useless_guesses_cost_no_copy(seed):
    """Where a wrong guess costs a thousand times what a right one saves, none is followed; where it
    is the other way round, nearly as many are as if it were not asked whether they pay."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4096, (1, 60), generator=draw)
    expected = decoded(whole("tiny_moe", "int8wo", torch.float32), tokens, "cpu-step")
    never, _, none = spent(Guesses.NEVER, tokens, Prices())
    always, _, every = spent(Guesses.ALWAYS, tokens, Prices())
    dear, dear_guessing, few = spent(Guesses.WHILE_RIGHT, tokens, Prices(loss=1000.0))
    cheap, cheap_guessing, most = spent(Guesses.WHILE_RIGHT, tokens, Prices(loss=1e-3))
    for result in (none, every, few, most):
        assert torch.equal(result, expected)
    assert never.ahead == dear.ahead == 0 and dear.fetches == dear.fetched == never.fetched
    assert always.ahead >= cheap.ahead > 0.5 * always.ahead  # all but the first ones
    # Real routing: some are right, some wrong, and this was seen with and without following them.
    for guessing in (dear_guessing, cheap_guessing):
        assert guessing.right > 0 and guessing.wrong > 0 and guessing.is_known
    assert dear_guessing.steps == cheap_guessing.steps == 60
