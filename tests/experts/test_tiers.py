"""Experts in two tiers: the same logits as in one memory, wherever experts lie and however they
come; what is counted; what goes wrong with the slow tier."""

import os
import random

import pytest
import torch
from safetensors import safe_open

from quantbench.errors import KernelError, TierError
from quantbench.experts import slow
from quantbench.experts.layout import Layout, without_weights
from quantbench.experts.slow import Memory, new_file
from quantbench.experts.tiers import POLICIES, Tiers
from quantbench.models.formats.saved import inner_tensors
from quantbench.models.llama import step_bytes, weight_bytes
from quantbench.models.loading import load_config
from quantbench.ops.cpu import build
from quantbench.quantize.registry import SCHEMES
from quantbench.quantize.spec import SHOWN, parse
from tests.experts.small import CPU, decoded, logits, quantizer, some, tiered, whole
from tests.models.hugging_face import saved

SCHEME_NAMES = ("none", "int8wo", "int4wo-32")
REFUSAL = build.refusal()
needs_fused = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
DECODERS = ["modules", pytest.param("cpu-step", marks=needs_fused)]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "slow"


# ---------------------------------------------------------------------------------- same numbers


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("family", "scheme", "over_disk"),
    [
        *(("tiny_moe", scheme, True) for scheme in SCHEME_NAMES),
        ("tiny_moe", "int8wo", False),
        *(("mixtral", scheme, True) for scheme in SCHEME_NAMES),
        ("qwen-3-moe-dense", "int4wo-32", True),
        ("qwen-2-moe", "int8wo", True),  # whose shared expert no group of 32 divides
    ],
)
def test_logits_are_those_of_one_memory(family, scheme, over_disk, decoder, tmp_path):
    """Random placements, every policy."""
    draw = random.Random(torch.initial_seed())
    path = family if family == "tiny_moe" else str(saved(family, tmp_path)[0])
    one = whole(path, scheme)
    expected = [logits(one, rows, decoder=decoder) for rows in (1, 3)]
    slow_tier = tmp_path / "slow" if over_disk else None
    model, tiers = tiered(path, scheme, POLICIES["cache"], slow_tier)
    for policy in POLICIES.values():
        tiers.policy = policy
        count = draw.randint(0, len(tiers.keys) - 1)
        tiers.hold(some(tiers, count, draw), count + tiers.least + draw.randint(0, 7))
        for rows, same in zip((1, 3), expected, strict=True):
            assert torch.equal(logits(model, rows, decoder=decoder), same), (policy, count)


@pytest.mark.parametrize("kernel", ["torchao", "reference"])
def test_weights_of_other_kernels_are_kept_as_they_are(kernel, place):
    draw = random.Random(torch.initial_seed())
    expected = logits(whole("tiny_moe", "int8wo", kernel=kernel))
    model, tiers = tiered("tiny_moe", "int8wo", POLICIES["cache"], place, kernel=kernel)
    tiers.hold(some(tiers, 9, draw), 11)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("scheme", [s for s in SHOWN if parse(s).scheme])
def test_every_scheme_has_a_layout(scheme):
    """Bytes give back the very numbers that were written."""
    spec, ran = parse(scheme), []
    for kernel in SCHEMES[type(spec)].kernels:
        linears = {name: torch.nn.Linear(256, 128, False) for name in ("w13", "w2")}
        for linear in linears.values():
            linear.weight.data = linear.weight.data.bfloat16()
        try:
            stages = quantizer(scheme, kernel=kernel)
            linears = {name: stages(name, linear) for name, linear in linears.items()}
            layout = Layout.of(linears)
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


# ---------------------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_counts_are_those_of_the_routing(decoder, place):
    """Hits and all others add up to what the routers of a model in one memory chose, counted by
    hooks. By policy, each token and layer at a time."""
    tokens = torch.randint(4096, (1, 40), generator=torch.Generator().manual_seed(5))
    one, chosen = whole("tiny_moe", "int8wo", torch.float32), []
    for layer in one.layers:
        layer.feed_forward.router.register_forward_hook(lambda *a: chosen.append(a[2][0]))
    decoded(one, tokens, "modules")
    fast = [{0, 3}, {1}, set(), {2, 4, 5}, {7}]
    sets = [(fast[i % 5], set(c.flatten().tolist())) for i, c in enumerate(chosen)]
    hits = sum(len(held & taken) for held, taken in sets)
    model, tiers = tiered("tiny_moe", "int8wo", POLICIES["fetch"], place, torch.float32)
    for policy in ("fetch", "compute_there"):
        tiers.policy = POLICIES[policy]
        tiers.hold(fast, 9 + tiers.least)
        before = tiers.counted()
        decoded(model, tokens, decoder)
        traffic = tiers.counted().since(before)
        assert (traffic.assignments, traffic.hits) == (40 * 5 * 2, hits)
        misses = (400 - hits, 0) if policy == "fetch" else (0, 400 - hits)
        assert (traffic.fetched, traffic.there) == misses
        assert traffic.fetches == misses[0]
        assert traffic.bytes_moved == misses[0] * tiers.layout.nbytes
        assert (0 < traffic.waiting_seconds < traffic.expert_seconds) == (policy == "fetch")
        assert [set(layer.own) for layer in tiers.layers.values()] == fast
        assert tiers.quotas == list(map(len, fast))


def test_the_least_recently_used_expert_gives_way(place):
    """A layer with room for two, worked by hand: 0 1 0 2 1 0 hits 0 alone, once."""
    model, tiers = tiered("tiny_moe", "int8wo", POLICIES["cache"], place)
    tiers.hold([{6, 7}, set(), set(), set(), set()], 2 + 2)
    layer, x = tiers.layers[0], torch.randn(1, 256).bfloat16()
    row = torch.tensor([0])
    seen = []
    for expert in (0, 1, 0, 2, 1, 0):
        before = tiers.traffic.hits
        list(layer(x, {expert: row}))
        seen.append((tiers.traffic.hits - before, list(layer.own)))
    assert seen == [*((0, [7, 0]), (0, [0, 1]), (1, [1, 0]), (0, [0, 2]), (0, [2, 1]), (0, [1, 0]))]


def test_experts_without_tokens_are_neither_fetched_nor_computed(place):
    model, tiers = tiered("tiny_moe", "int8wo", POLICIES["fetch"], place)
    tiers.hold([set()] * 5, 2)
    x, row = torch.randn(4, 256).bfloat16(), torch.tensor([0, 2])
    result = dict(tiers.layers[1](x, {5: row}))
    assert result.keys() == {5} and result[5].shape == (2, 256)
    assert tiers.traffic.fetches == 1 and tiers.traffic.assignments == 2


def test_sizes_count_all_experts_wherever_they_lie(place):
    one = whole("tiny_moe", "int4wo-32")
    model, tiers = tiered("tiny_moe", "int4wo-32", POLICIES["cache"], place)
    assert weight_bytes(model) == weight_bytes(one)
    assert [step_bytes(model, rows) for rows in (1, 4)] == [
        step_bytes(one, rows) for rows in (1, 4)
    ]
    assert all(p.is_meta for name, p in model.named_parameters() if ".experts." in name)


# ---------------------------------------------------------------------------------- the file


def test_the_file_is_safetensors(place):
    """Read back by its own library: whole pages, an expert each."""
    disk = new_file(place)
    keys = [(layer, expert) for layer in (0, 2) for expert in range(3)]
    disk.reserve(keys, 8192)
    blocks = {key: torch.randint(256, (8192,), dtype=torch.uint8) for key in keys}
    for key, block in blocks.items():
        aligned = slow.pages(8192)
        aligned.copy_(block)
        disk.put(key, aligned)
    with safe_open(f"/proc/self/fd/{disk.buffered}", "pt") as opened:
        assert sorted(opened.keys()) == sorted(f"layers.{i}.experts.{e}" for i, e in keys)
        for (layer, expert), block in blocks.items():
            assert torch.equal(opened.get_tensor(f"layers.{layer}.experts.{expert}"), block)
    buffer = slow.pages(8192)
    for key, block in blocks.items():
        disk.read(key, buffer)
        assert torch.equal(buffer, block) and torch.equal(disk.in_place(key), block)
    assert not list(place.iterdir())


def test_without_o_direct_pages_are_dropped(place, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    disk = new_file(place)
    disk.reserve([(0, 0)], 4096)
    disk.put((0, 0), torch.full((4096,), 7, dtype=torch.uint8))
    buffer = slow.pages(4096)
    disk.read((0, 0), buffer)
    assert buffer.eq(7).all() and "dropped" in disk.place


def truncate(tiers):
    os.ftruncate(tiers.slow.buffered, tiers.slow.end // 2)


def cut_one_byte(tiers):
    os.ftruncate(tiers.slow.buffered, tiers.slow.end - 1)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("policy", "damage"),
    [("cache", truncate), ("fetch", cut_one_byte), ("compute_there", cut_one_byte)],
)
def test_a_damaged_file_is_an_error_of_one_line(policy, damage, decoder, place):
    model, tiers = tiered("tiny_moe", "int8wo", POLICIES[policy], place)
    tiers.hold([set()] * 5, 2)
    logits(model)
    damage(tiers)
    with pytest.raises(TierError, match="was truncated while the run used it") as raised:
        for _ in range(9):  # until a step has needed every expert
            logits(model, 3, 9, decoder)
    assert "\n" not in str(raised.value) and str(place) in str(raised.value)


def full(*arguments):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["posix_fallocate", "pwrite"])
def test_a_full_disk_says_how_much_is_needed(where, place, monkeypatch):
    monkeypatch.setattr(slow.os, where, full)
    with pytest.raises(TierError) as raised:
        tiered("tiny_moe", "int8wo", POLICIES["cache"], place)
    assert "No space left on device; the experts take" in str(raised.value)
    assert not list(place.glob("*"))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierError, match="file/slow: the experts' file cannot be written: Not a d"):
        new_file(tmp_path / "file" / "slow")


def test_an_expert_stored_in_another_way_is_refused():
    tiers = Tiers(Memory(False), load_config("tiny_moe"), CPU, POLICIES["cache"])
    stages = tiers.after(quantizer("int8wo"))
    other = tiers.after(quantizer("int4wo-32"))
    name = "layers.0.feed_forward.experts.{}.{}"

    def arrive(stages, expert):
        for linear, shape in (("w13", (256, 64)), ("w2", (32, 256))):
            module = torch.nn.Linear(*shape, bias=False).bfloat16()
            path = name.format(expert, linear)
            stages.built(path, stages.quantized(path, module))

    arrive(stages, 0)
    with pytest.raises(Exception, match="stored in another way"):
        arrive(other, 1)
