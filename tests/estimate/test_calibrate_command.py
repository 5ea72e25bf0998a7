"""quantbench calibrate, all of it, with models and blocks so small that it takes seconds: what it
writes is what `estimate --device here` reads, and nothing is written where it does not end."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantbench.__main__ import commands
from quantbench.errors import KernelError
from quantbench.estimate import (
    alone,
    calibration_file,
    calibration_models,
    datasheets,
    exchanging,
    machine,
    power,
    probe,
)
from quantbench.estimate.calibration import ExchangePoint, LeftBehind
from quantbench.run import bandwidth, energy
from tests.estimate import invented
from tests.fake_counter import Counter as FakeCounter

SCHEMES = ("none", "int8wo")
EXCHANGES = [
    ExchangePoint(kind, "shared memory", 2, size, 1e-5)
    for kind in ("all_reduce", "all_gather")
    for size in (2048, 16384)
]
RESTING, LEFT = 300_000_000, LeftBehind(1.25, 2.5)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Models, blocks and pieces of work of a hundredth of their size. What two ranks exchange and
    what a process takes besides its model have tests of their own, which start processes."""
    for name, config in calibration_models.MODELS.items():
        few = dataclasses.replace(
            config, dim=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=256,
            vocab_size=512, max_position=1024,
        )  # fmt: skip
        monkeypatch.setitem(calibration_models.MODELS, name, few)
    for module, changes in (
        (alone, {"HEADS": [(4, 2, 32)], "ROWS": (1, 4, 16, 64), "DEPTHS": ((1, 64), (4, 128))}),
        (alone, {"QUANTIZED_DEPTHS": ((1, 64), (4, 128)), "AT_LEAST": 0.0, "STREAMED": 1 << 16}),
        (alone, {"CHUNKS": ((1, 32, 0), (1, 32, 32), (4, 16, 16)), "PASSES": ((1, 32), (4, 16))}),
        (alone, {"BLOCKS": (1 << 16, 1 << 20), "STACKS": (1 << 16, 1 << 20), "SETTLED": 0.0}),
        (alone, {"STACKED_POSITIONS": 64}),
        (bandwidth, {"BYTES": 1 << 20}),
        (machine, {"ROUNDS": 1, "STEP_DEPTHS": (0, 300), "LONGEST_PASS": 64}),
        (machine, {"AT_LEAST_STEPS": 0.0, "AT_LEAST_PROMPTS": 0.0}),
        (probe, {"PRODUCT": (16, 64, 64), "PATIENCE": 0.0, "TRIES": 1}),
        (power, {"AT_LEAST": 0.0, "PROMPT": 32, "STEPS": 4}),
        (exchanging, {"measured": lambda device, precision: EXCHANGES}),
    ):
        for name, value in changes.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(
        "quantbench.compare.sampling.resting.resting_bytes", lambda kind, precision, scheme: RESTING
    )
    monkeypatch.setattr(
        "quantbench.compare.sampling.resting.left_behind", lambda precision, scheme, resting: LEFT
    )
    monkeypatch.setattr(energy, "find", lambda kind, cards: FakeCounter())
    monkeypatch.setattr(energy, "idle_watts", lambda counter: 0.0)
    monkeypatch.setattr(energy, "step_of", lambda counter: 0.05)
    monkeypatch.setattr(energy, "power_limit", lambda kind, cards: 65.0)
    default = tmp_path / "cache" / "quantbench" / "calibration.json"
    monkeypatch.setattr("quantbench.estimate.calibration_file.default_path", lambda: default)


def run(*words):
    return CliRunner().invoke(commands, list(words))


def calibrate(*words, schemes=SCHEMES):
    return run("calibrate", "--device", "cpu", "--schemes", ",".join(schemes), *words)


def files_in(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_what_it_writes_is_what_estimate_reads(tmp_path):
    path, out = tmp_path / "machine.json", tmp_path / "out.json"
    result = calibrate("--json", str(path))
    assert result.exit_code == 0, result.output
    assert files_in(tmp_path) == ["machine.json"]
    measured = calibration_file.load(str(path))
    assert (measured.precision, measured.base_bytes) == ("bfloat16", RESTING)
    assert measured.left_behind == LEFT
    assert measured.exchanges == EXCHANGES and len(measured.bandwidth) == 2
    assert (
        {p.scheme for p in measured.products} == {p.scheme for p in measured.wholes} == {*SCHEMES}
    )
    assert {p.model for p in measured.wholes} == {*calibration_models.MODELS}
    assert {p.rows for p in measured.products} == {1, 4, 16, 64}
    assert {p.cache for p in measured.attention} == {"dense", "int8", "fp8", "int4"}
    assert {p.name for p in measured.cache_stacks} == {"dense", "int8", "fp8", "int4"}
    assert {(p.name, p.rows) for p in measured.weight_stacks} == {
        (scheme, rows) for scheme in SCHEMES for rows in (1, 4, 16)
    }
    assert measured.power.limit == 65.0 and measured.power.prompt > 0 and measured.power.step > 0

    words = ("--checkpoint_path", "dummy:TinyLlama-1.1B-Chat-v1.0", "--quantization", "int8wo")
    result = run("estimate", *words, "--device", "here", "--calibration", str(path),
                 "--json", str(out))  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    for key in ("prompt_seconds", "token_seconds", "tokens_per_second", "joules_per_token"):
        assert 0 < found[key]["value"] < math.inf
    assert found["warnings"] == [] and found["memory"]["token"]["workspace"] == RESTING
    assert f"calibration of {measured.name}" in found["token_seconds"]["source"]
    assert "a fake while calibrating" in found["joules_per_token"]["source"]


@pytest.mark.parametrize("schemes", range(1, 8))
def test_rounds_of_attention_lie_between_the_schemes(monkeypatch, schemes):
    monkeypatch.setattr(machine, "ROUNDS", 3)
    each = [machine.rounds_of_attention(number, schemes) for number in range(schemes)]
    assert sum(each) == 3 and each[0] and max(each) - min(each) <= 1


def test_stacks_are_measured_in_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROUNDS", 2)
    path = tmp_path / "machine.json"
    assert calibrate("--json", str(path)).exit_code == 0
    measured = calibration_file.load(str(path))
    for points in (measured.attention, measured.weight_stacks, measured.cache_stacks):
        times = Counter(dataclasses.replace(p, seconds=1.0, speed=invented.SPEED) for p in points)
        assert {*times.values()} == {2}


@pytest.mark.parametrize("disturbed", [False, True])
def test_where_others_disturbed_it_it_says_what_to_do(tmp_path, monkeypatch, disturbed):
    monkeypatch.setattr(probe, "disturbed", lambda use: disturbed)
    result = calibrate("--json", str(tmp_path / "machine.json"), schemes=["none"])
    (line,) = [line for line in result.output.splitlines() if "this one used" in line]
    assert line.endswith(": calibrate again with nothing else running") == disturbed


def test_without_a_path_it_is_this_machine_s(tmp_path):
    assert calibrate(schemes=["none"]).exit_code == 0
    assert files_in(tmp_path) == ["calibration.json"]
    result = run("estimate", "--checkpoint_path", "tiny", "--device", "here")
    assert result.exit_code == 0, result.output
    assert "as read now" in result.stdout


def test_a_place_of_its_own_that_takes_no_file_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(machine, "measure", interrupted)
    place = Path("/proc/nowhere/calibration.json")
    monkeypatch.setattr("quantbench.estimate.calibration_file.default_path", lambda: place)
    result = calibrate(schemes=["none"])
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert "the folder of this machine's calibration" in result.output


def interrupted(*given):
    raise KeyboardInterrupt


def no_kernel(*given):
    raise KernelError("int8wo has no kernel here")


ENDS = {
    "Ctrl-C before the last figure": (power, "measured", interrupted, "nterrupted"),
    "Ctrl-C while it writes": (json, "dumps", interrupted, "nterrupted"),
    "no kernel": (alone, "products", no_kernel, "int8wo has no kernel here"),
    "above the datasheet": (
        datasheets,
        "known",
        lambda name: dataclasses.replace(datasheets.DATASHEETS["NVIDIA L4"], bandwidth=1.0),
        "above the datasheet's 0 GB/s; nothing is written",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_where_it_does_not_end_the_file_is_as_it_was(tmp_path, monkeypatch, end):
    module, name, instead, said = ENDS[end]
    path = tmp_path / "machine.json"
    invented.calibration().save("--json", str(path))
    before = path.read_bytes()
    monkeypatch.setattr(module, name, instead)
    result = calibrate("--json", str(path), schemes=["int8wo"])
    assert result.exit_code not in (0, 2)
    assert said in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr
    assert files_in(tmp_path) == ["machine.json"] and path.read_bytes() == before
