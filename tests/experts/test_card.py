"""A card over RAM, where the CPU computes with experts of its own. A CPU stands in for the card;
where there is a card, the same tests run there, too."""

import pytest
import torch

from quantbench.experts import stopwatch, trial
from quantbench.experts.slow import Memory
from quantbench.experts.tiers import POLICIES, Tiers
from quantbench.models.loading import load_config, load_model
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse
from tests.experts.small import CPU, hold_some

CARDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPE = torch.bfloat16


def over_ram(device, scheme="int8wo"):
    """tiny_moe on a device, its experts in RAM, in the form of both processors."""
    card, spec = torch.device(device), parse(scheme)
    beneath = Memory(pinned=False), Quantizer(spec, CPU, DTYPE)
    slow = Memory(pinned=device == "cuda")
    tiers = Tiers(slow, load_config("tiny_moe"), card, POLICIES["cache"], beneath)
    stages = tiers.after(Quantizer(spec, card, DTYPE))
    model = load_model("tiny_moe", card, DTYPE, transform=stages)
    tiers.attach(model)
    return model, tiers


def logits(model, device):
    tokens = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens.to(device))


@pytest.mark.parametrize("device", CARDS)
@pytest.mark.parametrize("scheme", ["none", "int8wo"])
def test_logits_are_those_of_one_memory(scheme, device):
    """To the bit with fetching. Under a card the CPU adds in another order: 5 % of the largest
    logit is more than bfloat16 makes of that in five layers, and less than any wrong expert does.
    """
    card, spec = torch.device(device), parse(scheme)
    whole = load_model("tiny_moe", card, DTYPE, transform=Quantizer(spec, card, DTYPE))
    expected = logits(whole, device)
    model, tiers = over_ram(device, scheme)
    for policy in POLICIES.values():
        tiers.policy = policy
        for count in (0, None):
            hold_some(tiers, count)
            got = logits(model, device)
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
    logits(model, "cpu")
    both = 0  # layers in which both compute
    for number in range(5):
        who = [where for layer, where in order if layer == number]
        assert who == sorted(who, key=("card", "beneath").index)
        both += len(set(who)) == 2
    assert both


@pytest.mark.parametrize("device", CARDS)
def test_auto_takes_the_faster_policy_and_leaves_no_count(device, monkeypatch):
    model, tiers = over_ram(device)
    tiers.hold([{0}, {1, 2}, set(), set(), {7}], 8)
    clock = [0.0]
    monkeypatch.setattr(trial.time, "perf_counter", lambda: clock[0])
    for slower, faster in (("cache", "compute_there"), ("compute_there", "cache")):
        before, policies, seen = tiers.counted(), [], []

        def step(tokens, position, slower=slower, policies=policies, seen=seen):
            policies.append(tiers.policy.name)
            seen.append(tokens.flatten().tolist())
            clock[0] += 1.0 + (tiers.policy.name == slower)
            model(tokens)

        assert trial.faster(tiers, step, [5, 6, 7, 8, 9], 2).name == faster
        assert policies == ["cache", "compute_there"] * 13 and seen[:3] == [[5, 6], [7, 8], [9, 5]]
        assert tiers.policy is POLICIES["cache"] and tiers.counted() == before


@pytest.mark.parametrize("device", CARDS)
def test_a_stopwatch_adds_up_what_was_between_starts_and_stops(device):
    watch = stopwatch.of(torch.device(device))
    assert watch.seconds() == 0
    x = torch.randn(500, 500, device=device)
    for _ in range(3):
        started = watch.start()
        x = (x @ x).clamp(-1, 1)
        watch.stop(started)
    assert watch.seconds() > 0 and watch.seconds() == 0
