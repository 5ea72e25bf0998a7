"""A card over RAM, where the CPU computes with experts of its own: what is calibrated, what is
decided by that, and the order in which both processors are asked. A CPU stands in for the card;
with a card the same tests run there."""

import dataclasses
import random

import pytest
import torch

from quantbench.experts import layer as layers
from quantbench.experts import stopwatch
from quantbench.experts.costs import measure
from quantbench.experts.rehearsal import decide_by_costs
from quantbench.experts.slow import Memory
from quantbench.experts.store import POLICIES
from quantbench.experts.tiers import Tiers
from quantbench.models.loading import load_config, load_model
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse
from tests.experts.small import CPU, Drawn, some

CARDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
AUTO = POLICIES["auto"]
DTYPE = torch.bfloat16


def over_ram(device, policy, scheme="int8wo"):
    """tiny_moe on a device, its experts in RAM, in the form of both processors."""
    card, spec = torch.device(device), parse(scheme)
    beneath = Memory(pinned=False), Quantizer(spec, CPU, DTYPE)
    slow = Memory(pinned=device == "cuda")
    tiers = Tiers(slow, load_config("tiny_moe"), card, policy, beneath)
    stages = tiers.after(Quantizer(spec, card, DTYPE))
    model = load_model("tiny_moe", card, DTYPE, transform=stages)
    tiers.attach(model)
    return model, tiers


def logits(model, device):
    tokens = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens.to(device))


@pytest.mark.parametrize("device", CARDS)
@pytest.mark.parametrize("ahead", [False, True])
def test_logits_are_those_of_one_memory(ahead, device):
    """Whoever computes. Beneath a card sums have another order: 5 % of the largest logit is more
    than bfloat16 makes of that in five layers, and less than any wrong expert does."""
    card, spec = torch.device(device), parse("int8wo")
    whole = load_model("tiny_moe", card, DTYPE, transform=Quantizer(spec, card, DTYPE))
    expected = logits(whole, device)
    draw = random.Random(torch.initial_seed())
    model, tiers = over_ram(device, dataclasses.replace(AUTO, ahead=ahead))
    tiers.decide = Drawn(draw)
    for count in (0, *(draw.randint(1, 30) for _ in range(3))):
        tiers.hold(some(tiers, count, draw), count + 2 + draw.randint(0, 7))
        got = logits(model, device)
        if device == "cpu":
            assert torch.equal(got, expected)
        else:
            assert (got - expected).abs().max() <= 0.05 * expected.abs().max()
    assert tiers.counted().there > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_the_processor_beneath_computes_while_the_other_is_busy(ahead, monkeypatch):
    """A card is asked for all that it will do, copies included, before the CPU begins."""
    model, tiers = over_ram("cpu", dataclasses.replace(AUTO, ahead=ahead))
    tiers.decide = Drawn(random.Random(torch.initial_seed()))
    tiers.hold([{0, 1, 2}] * 5, 15 + 2)
    compute, in_place, order = layers._Turn._compute, Tiers.in_place, []

    def on_the_card(self, expert, slot):
        order.append((self.layer.number, "card", expert))
        compute(self, expert, slot)

    def beneath(self, key):
        order.append((key[0], "beneath", key[1]))
        return in_place(self, key)

    monkeypatch.setattr(layers._Turn, "_compute", on_the_card)
    monkeypatch.setattr(Tiers, "in_place", beneath)
    logits(model, "cpu")
    both = 0  # layers in which both compute
    for number in range(5):
        who = [where for layer, where, _ in order if layer == number]
        assert who == sorted(who, key=("card", "beneath").index)
        both += len(set(who)) == 2
    assert both


@pytest.mark.parametrize("device", CARDS)
@pytest.mark.parametrize("ahead", [False, True])
def test_costs_are_measured_and_decide(ahead, device):
    """With the copies of a run; nothing of it stays but the costs."""
    policy = dataclasses.replace(AUTO, ahead=ahead)
    model, tiers = over_ram(device, policy)
    tiers.hold([{0}, {1, 2}, set(), set(), {7}], 8)
    landing, traffic = list(tiers.landing), tiers.counted()
    own = {number: list(layer.own) for number, layer in tiers.layers.items()}
    with torch.no_grad():
        costs = measure(tiers, model)
        assert costs.fast.seconds(1) > 0 and costs.slow.seconds(1) > 0
        decide_by_costs(tiers, model)
    assert tiers.policy == policy and tiers.decide is not None
    assert tiers.landing == landing and tiers.counted() == traffic
    assert {number: list(layer.own) for number, layer in tiers.layers.items()} == own
    there, seconds = tiers.decide([3, 1, 0, 2], {1}, [])
    assert set(there) <= {0, 3} and seconds > 0
    logits(model, device)
    spent = tiers.counted().since(traffic)
    assert spent.expected_seconds > 0 and spent.expert_seconds > 0
    assert spent.hits + spent.ahead + spent.fetched + spent.there == spent.assignments


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
