"""A card over RAM, where the CPU computes with experts of its own. A CPU stands in for the card;
where there is a card, the same tests run there, too."""

import itertools

import pytest
import torch

from quantbench.devices import Stopwatch
from quantbench.experts.tiers import POLICIES
from quantbench.run import tiers as tiers_of_a_run
from tests.experts.small import hold_some, logits, tiered, whole

CARDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def over_ram(device, scheme="int8wo"):
    """tiny_moe on a device, its experts in RAM, in the form of both processors."""
    how = torch.bfloat16, "auto", device
    return tiered("cache", None, "tiny_moe", scheme, *how, beneath=True)


@pytest.mark.parametrize("device", CARDS)
@pytest.mark.parametrize("scheme", ["none", "int8wo"])
def test_logits_are_those_of_one_memory(scheme, device):
    """To the bit with fetching. Under a card the CPU adds in another order: 5 % of the largest
    logit is more than bfloat16 makes of that in five layers, and less than any wrong expert does.
    """
    expected = logits(whole("tiny_moe", scheme, torch.bfloat16, "auto", device), 2)
    model, tiers = over_ram(device, scheme)
    for policy in POLICIES.values():
        tiers.policy = policy
        for count in (0, None):
            hold_some(tiers, count)
            got = logits(model, 2)
            if policy.fetches or device == "cpu":
                assert torch.equal(got, expected), (policy, tiers.quotas)
            else:
                assert (got - expected).abs().max() <= 0.05 * expected.abs().max()
    assert tiers.counted().there > 0


def test_the_processor_beneath_computes_while_the_other_is_busy(monkeypatch):
    """A card is given all that it will compute before the CPU starts."""
    model, tiers = over_ram("cpu")
    tiers.policy = POLICIES["compute_there"]
    tiers.hold([{0, 1, 2, 3}] * 5, 20)
    order, in_place = [], tiers.in_place
    layers = {slot: n for n, layer in tiers.layers.items() for slot in layer.own.values()}

    def beneath(key):
        order.append((key[0], "beneath"))
        return in_place(key)

    monkeypatch.setattr(tiers, "in_place", beneath)
    monkeypatch.setattr(tiers.copies, "done", lambda slot: order.append((layers[slot], "card")))
    logits(model, 2)
    turns = [[w for _, w in turn] for _, turn in itertools.groupby(order, key=lambda each: each[0])]
    assert all(who == sorted(who, key=("card", "beneath").index) for who in turns)
    assert any(len(set(who)) == 2 for who in turns)  # layers in which both compute


@pytest.mark.parametrize("device", CARDS)
def test_auto_takes_the_faster_policy_and_leaves_no_count(device, monkeypatch):
    model, tiers = over_ram(device)
    tiers.hold([{0}, {1, 2}, set(), set(), {7}], 8)
    clock = [0.0]
    monkeypatch.setattr(tiers_of_a_run.time, "perf_counter", lambda: clock[0])
    for slower, faster in (("cache", "compute_there"), ("compute_there", "cache")):
        before, policies, seen = tiers.counted(), [], []

        def step(tokens, position, slower=slower, policies=policies, seen=seen):
            policies.append(tiers.policy.name)
            seen.append(tokens.flatten().tolist())
            clock[0] += 1.0 + (tiers.policy.name == slower)
            model(tokens)

        assert tiers_of_a_run.faster(tiers, step, [5, 6, 7, 8, 9], 2).name == faster
        assert policies == ["cache", "compute_there"] * 13 and seen[:3] == [[5, 6], [7, 8], [9, 5]]
        assert tiers.policy is POLICIES["cache"] and tiers.counted() == before


@pytest.mark.parametrize("device", CARDS)
def test_a_stopwatch_adds_up_what_was_between_starts_and_stops(device):
    watch = Stopwatch(torch.device(device))
    assert watch.seconds() == 0
    x = torch.randn(500, 500, device=device)
    for _ in range(3):
        started = watch.start()
        x = (x @ x).clamp(-1, 1)
        watch.stop(started)
    assert watch.seconds() > 0 and watch.seconds() == 0
