"""quantbench roofline: the arithmetic by hand, the command on a tiny model."""

import json
import random
from dataclasses import replace

import pytest
import torch

from quantbench.answer import decode_limit
from quantbench.answer.decode_limit import with_stock
from quantbench.answer.layer_limit import layer_rows
from quantbench.bench.answers import Product, Shape, ShapeTimings
from quantbench.bench.layer_timing import Stack, shapes
from quantbench.bench.store import Settings
from quantbench.commands import roofline as roofline_module
from quantbench.errors import KernelError
from quantbench.log.config import RunConfig
from quantbench.quantize import spec
from quantbench.report.limit_tables import model_remarks
from quantbench.run.bandwidth import Bandwidth
from quantbench.typed_json import to_json
from tests.bench.facts import arm_facts
from tests.bench.world import Behaviour, World
from tests.models.small import small_checkpoint
from tests.programs import json_of

CONFIG = RunConfig(context_depth=100, max_new_tokens=20, device="cpu")


@pytest.fixture
def measured(monkeypatch):
    """Measure schemes (or "scheme kernel") in a world, with an arm for each of its behaviours."""

    def run(world, *names, cycles=12, processes=2):
        world.install(monkeypatch)
        words = [name.split() for name in names]
        configs = [
            RunConfig(quantization=scheme, kernel="".join(kernel) or "auto", max_new_tokens=8)
            for scheme, *kernel in words
        ]
        settings = Settings(cycles=cycles, processes=processes, tokens=0)
        arms = decode_limit.arms_of(configs)
        return decode_limit.measure(arms, settings, command=world.command)

    return run


def test_bytes_of_a_step():
    # Steps 1 to 19 of 20 tokens read positions 0 to 130, 131, … 148: 131 + 9 = 140 in the mean,
    # of 64 bytes each.
    read = [131 + step for step in range(19)]
    assert sum(read) / 19 == 140
    own = {"weight_bytes": 1_000_000, "kv_cache_bytes": 64 * 500, "cache_size": 500}
    run = arm_facts(config=CONFIG, prompt_tokens=30, **own).run
    assert run.mean_step_bytes == 1_000_000 + 64 * 140


def test_share_of_the_limit_is_that_of_each_cycle(measured):
    """Bandwidth and speed drift together by factors: the share stays, whatever the speeds do. A
    reading that fails leaves its cycle out, and moves no other."""
    world = World.of(Behaviour(0.05), Behaviour(0.02))
    world.slowness = lambda now: 1 + 3 * (now % 2 < 0.7)
    failing = random.randrange(1, 20)
    world.readings = lambda number: None if number == failing else 1e9
    results = measured(world, "none", "int8wo")
    none, int8 = decode_limit.rows(results)
    assert len(results.bandwidth["cpu"]) == none.cycles - 1 == 23
    for row, seconds in ((none, 0.05), (int8, 0.02)):
        share = row.step_bytes / 1e9 / seconds
        # a state may start between a reading and the turn: about two in a hundred turns
        assert row.limit_share.low <= share <= row.limit_share.high
        assert row.limit_share.value == pytest.approx(share, rel=0.15)
        assert row.limit_tok_s == pytest.approx(row.bandwidth / row.step_bytes)
    assert int8.speed_up.value == pytest.approx(2.5, rel=0.15) and none.speed_up is None


def test_fewer_than_eight_cycles_give_no_interval(measured):
    world = World.of(Behaviour(0.05), Behaviour(0.02))
    results = measured(world, "none", "fp6", processes=1, cycles=7)
    for row in decode_limit.rows(results):
        assert row.limit_share.value > 0 and row.limit_share.low is None
    json.dumps(to_json(results))  # as --json writes it


def test_a_probe_that_is_too_slow_gives_no_share(measured):
    world = World.of(Behaviour(0.05), Behaviour(0.02), caveat="it is slow")
    results = measured(world, "none", "int8wo")
    for row in decode_limit.rows(results):
        assert row.bandwidth == 1e9 and row.bandwidth_probe == "fake"
        assert row.limit_share is None and row.limit_tok_s is None
        assert "limit_share" not in to_json(row)
    assert "it is slow" in model_remarks([], results.bandwidth)


def test_without_the_library_the_bandwidth_says_what_read_it(monkeypatch):
    def missing(block):
        raise KernelError("the C++ kernels need a C++ compiler")

    monkeypatch.setattr("quantbench.run.bandwidth.BYTES", 1 << 20)
    ours = Bandwidth(torch.device("cpu"))
    assert ours.caveat is None or ours.probe == "torch.amax"
    monkeypatch.setattr("quantbench.ops.cpu.bandwidth.read", missing)
    probe = Bandwidth(torch.device("cpu"))
    assert probe.probe == "torch.amax" and probe.measure() > 0
    assert probe.caveat.startswith("memory bandwidth was measured with torch.amax")
    assert "need a C++ compiler" in probe.caveat


def test_the_stock_arm_is_in_the_row_of_ours(measured):
    """Ours takes 0.05 s a step, stock 0.075 s; both drift together, and the two of a pair are in
    one group of arms."""
    world = World.of(*map(Behaviour, (0.1, 0.05, 0.075, 0.04)))
    world.slowness = lambda now: 1 + (now - 1000) / 50
    results = measured(world, "none", "int8wo", "int8wo torchao", "fp6")
    stock = results.arms[2].facts
    results.arms[2].facts = replace(stock, run=replace(stock.run, decoder="modules"))
    none, int8, fp6 = with_stock(results)
    assert int8.stock.arm == "int8wo, torchao" and fp6.stock is fp6.over_stock is none.stock is None
    assert int8.over_stock.low < 1.5 < int8.over_stock.high
    assert int8.over_stock.value == pytest.approx(1.5, rel=0.01)
    (pace, remark) = model_remarks([none, int8, fp6], results.bandwidth)
    assert "before each cycle" in pace
    assert remark == "ours × stock compares decoders, too: cpu-step with modules"
    results.arms[2].turns, results.arms[2].failed = [], "too hot"
    (_, int8, _) = with_stock(results)
    assert int8.over_stock is None
    assert model_remarks([int8], {}) == ["int8wo, torchao: failed: too hot"]


def test_pairs_of_kernels_are_not_split_by_a_group_of_arms():
    """Eight arms fit next to the baseline, and a pair is two of them."""
    names = spec.COMPARED[1:]
    kernels = {"none": ["cpu", "torch"], **{name: ["cpu", "torchao"] for name in names}}
    kernels |= dict.fromkeys(random.sample(names, 2), ["cpu"])
    arms = roofline_module._arms(RunConfig(), kernels)
    shown = [(arm.quantization, arm.kernel) for arm in arms]
    assert shown[0] == ("none", "auto") and ("none", "torch") in shown
    assert len(set(shown)) == sum(map(len, kernels.values())) == len(shown)
    for scheme in (name for name, own in kernels.items() if len(own) == 2 and name != "none"):
        place = shown.index((scheme, "auto")) - 1  # beside the baseline
        assert shown[place + 2] == (scheme, "torchao") and place % 2 == 0


def test_rows_of_a_layer():
    """1 MB in 0.1 ms is 10 GB/s, half of 20; int8 takes 0.04 ms for 0.5 MB: 12.5 GB/s."""
    shape = Shape(["w2"], 1000, 500, 22)

    def timed(scheme, kernel, seconds, count):
        quartiles = {"seconds_low": seconds, "seconds_high": seconds}
        return Product(scheme=scheme, kernel=kernel, seconds=seconds, bytes=count, **quartiles)

    products = [
        timed("none", "cpu", 1e-4, 1_000_000),
        Product(scheme="none", kernel="torch", why_not="RuntimeError: too hot"),
        timed("int8wo", "cpu", 4e-5, 500_000),
        timed("int8wo", "torchao", 8e-5, 500_000),
        timed("fp6", "cpu", 5e-5, 375_000),
    ]
    none, int8, fp6 = layer_rows(shape, ShapeTimings(products, 20e9, "fake", None, 2, 1))
    assert none.layer == "w2 1000 × 500"
    assert none.bytes_per_s == pytest.approx(10e9) and none.limit_share == pytest.approx(0.5)
    assert none.speed_up == 1 and none.over_stock is None
    assert none.stock.why_not == "RuntimeError: too hot"
    assert int8.bytes_per_s == pytest.approx(12.5e9)
    assert int8.limit_share == pytest.approx(0.625)
    assert int8.speed_up == pytest.approx(2.5) and int8.over_stock == pytest.approx(2)
    assert fp6.speed_up == pytest.approx(2) and fp6.stock is None
    slow = layer_rows(shape, ShapeTimings(products, 20e9, "torch.amax", "it is slow", 2, 1))
    assert slow[0].limit_share is None and "limit_share" not in to_json(slow[0])


def test_shapes_of_a_model():
    """TinyLlama has 22 layers: q, k, v of 2048 + 2 · 256 rows, gate and up of 2 · 5632."""
    found = shapes("dummy:TinyLlama-1.1B-Chat-v1.0")
    assert [(row.names, row.rows, row.columns, row.count) for row in found] == [
        (["wqkv"], 2560, 2048, 22),
        (["wo"], 2048, 2048, 22),
        (["w13"], 11264, 2048, 22),
        (["w2"], 2048, 5632, 22),
        (["output"], 32000, 2048, 1),
    ]


def test_a_stack_multiplies_by_every_copy():
    layer = torch.nn.Linear(8, 3, bias=False)
    stack, x = Stack(layer, 4), torch.randn(2, 8)
    assert torch.equal(stack(x), torch.cat([layer(x)] * 4, -1))
    places = {copy.weight.data_ptr() for copy in stack.copies}
    assert len(places) == 4


SHORT = ("--processes", "1", "--max_new_tokens", "4")
TWO_SHAPES = {"intermediate_size": 256, "vocab_size": 512}  # of five linear layers


def roofline_of(folder, part, *arguments, scheme="int8wo", **changes):
    """What the command writes as JSON about a small model, and what it prints."""
    small = small_checkpoint(folder, **changes)
    given = ["--checkpoint_path", small, "--device", "cpu", "--schemes", scheme, "--parts", part]
    value, result = json_of(folder / "roofline.json", "roofline", *given, *arguments)
    return value[part], result.output


def test_roofline_of_a_small_model_s_layers(tmp_path):
    """Every shape is compiled for every kernel."""
    rows, shown = roofline_of(tmp_path, "layers", "--num_layers", "1", **TWO_SHAPES)
    assert [(row["layer"], row["scheme"]) for row in rows] == [
        (layer, scheme)
        for layer in ("wqkv, w13, output 512 × 256", "wo, w2 256 × 256")
        for scheme in ("none", "int8wo")
    ]
    for row in rows:
        rate = row["bytes"] / row["seconds"]
        assert row["limit_share"] == pytest.approx(rate / row["bandwidth"])
        assert row["seconds_low"] <= row["seconds"] <= row["seconds_high"]
        out, columns = map(int, row["layer"].split()[-3::2])
        per_weight = 2 if row["scheme"] == "none" else 1
        # int8's scales, and what a kernel pads, are few compared with the weights
        assert per_weight * out * columns <= row["bytes"] <= 1.2 * per_weight * out * columns
    for unit in ("GB/s", "µs", "%"):
        assert unit in shown


def test_roofline_of_a_small_model(tmp_path, monkeypatch):
    """Eager, which saves half a minute: tests of the generator compile these kernels."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    given = ("--num_layers", "1", "--cycles", "2", *SHORT)
    (none, int8), shown = roofline_of(tmp_path, "model", *given, **TWO_SHAPES)
    assert none["limit_tok_s"] == pytest.approx(none["bandwidth"] / none["step_bytes"])
    assert int8["weight_bytes"] < none["weight_bytes"]
    assert int8["stock"]["kernel"] == "torchao" and int8["over_stock"][0] > 0
    for unit in ("GB/s", "tok/s", "%"):
        assert unit in shown


def test_the_limit_of_a_mixture_is_of_the_experts_that_are_chosen(tmp_path, monkeypatch):
    """Two layers of 4 experts, of which a token takes 2: 3 matrices of 256 × 128 bfloat16 each. The
    cache of 2 · 2 · 2 heads of 64 has a few hundred positions at most."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    sizes = {"model_type": "qwen3_moe", "moe_intermediate_size": 128}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    given = ("--cycles", "1", *SHORT, "--only_ours")
    (row,), _ = roofline_of(tmp_path, "model", *given, scheme="none", **sizes)
    chosen = row["weight_bytes"] - 2 * 2 * 3 * 256 * 128 * 2
    assert chosen <= row["step_bytes"] <= chosen + 500 * 2 * 2 * 2 * 64 * 2
    assert row["limit_tok_s"] == pytest.approx(row["bandwidth"] / row["step_bytes"])
    assert "stock" not in row
