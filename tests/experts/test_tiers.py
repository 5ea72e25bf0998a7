"""Experts in two tiers: the same logits as in one memory, wherever experts are and however they
come; what is counted; what goes wrong with the slow tier."""

import itertools
import os
import random

import pytest
import torch
from safetensors import safe_open

from quantbench.devices import Stopwatch
from quantbench.errors import KernelError, TierError
from quantbench.experts import loading as tiers_of_a_run
from quantbench.experts import slow
from quantbench.experts.layout import ExpertLayout, without_weights
from quantbench.experts.slow import Ram, new_file
from quantbench.experts.tiers import POLICIES, Tiers
from quantbench.kv_cache import CACHES
from quantbench.models.formats.saved import inner_tensors
from quantbench.models.loading import load_config
from quantbench.quantize.registry import SCHEMES
from quantbench.quantize.spec import SHOWN, parse
from tests.experts.small import (
    CPU,
    FAST,
    NEEDS_KERNELS,
    REFUSAL,
    decoded,
    hold_some,
    logits,
    quantizer,
    routing,
    tiered,
    whole,
)
from tests.models.hugging_face import saved

DECODERS = ["modules", pytest.param("cpu-step", marks=NEEDS_KERNELS)]


@pytest.mark.parametrize(
    ("family", "scheme", "kernel"),
    [
        *(("tiny_moe", scheme, "auto") for scheme in ("none", "int8wo", "int4wo-32")),
        *(("tiny_moe", "int8wo", kernel) for kernel in ("torchao", "reference")),
        *(("mixtral", scheme, "auto") for scheme in ("none", "int8wo", "int4wo-32")),
        ("qwen-3-moe-dense", "int4wo-32", "auto"),
        ("qwen-2-moe", "int8wo", "auto"),  # whose shared expert no group of 32 divides
    ],
)
def test_logits_are_those_of_one_memory(family, scheme, kernel, tmp_path):
    """Random placements, over a disk or RAM by chance, every policy and decoder, any cache. A
    prompt goes by the modules, steps by the op: both use the same slots."""
    path = family if family == "tiny_moe" else str(saved(family, tmp_path)[0])
    one = whole(path, scheme, torch.bfloat16, kernel)
    fused = REFUSAL is None and kernel == "auto"
    # int4's groups of 32 fit tiny_moe's heads alone
    cache = random.choice([name for name in CACHES if name != "int4" or family == "tiny_moe"])
    how = [(rows, 4, d, cache) for rows in (1, 3) for d in ("modules", *["cpu-step"] * fused)]
    expected = [logits(one, *given) for given in how]
    slow_tier = random.choice([tmp_path / "slow", None])
    model, tiers = tiered("cache", slow_tier, path, scheme, torch.bfloat16, kernel)
    for policy in POLICIES.values():
        tiers.policy = policy
        hold_some(tiers)
        for given, same in zip(how, expected, strict=True):
            got = logits(model, *given)
            assert torch.equal(got, same), (policy, tiers.slow.place, tiers.quotas, given)
        slots = [slot for layer in tiers.layers.values() for slot in layer.own.values()]
        slots += tiers.landing
        assert len({id(slot) for slot in slots}) == len(slots) == sum(tiers.quotas) + tiers.arrivals


@pytest.mark.parametrize("scheme", [s for s in SHOWN if parse(s).scheme])
def test_every_scheme_has_a_layout(scheme):
    """Bytes give back the very numbers that were written."""
    spec, ran = parse(scheme), []
    for kernel in SCHEMES[type(spec)].kernels:
        linears = {name: torch.nn.Linear(256, 128, False).bfloat16() for name in ("w13", "w2")}
        try:
            stages = quantizer(scheme, kernel=kernel)
            linears = {name: stages(name, linear) for name, linear in linears.items()}
            layout = ExpertLayout.of(linears)
        except KernelError:  # not here, or it keeps more than weights
            continue
        ran.append(kernel)
        buffer = slow.pages(layout.nbytes)
        layout.write(linears, buffer)
        skeleton = torch.nn.ModuleDict({n: without_weights(li) for n, li in linears.items()})
        back = layout.expert(skeleton, buffer)
        for name, linear in linears.items():
            mine = inner_tensors("", linear.weight.data)
            others = inner_tensors("", back.get_submodule(name).weight.data)
            assert mine.keys() == others.keys()
            for key in mine:
                assert mine[key].stride() == others[key].stride()
                same = mine[key].contiguous().view(-1).view(torch.uint8)
                assert torch.equal(same, others[key].contiguous().view(-1).view(torch.uint8))
            if kernel != "triton":  # whose interpreter is slow, and whose weights are reference's
                x = torch.randn(3, 256).bfloat16()
                assert torch.equal(linear(x), back.get_submodule(name)(x))
    assert ran


def test_an_expert_stored_in_another_way_is_refused():
    tiers = Tiers(Ram(False), load_config("tiny_moe"), CPU, POLICIES["cache"])

    def arrive(scheme, expert):
        stages = tiers.after(quantizer(scheme))
        for linear, shape in (("w13", (256, 64)), ("w2", (32, 256))):
            name = f"layers.0.feed_forward.experts.{expert}.{linear}"
            module = torch.nn.Linear(*shape, bias=False).bfloat16()
            stages.built(name, stages.quantized(name, module))

    arrive("int8wo", 0)
    with pytest.raises(KernelError, match="expert 1 of layer 0 is stored in another way"):
        arrive("int4wo-32", 1)


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_counts_are_those_of_the_routing(decoder, tmp_path):
    """Hits and all others add up to what the routers of a model in one memory choose. By policy,
    each token and layer at a time."""
    tokens = torch.randint(4096, (1, 40))
    hits = sum(len(FAST[layer] & experts) for layer, experts in routing(tokens))
    model, tiers = tiered("fetch", tmp_path, "tiny_moe", "int8wo", torch.float32)
    for policy in ("fetch", "compute_there"):
        tiers.policy = POLICIES[policy]
        tiers.hold(FAST, 7 + tiers.least)
        before = tiers.counted()
        decoded(model, tokens, decoder)
        traffic = tiers.counted().since(before)
        assert (traffic.assignments, traffic.hits) == (40 * 5 * 2, hits)
        misses = (400 - hits, 0) if policy == "fetch" else (0, 400 - hits)
        assert (traffic.fetched, traffic.there) == misses
        assert traffic.fetches == misses[0]
        assert traffic.bytes_moved == misses[0] * tiers.layout.nbytes
        assert (0 < traffic.waiting_seconds < traffic.expert_seconds) == (policy == "fetch")
        assert [set(layer.own) for layer in tiers.layers.values()] == FAST
        assert tiers.quotas == list(map(len, FAST))


def test_the_least_recently_used_expert_gives_way():
    """A layer with room for two, worked by hand: 0 1 0 2 1 0 hits 0 alone, once."""
    model, tiers = tiered("cache", None)
    tiers.hold([{6, 7}, set(), set(), set(), set()], 2 + 2)
    layer, x = tiers.layers[0], torch.randn(1, 256).bfloat16()
    row = torch.tensor([0])
    seen = []
    for expert in (0, 1, 0, 2, 1, 0):
        before = tiers.traffic.hits
        list(layer(x, {expert: row}))
        seen.append((tiers.traffic.hits - before, list(layer.own)))
    assert seen == [*((0, [7, 0]), (0, [0, 1]), (1, [1, 0]), (0, [0, 2]), (0, [2, 1]), (0, [1, 0]))]


def test_experts_without_tokens_are_neither_fetched_nor_computed():
    model, tiers = tiered("fetch", None)
    tiers.hold([set()] * 5, 2)
    result = dict(tiers.layers[1](torch.randn(4, 256).bfloat16(), {5: torch.tensor([0, 2])}))
    assert result.keys() == {5} and result[5].shape == (2, 256)
    assert tiers.traffic.fetches == 1 and tiers.traffic.assignments == 2


@pytest.mark.parametrize("direct", [True, False])
def test_the_file_is_safetensors_and_has_no_name(direct, tmp_path, monkeypatch):
    """Read back by its own library: whole pages, an expert each. Nothing is left, even if the
    process is killed. Without O_DIRECT the file's pages are dropped."""
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    disk = new_file(tmp_path)
    assert not list(tmp_path.iterdir())
    keys = [(layer, expert) for layer in (0, 2) for expert in range(3)]
    disk.reserve(keys, 8192)
    blocks = {key: torch.randint(256, (8192,), dtype=torch.uint8) for key in keys}
    for key, block in blocks.items():
        disk.put(key, slow.pages(8192).copy_(block))
    with safe_open(f"/proc/self/fd/{disk.buffered}", "pt") as opened:
        assert sorted(opened.keys()) == sorted(f"layers.{i}.experts.{e}" for i, e in keys)
        for (layer, expert), block in blocks.items():
            assert torch.equal(opened.get_tensor(f"layers.{layer}.experts.{expert}"), block)
    buffer = slow.pages(8192)
    for key, block in blocks.items():
        disk.read(key, buffer)
        assert torch.equal(buffer, block) and torch.equal(disk.in_place(key), block)
    assert direct or "dropped" in disk.place


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("policy", "cut"), [("cache", 10**6), ("fetch", 1), ("compute_there", 1)])
def test_a_truncated_file_is_an_error_of_one_line(policy, cut, decoder, tmp_path):
    model, tiers = tiered(policy, tmp_path)
    tiers.hold([set()] * 5, 2)
    logits(model)
    os.ftruncate(tiers.slow.buffered, tiers.slow.end - cut)
    with pytest.raises(TierError, match="was truncated while the run used it") as raised:
        for _ in range(9):  # until a step has needed every expert
            logits(model, 3, 9, decoder)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


# ------------------------------------------------------------------------------ a card over RAM
# The CPU computes with its own copies of experts. Without a card a second "CPU" takes its part.

CARDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def over_ram(device, scheme="int8wo"):
    """tiny_moe on a device, its experts in RAM, in the form of both processors."""
    how = torch.bfloat16, "auto", device
    return tiered("cache", None, "tiny_moe", scheme, *how, beneath=True)


@pytest.mark.parametrize("device", CARDS)
@pytest.mark.parametrize("scheme", ["none", "int8wo"])
def test_logits_over_a_card_are_those_of_one_memory(scheme, device):
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
