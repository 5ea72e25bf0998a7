"""The fused step computes with the experts that are there while others arrive: the same logits to
the bit, whenever and in whatever order they arrive."""

import random
import time
from dataclasses import replace

import pytest
import torch

from quantbench.experts.copies import ByThreads
from quantbench.experts.store import POLICIES, Guesses
from quantbench.ops.cpu import build
from tests.experts.small import logits, some, tiered, whole
from tests.models.hugging_face import saved

REFUSAL = build.refusal()
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
GUESSES = list(Guesses)


class Late:
    """Copies (copies.Copies) that are made at the last moment: until then a slot holds rubbish."""

    def __init__(self, slow):
        self.slow, self.waits = slow, 0

    def waited(self):
        return 0.0

    def cancelled(self):
        return 0

    def now(self, slot, key):
        self.slow.read(key, slot.buffer)

    def begin(self, pairs):
        for slot, key in pairs:
            slot.buffer.fill_(255)  # and of float32, no number
            slot.coming = key

    def wait(self, slot):
        self.waits += slot.coming is not None
        if slot.coming is not None:
            self.slow.read(slot.coming, slot.buffer)
            slot.coming = None

    def is_over(self, slot):
        return slot.coming is None

    def abandon(self, slot):
        slot.coming = None
        return True

    def done(self, slot):
        pass


@pytest.mark.parametrize("guesses", GUESSES)
@pytest.mark.parametrize("scheme", ["none", "int8wo", "int4wo-32"])
def test_nothing_is_computed_with_an_expert_that_has_not_arrived(scheme, guesses):
    draw = random.Random(torch.initial_seed())
    one = whole("tiny_moe", scheme)
    expected = [logits(one, rows, decoder="cpu-step") for rows in (1, 3)]
    for name in ("fetch", "cache", "auto"):
        policy = replace(POLICIES[name], ahead=True, guesses=guesses)
        model, tiers = tiered("tiny_moe", scheme, policy, None)
        tiers.copies = late = Late(tiers.slow)
        count = draw.randint(5, 25)
        tiers.hold(some(tiers, count, draw), count + tiers.least + draw.randint(0, 7))
        for rows, same in zip((1, 3), expected, strict=True):
            assert torch.equal(logits(model, rows, decoder="cpu-step"), same), (name, count)
        assert late.waits


@pytest.mark.parametrize("path", ["tiny_moe", "qwen-2-moe"])
def test_a_slow_reader_changes_no_logit(path, tmp_path, monkeypatch):
    """Each copy takes another while, so that a later one is often there first."""
    draw = random.Random(torch.initial_seed())
    path = path if path == "tiny_moe" else str(saved(path, tmp_path)[0])
    expected = [logits(whole(path, "int8wo"), rows, decoder="cpu-step") for rows in (1, 3)]
    model, tiers = tiered(path, "int8wo", replace(POLICIES["cache"], ahead=True), None)
    assert isinstance(tiers.copies, ByThreads)
    count = len(tiers.keys) // 3
    tiers.hold(some(tiers, count, draw), count + tiers.least + 2)
    read = tiers.slow.read

    def slowly(key, buffer):
        time.sleep(draw.random() * 2e-3)
        read(key, buffer)

    monkeypatch.setattr(tiers.slow, "read", slowly)
    for rows, same in zip((1, 3), expected, strict=True):
        assert torch.equal(logits(model, rows, decoder="cpu-step"), same)


def test_the_op_waits_only_after_it_has_computed_what_is_there(monkeypatch):
    """It asks, and later it waits; where all copies are over, it need not wait."""
    policy = replace(POLICIES["fetch"], ahead=True, guesses=Guesses.NEVER)
    model, tiers = tiered("tiny_moe", "int8wo", policy, None)
    tiers.copies, calls = Late(tiers.slow), []
    # Each layer has every other expert, and a token takes two of eight.
    tiers.hold([set(range(0, 8, 2))] * 5, 20 + 2)
    fused = tiers.fused
    for name in ("_begin", "reckon"):
        inner = getattr(fused, name)

        def noted(*arguments, name=name, inner=inner):
            calls.append(name)
            return inner(*arguments)

        monkeypatch.setattr(fused, name, noted)
    logits(model, decoder="cpu-step")
    begun, waits = calls.count("_begin"), calls.count("reckon")
    assert 0 < begun <= waits  # each of these turns misses something that has to be waited for
    tiers.policy = POLICIES["fetch"]
    calls.clear()
    logits(model, decoder="cpu-step")
    assert "_begin" in calls and tiers.fused.under_way is None
