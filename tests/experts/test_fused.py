"""The fused decoding step over experts in two tiers: what it counts, that it waits for what
arrives, and how it ends when experts cannot be brought. More of its logits: test_tiers.py."""

import random
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quantbench.devices import Stopwatch
from quantbench.errors import QuantbenchError
from quantbench.experts import copies
from quantbench.experts.slow import new_file, pages
from quantbench.experts.tiers import POLICIES
from quantbench.generate import Generator
from tests.experts.small import (
    CPU,
    FAST,
    NEEDS_KERNELS,
    decoded,
    hold_some,
    logits,
    routing,
    tiered,
    whole,
)

pytestmark = NEEDS_KERNELS


def test_the_cache_is_that_of_a_simulation():
    """Least recently used experts give way, those of a token at the same time excepted."""
    # 6 more than the 2, 1, 0, 3 and 1 that are placed, each for the layer that has the fewest.
    quotas = [3, 3, 2, 3, 2]
    own = [OrderedDict.fromkeys(sorted(fast)) for fast in FAST]
    tokens, hits = torch.randint(4096, (1, 40)), 0
    for layer, experts in routing(tokens):
        hits += len(experts & own[layer].keys())
        for expert in sorted(experts & own[layer].keys()):
            own[layer].move_to_end(expert)
        for expert in sorted(experts - own[layer].keys()):
            if len(own[layer]) == quotas[layer]:
                del own[layer][next(e for e in own[layer] if e not in experts)]
            own[layer][expert] = None
    model, tiers = tiered("cache", None, "tiny_moe", "int8wo", torch.float32)
    tiers.hold(FAST, 7 + tiers.least + 6)
    before = tiers.counted()
    decoded(model, tokens, "cpu-step")
    traffic = tiers.counted().since(before)
    assert tiers.quotas == quotas
    assert traffic.hits == hits and traffic.fetches == 400 - hits
    assert [set(layer.own) for layer in tiers.layers.values()] == [set(layer) for layer in own]


def test_two_decodes_at_once(tmp_path):
    model, tiers = tiered("cache", tmp_path)
    tiers.hold(FAST, 14)
    first = torch.randint(4096, (1, 40))
    inputs = [first, first.flip(1)]
    with ThreadPoolExecutor(2) as threads:
        results = threads.map(lambda each: decoded(model, each, "cpu-step"), inputs)
    for each, result in zip(inputs, results, strict=True):
        assert torch.equal(result, decoded(whole(), each, "cpu-step"))


def test_two_generators_made_at_once_share_the_tables(tmp_path, monkeypatch):
    """A layer has one table, whose numbers the op reads and writes."""
    model, tiers = tiered("cache", tmp_path)
    tiers.hold(FAST, 14)
    networks = tiers.fused._networks
    monkeypatch.setattr(tiers.fused, "_networks", lambda: time.sleep(0.01) or networks())
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(lambda _: Generator(model, 1, 8), range(2))
    tables = [
        [p.data_ptr() for p in each.decoder.op.parts if p.dtype == torch.int64] for each in made
    ]
    assert tables[0] and tables[0] == tables[1]


class Broken(QuantbenchError):
    pass


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("error", [Broken("the disk is on fire"), KeyboardInterrupt()])
def test_what_goes_wrong_in_the_middle_of_a_step_ends_it(error, rows, tmp_path, monkeypatch):
    """… and nothing else: the next step computes what it should."""
    model, tiers = tiered("fetch", tmp_path)
    tiers.hold(FAST, 10)
    logits(model, rows)
    wait, left = tiers.copies.wait, [3]

    def break_once(slot):
        left[0] -= 1
        if left[0] == 0:
            raise error
        wait(slot)

    generator = Generator(model, rows, 8)
    assert generator.decoder.name == "cpu-step"
    monkeypatch.setattr(tiers.copies, "wait", break_once)
    with pytest.raises(type(error)) as raised:
        generator.forward(torch.ones(rows, 1, dtype=torch.int64))
    assert raised.value is error and error.__cause__ is None
    expected = logits(whole(), rows, decoder="cpu-step")
    assert torch.equal(logits(model, rows, decoder="cpu-step"), expected)


# ---------------------------------------------------------------------------------- arrivals


class Late:
    """Copies that are made at the last moment: until then a slot holds rubbish."""

    def __init__(self, slow):
        self.slow, self.waited, self.waits = slow, 0, Stopwatch(torch.device("cpu"))

    def begin(self, pairs):
        for slot, key in pairs:
            slot.buffer.fill_(255)  # as float32 numbers: NaN
            slot.coming = key

    def wait(self, slot):
        if slot.coming is not None:
            self.waited += 1
            self.slow.read(slot.coming, slot.buffer)
            slot.coming = None

    def done(self, slot):
        pass


@pytest.mark.parametrize("scheme", ["none", "int8wo", "int4wo-32"])
def test_nothing_is_computed_with_an_expert_that_has_not_arrived(scheme):
    """And the op waits only where something arrives."""
    one = whole(scheme=scheme)
    expected = {rows: logits(one, rows, decoder="cpu-step") for rows in (1, 3)}
    model, tiers = tiered("cache", None, scheme=scheme)
    tiers.copies = late = Late(tiers.slow)
    for policy in POLICIES.values():
        tiers.policy = policy
        hold_some(tiers, random.randint(5, 25))
        late.waited = 0
        for rows, same in expected.items():
            assert torch.equal(logits(model, rows, decoder="cpu-step"), same), rows
        assert bool(late.waited) == policy.fetches


# ---------------------------------------------------------------------------------- who reads


def test_many_reads_at_once(tmp_path):
    disk, keys = new_file(tmp_path), [(0, expert) for expert in range(137)]
    disk.reserve(keys, 4096)
    for key in keys:
        disk.put(key, pages(4096).fill_(key[1] % 251))
    reader = copies.make(disk, CPU)
    slots = [copies.Slot(pages(4096), torch.nn.Identity()) for _ in keys]
    reader.begin(list(zip(slots, keys, strict=True)))
    for slot, key in zip(slots, keys, strict=True):
        reader.wait(slot)
        assert slot.buffer.eq(key[1] % 251).all()
