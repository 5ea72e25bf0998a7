"""quantbench roofline and growth: the arithmetic by hand, the commands on a tiny model."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from quantbench.compare.sampling.results import ArmResult, ArmSample, Results, Settings

from quantbench.answer.interval import Interval
from quantbench.bench.answers import Product, Reading, Shape, ShapeTimings
from quantbench.compare.commands import growth as growth_module
from quantbench.compare.commands.growth import growth
from quantbench.compare.commands.roofline import layer_rows, model_remarks, roofline, with_stock
from quantbench.compare.figures import decode_limit as whole
from quantbench.compare.figures.limits import over, share, step_bytes
from quantbench.compare.sampling.layer_timing import Stack, kernels, shapes
from quantbench.log.config import RunConfig
from quantbench.report.lines import draw
from quantbench.typed_json import to_json
from tests.bench.facts import arm_facts
from tests.models.small import small_checkpoint

FAKE = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))


CONFIG = RunConfig(context_depth=100, max_new_tokens=20, device="cpu")


def facts():
    return arm_facts(
        config=CONFIG,
        prompt_tokens=30,
        weight_bytes=1_000_000,
        kv_cache_bytes=64 * 500,
        cache_size=500,
    )


def arm(step_seconds, prompt_seconds=1.0):
    """Samples of four steps each, one a round, each of another process."""
    samples = [
        ArmSample(
            prefill_seconds=prompt_seconds,
            decode_seconds=4 * seconds,
            tok_s=5 / (prompt_seconds + 4 * seconds),
            prefill_tok_s=30 / prompt_seconds,
            decode_tok_s=1 / seconds,
            token_seconds=[seconds] * 4,
            block=number,
            round=number,
            process=number,
            started=float(number),
        )
        for number, seconds in enumerate(step_seconds)
    ]
    return ArmResult("arm", "", [], facts=facts(), samples=samples)


def test_bytes_of_a_step():
    # Steps 1 to 19 of 20 tokens read positions 0 to 130, 131, … 148: 131 + 9 = 140 in the mean,
    # of 64 bytes each.
    read = [131 + step for step in range(19)]
    assert sum(read) / 19 == 140
    assert step_bytes(facts().run) == 1_000_000 + 64 * 140


def test_share_of_the_limit_is_that_of_each_round():
    """Bandwidth and speed drift together: 50 % in every round, whatever the medians say."""
    bandwidth = [1e9, 2e9, 4e9, 3e9, 2e9]
    steps = [2 * 1e6 / rate for rate in bandwidth]
    readings = [Reading(rate, number, "fake") for number, rate in enumerate(bandwidth)]
    estimate = share(arm(steps), 1e6, readings)
    assert math.exp(estimate.mean) == pytest.approx(0.5)
    assert estimate.standard_error == pytest.approx(0, abs=1e-9) and estimate.freedom == 4


def test_a_share_has_an_interval_from_four_processes_on():
    """Shares of e^-1, e^-1, e^1, e^1: mean logarithm 0, standard deviation 2/√3, and Student's t
    of 3 degrees of freedom is 3.182 at 95 %."""
    steps = [math.e, math.e, 1 / math.e, 1 / math.e]
    readings = [Reading(1.0, number, "fake") for number in range(4)]
    shown = Interval.of(share(arm(steps), 1.0, readings))
    assert shown.value == pytest.approx(1)
    assert shown.high == pytest.approx(math.exp(3.182 * 2 / math.sqrt(3) / 2), rel=1e-3)
    few = Interval.of(share(arm(steps[:3]), 1.0, readings))
    assert few.low is None and few.high is None


def test_a_round_without_a_reading_is_left_out():
    """Round 1's reading failed: 1e9 before round 0, 4e9 before round 2, and so on. By position in
    the list, round 1 would be held against 4e9. The reading after the last round is of no round."""
    rates = {0: 1e9, 2: 4e9, 3: 3e9, 4: 2e9, None: 9e9}
    steps = [2 * 1e6 / rates.get(number, 1e3) for number in range(5)]
    readings = [Reading(rate, number, "fake") for number, rate in rates.items()]
    estimate = share(arm(steps), 1e6, readings)
    assert math.exp(estimate.mean) == pytest.approx(0.5) and estimate.freedom == 3
    assert share(arm(steps), 1e6, []) is None


def test_ours_over_theirs():
    ours, theirs = arm([0.1] * 5, 2.0), arm([0.15] * 5, 1.0)
    assert math.exp(over(ours, theirs, "token_latency").mean) == pytest.approx(1.5)
    assert math.exp(over(ours, theirs, "prefill_seconds").mean) == pytest.approx(0.5)


def test_rows_of_a_layer():
    """1 MB in 0.1 ms is 10 GB/s, half of 20; int8 takes 0.04 ms for 0.5 MB: 12.5 GB/s."""
    shape = Shape(["w2"], 1000, 500, 22)

    def product(scheme, kernel, seconds, count):
        quartiles = {"seconds_low": seconds, "seconds_high": seconds}
        return Product(scheme=scheme, kernel=kernel, seconds=seconds, bytes=count, **quartiles)

    products = [
        product("none", "cpu", 1e-4, 1_000_000),
        Product(scheme="none", kernel="torch", why_not="RuntimeError: too hot"),
        product("int8wo", "cpu", 4e-5, 500_000),
        product("int8wo", "torchao", 8e-5, 500_000),
        product("fp6", "cpu", 5e-5, 375_000),
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


def test_the_stock_arm_is_in_the_row_of_ours_with_an_interval_of_the_ratio():
    """Ratios of 1.5 · (1, 1, e, e) in four processes: standard deviation 1/√3 of the logarithms, so
    that 95 % are 3.182 / √3 / 2 around their mean. Both kernels drift together."""
    drift = [1.0, 5.0, 2.0, 0.5]
    seconds = {
        "int8wo": drift,
        "int8wo, torchao": [1.5, 7.5, 3.0 * math.e, 0.75 * math.e],
        "fp6": [1.0] * 4,
    }
    arms = [replace(arm(each), name=name) for name, each in seconds.items()]
    arms[1].facts = replace(arms[1].facts, run=replace(facts().run, decoder="modules"))
    results = Results(Settings(), arms, "none")
    int8, fp6 = with_stock(results)
    assert int8.stock.arm == "int8wo, torchao" and fp6.stock is fp6.over_stock is None
    assert int8.over_stock.value == pytest.approx(1.5 * math.exp(0.5))
    reach = math.exp(3.182 / math.sqrt(3) / 2)
    assert int8.over_stock.high / int8.over_stock.value == pytest.approx(reach, rel=1e-3)
    (remark,) = model_remarks([int8, fp6], {})
    assert remark == "ours × stock compares decoders, too: cpu-step with modules"
    int8.stock.decoder = int8.decoder
    assert model_remarks([int8, fp6], {}) == []
    arms[1].samples, arms[1].failed = [], "too hot"
    int8, _ = with_stock(results)
    assert int8.over_stock is None
    assert model_remarks([int8], {}) == ["int8wo, torchao: failed: too hot"]


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


def test_kernels_to_time():
    found = kernels(["none", "int8wo", "fp6"], "cpu", "bfloat16")
    assert found["none"][-1] == "torch" and found["int8wo"][-1] == "torchao"
    assert "torchao" not in found["fp6"]


def run(command, *arguments):
    return CliRunner().invoke(command, list(arguments), catch_exceptions=True)


def message(result):
    return f"{result.output} {result.exception}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--schemes", "int9wo"], "int8wo"),
        (["--schemes", ""], "--schemes takes a value; given: ''"),
        (["--schemes", "autoquant"], "autoquant"),
        (["--parts", "layer"], "--parts takes layers, model; given: 'layer'"),
        (["--device", "toaster"], "--device 'toaster' is no device"),
        (["--precision", "bf16"], "--precision takes one of bfloat16"),
        (["--batch_size", "0"], "batch_size"),
        (["--json"], "--json"),
    ],
)
def test_what_roofline_refuses(arguments, said):
    result = run(roofline, *arguments)
    assert result.exit_code != 0 and said in message(result)
    assert "\n" not in str(result.exception)


def roofline_of(folder, part, *arguments):
    """What the command writes as JSON about one layer of a small model, and what it prints. Five
    linear layers have two shapes: every shape is compiled for every kernel."""
    small = small_checkpoint(folder, intermediate_size=256, vocab_size=512)
    given = ["--checkpoint_path", small, "--device", "cpu", "--schemes", "int8wo", "--parts", part]
    path = folder / "roofline.json"
    result = run(roofline, *given, "--num_layers", "1", *arguments, "--json", str(path))
    assert result.exit_code == 0, message(result)
    return json.loads(path.read_text())[part], result.output


def test_roofline_of_a_small_model_s_layers(tmp_path):
    rows, shown = roofline_of(tmp_path, "layers")
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
        # int8's scales, and what a kernel pads, are few beside the weights
        assert per_weight * out * columns <= row["bytes"] <= 1.2 * per_weight * out * columns
    for unit in ("GB/s", "µs", "%"):
        assert unit in shown


def test_roofline_of_a_small_model(tmp_path, monkeypatch):
    """Eager, which saves half a minute: tests of the generator compile these kernels."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    short = ("--max_rounds", "2", "--processes", "1", "--max_new_tokens", "4")
    (none, int8), shown = roofline_of(tmp_path, "model", *short)
    assert none["limit_tok_s"] == pytest.approx(none["bandwidth"] / none["step_bytes"])
    assert int8["weight_bytes"] < none["weight_bytes"]
    assert int8["stock"]["kernel"] == "torchao" and int8["over_stock"][0] > 0
    for unit in ("GB/s", "tok/s", "%"):
        assert unit in shown


def test_the_limit_of_a_mixture_is_of_the_experts_that_are_chosen(tmp_path, monkeypatch):
    """Two layers of 4 experts, of which a token takes 2: 3 matrices of 256 × 128 bfloat16 each. The
    cache of 2 · 2 · 2 heads of 64 has a few hundred positions at most."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    model = small_checkpoint(tmp_path, model_type="qwen3_moe", **sizes)
    path = tmp_path / "roofline.json"
    given = ["--checkpoint_path", model, "--device", "cpu", "--schemes", "none", "--parts", "model"]
    short = ["--max_rounds", "1", "--processes", "1", "--max_new_tokens", "4", "--only_ours"]
    result = run(roofline, *given, *short, "--json", str(path))
    assert result.exit_code == 0, message(result)
    (row,) = json.loads(path.read_text())["model"]
    chosen = row["weight_bytes"] - 2 * 2 * 3 * 256 * 128 * 2
    assert chosen <= row["step_bytes"] <= chosen + 500 * 2 * 2 * 2 * 64 * 2
    assert row["limit_tok_s"] == pytest.approx(row["bandwidth"] / row["step_bytes"])
    assert "stock" not in row


# --------------------------------------------------------------------------------- growth


def test_limits_of_a_measurement():
    """The fake worker: 10 MB of weights at 1 GB/s allow 100 steps a second; it makes one."""
    configs = [RunConfig(max_new_tokens=5), RunConfig(quantization="int8wo", max_new_tokens=5)]
    results = whole.measure(configs, Settings.of_rounds(4, 4), command=FAKE)
    assert len(results.bandwidth["cpu"]) == results.rounds == 4
    none, int8 = whole.rows(results)
    assert none.limit_tok_s == pytest.approx(1e9 / none.step_bytes)
    # steps of one second, with a noise of 0.1 %: four rounds are within 1 %
    assert none.limit_share.value == pytest.approx(none.step_bytes / 1e9, rel=0.01)
    assert int8.speed_up.value == pytest.approx(1, rel=0.01) and none.speed_up is None


def points():
    found = []
    for axis, values in (("layers", (4, 8)), ("batch", (1, 16)), ("depth", (0, 65536))):
        for value in values:
            for scheme in ("none", "int8wo"):
                figures = dict.fromkeys(growth_module.FIGURES)
                figures |= {"decode_tok_s": 10.0 + value % 7, "limit_tok_s": 20.0}
                found.append(growth_module.Point(axis, value, scheme, **figures))
    return found


def test_the_picture_is_the_same_to_the_byte(tmp_path):
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    draw(points(), first)
    draw(points(), second)
    assert first.read_bytes() == second.read_bytes()
    text = "".join(ElementTree.parse(first).getroot().itertext())
    assert "number of layers" in text and "int8wo" in text and "64k" in text


def test_new_points_take_the_place_of_old_ones():
    old = points()
    new = [replace(old[0], decode_tok_s=99.0)]
    found = growth_module.merged(old, new)
    assert len(found) == len(old) and new[0] in found and old[0] not in found


def test_growth_measures_one_point(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--over", "layers", "--values", "1", "--checkpoint_path", "tiny", "--schemes", "none"]
    files = ["--json", "growth.json", "--chart", "growth.svg"]
    result = run(growth, *given, *files, "--max_rounds", "1", "--max_new_tokens", "4")
    assert result.exit_code == 0, message(result)
    (point,) = json.loads(Path("growth.json").read_text())["points"]
    assert (point["axis"], point["value"], point["scheme"]) == ("layers", 1, "none")
    assert math.isfinite(point["limit_share"][0]) and Path("growth.svg").exists()
    assert run(growth, "--over", "none", *files).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--over", "width"], "--over takes layers, batch, depth, none; given: 'width'"),
        (["--values", "1"], "name it with --over"),
        (["--over", "batch", "--values", "two"], "whole numbers"),
        (["--over", "none", "--json", "none.json", "--chart", "a.svg"], "holds no points yet"),
        (["--over", "none", "--json", "wrong.json"], "is not what this command writes"),
        (["--schemes", "int9wo"], "int8wo"),
        (["--over", "none", "--chart", "growth.png"], "end its name in .svg"),
        (["--over", "none,none"], "--over names none twice; name it once"),
        (["--over", "batch,none"], "--over none measures nothing: leave out the others"),
        (
            ["--over", "batch", "--values", "1,0", "--json", "a.json", "--chart", "a.svg"],
            "--batch_size takes a whole number from 1",
        ),
        (["--over", "batch", "--values", "²"], "whole numbers"),
        (
            ["--checkpoint_path", "./no/such", "--json", "a.json", "--chart", "a.svg"],
            "./no/such does not exist",
        ),
    ],
)
def test_what_growth_refuses(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text("[]")
    result = run(growth, *arguments)
    assert result.exit_code != 0 and said in message(result)
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.json"]
