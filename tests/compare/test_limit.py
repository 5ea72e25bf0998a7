"""How near decoding comes to the limit of memory: the arithmetic by hand, without processes."""

import json
import random

import pytest
import torch

from benchmarks import kernels
from quantbench.bench.layer_timing import Stack
from quantbench.bench.store import ArmResult, Settings
from quantbench.compare.limit import caveats
from quantbench.compare.rows import rows
from quantbench.errors import KernelError
from quantbench.log.config import RunConfig, argv
from quantbench.peers import answer as peered
from quantbench.run.bandwidth import BandwidthProbe
from quantbench.typed_json import to_json
from tests import programs
from tests.bench.facts import arm_facts
from tests.bench.world import Behaviour, World
from tests.models.small import small_checkpoint

CONFIG = RunConfig(context_depth=100, max_new_tokens=20, device="cpu")


@pytest.fixture
def measured(monkeypatch):
    """Measure schemes in a world, with an arm for each of its behaviours."""

    def run(world, *schemes, cycles=12, processes=2):
        world.install(monkeypatch)
        configs = [RunConfig(quantization=scheme, max_new_tokens=8) for scheme in schemes]
        arms = [ArmResult(one.quantization, "", argv(one, said=True)) for one in configs]
        settings = Settings(cycles=cycles, processes=processes, tokens=0)
        return peered.measure(arms, settings, command=world.command)

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
    none, int8 = rows(results)
    assert len(results.bandwidth["cpu"]) == len(results.turns(0, "decode")) - 1 == 23
    for arm, row, seconds in zip(results.arms, (none, int8), (0.05, 0.02), strict=True):
        share = arm.run.mean_step_bytes / 1e9 / seconds
        # a state may start between a reading and the turn: about two in a hundred turns
        assert row.limit_share.low <= share <= row.limit_share.high
        assert row.limit_share.value == pytest.approx(share, rel=0.15)


def test_fewer_than_eight_cycles_give_no_interval(measured):
    world = World.of(Behaviour(0.05), Behaviour(0.02))
    results = measured(world, "none", "fp6", processes=1, cycles=7)
    for row in rows(results):
        assert row.limit_share.value > 0 and row.limit_share.low is None
    json.dumps(to_json(results))  # as --output writes it


def test_a_probe_that_is_too_slow_gives_no_share(measured):
    world = World.of(Behaviour(0.05), Behaviour(0.02), caveat="it is slow")
    results = measured(world, "none", "int8wo")
    assert caveats(results.bandwidth["cpu"]) == ["it is slow"]
    for row in rows(results):
        assert row.limit_share is None and "limit_share" not in to_json(row)


def test_without_the_library_the_bandwidth_says_what_read_it(monkeypatch):
    def missing(block):
        raise KernelError("the C++ kernels need a C++ compiler")

    monkeypatch.setattr("quantbench.run.bandwidth.BYTES", 1 << 20)
    ours = BandwidthProbe(torch.device("cpu"))
    assert ours.caveat is None or ours.probe == "torch.amax"
    monkeypatch.setattr("quantbench.ops.cpu.bandwidth.read", missing)
    probe = BandwidthProbe(torch.device("cpu"))
    assert probe.probe == "torch.amax" and probe.measure() > 0
    assert probe.caveat.startswith("memory bandwidth was measured with torch.amax")
    assert "need a C++ compiler" in probe.caveat


def test_the_limit_of_a_mixture_is_of_the_experts_that_are_chosen(in_tmp):
    """Two layers of 4 experts, of which a token takes 2: 3 matrices of 256 × 128 bfloat16 each."""
    sizes = {"model_type": "qwen3_moe", "moe_intermediate_size": 128}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    small = small_checkpoint(in_tmp, **sizes)
    given = ["--checkpoint_path", small, "--device", "cpu", "--max_new_tokens", "2"]
    given += ["--num_samples", "1", "--write_result", "none", "--output_json_path", "run.json"]
    programs.worked("generate", *given)
    facts = json.loads((in_tmp / "run.json").read_text())
    assert facts["weight_bytes"] - facts["step_weight_bytes"] == 2 * 2 * 3 * 256 * 128 * 2


# ----------------------------------------------------------------------------- single layers


def test_a_stack_multiplies_by_every_copy():
    layer = torch.nn.Linear(8, 3, bias=False)
    stack, x = Stack(layer, 4), torch.randn(2, 8)
    assert torch.equal(stack(x), torch.cat([layer(x)] * 4, -1))
    places = {copy.weight.data_ptr() for copy in stack.copies}
    assert len(places) == 4


def test_the_script_times_every_shape_of_a_model(tmp_path, monkeypatch, capsys):
    """Eager, and on little memory, which saves a minute: tests of autoquant compile the race."""
    eager = torch.nn.Module.__call__
    monkeypatch.setattr("quantbench.quantize.race._compiled", lambda device: eager)
    for module in ("bench.layer_timing", "run.bandwidth"):
        monkeypatch.setattr(f"quantbench.{module}.BYTES", 1 << 20)
    monkeypatch.setattr("quantbench.quantize.race.SECONDS", 0.0)
    small = small_checkpoint(tmp_path, intermediate_size=256, vocab_size=512)
    given = ["--checkpoint_path", small, "--schemes", "int8wo", "--json", f"{tmp_path}/out.json"]
    monkeypatch.setattr("sys.argv", ["kernels", *given])
    assert kernels.main() == 0
    shown = capsys.readouterr().out
    layers = json.loads((tmp_path / "out.json").read_text())["layers"]
    assert [(layer["rows"], layer["columns"]) for layer in layers] == [(512, 256), (256, 256)]
    for layer in layers:
        products = layer["timings"]["products"]
        assert {product["scheme"] for product in products} == {"none", "int8wo"}
        for product in products:
            assert product["seconds_low"] <= product["seconds"] <= product["seconds_high"]
            least = (2 if product["scheme"] == "none" else 1) * layer["rows"] * layer["columns"]
            # int8's scales, and what a kernel pads, are few compared with the weights
            assert least <= product["bytes"] <= 1.2 * least
    assert "wqkv, w13, output 512 × 256: memory was read at" in shown and "of the limit" in shown
