"""A run's estimate beside its measurement, on an invented machine."""

import dataclasses
import json

import pytest
import torch
from quantbench.estimate.calibration import Power, Speed

from quantbench.estimate.beside import Estimator, Expected, beside, damaged, expected, report_of
from quantbench.log.table import Estimates, estimates
from quantbench.models.presets import preset
from quantbench.run.facts import Device, Measured, Peaks, Ready, Sample
from quantbench.typed_json import from_json, to_json
from tests.compare.facts import FACTS
from tests.estimate import invented

CONFIG = preset("TinyLlama-1.1B-Chat-v1.0")
NEW = 11


def measured(step=0.05, **changes):
    facts = dataclasses.replace(
        FACTS,
        architecture=CONFIG,
        config=dataclasses.replace(FACTS.config, max_new_tokens=NEW),
        prompt_tokens=128,
        cache_size=139,
        device=Device("cpu", "Invented CPU", 2),
        weight_bytes=1_034_420_224,
        step_weight_bytes=0,  # the same: the model has no experts
        **changes,
    )
    sample = Sample(0.5, step * (NEW - 1), NEW / (0.5 + step * (NEW - 1)), 256.0, 1 / step)
    return Measured(facts, Ready(None, [1.0], True), None,
                    Peaks({}, {}, {"resident": 2_000_000_000}), [sample])  # fmt: skip


@pytest.fixture(autouse=True)
def versions(monkeypatch):
    monkeypatch.setattr(
        "quantbench.estimate.beside.versions", lambda: invented.calibration().versions
    )


def test_estimated_measured_error():
    estimate = beside(measured(), invented.calibration())
    token = estimate.figures["token_seconds"]
    expected_step = invented.whole(CONFIG, "int8wo", 1, 1, 133)
    assert token.estimated == pytest.approx(expected_step, rel=0.02)
    assert token.measured == pytest.approx(0.05)
    error = to_json(estimate)["token_seconds"]["error"]
    assert error == pytest.approx(token.estimated / 0.05 - 1)
    assert set(estimate.figures) == {
        "prompt_seconds", "token_seconds", "tokens_per_second", "peak_memory_bytes",
    }  # fmt: skip


def test_the_share_of_what_memory_allows():
    """1.03 GB at 50 GB/s are 20.7 ms; the cache of 133 positions adds 3 MB. 52 ms were measured."""
    estimate = beside(measured(step=0.052), invented.calibration())
    assert estimate.share_of_limit == pytest.approx(0.0207 / 0.052, rel=0.01)
    assert "a step runs at 40% of what this machine allows for these bytes" in estimate.sentences[0]


def test_without_a_calibration_it_says_how_to_make_one(monkeypatch):
    monkeypatch.setattr("quantbench.estimate.beside.of_this_machine", lambda kind: None)
    report = report_of(measured())
    assert to_json(report)["estimate"] == {"why_not": "not calibrated"}
    assert "quantbench calibrate" in report.reasons[-1]
    assert expected(measured().facts) == Expected() and damaged("cpu") is None


def test_a_calibration_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text("{}")
    monkeypatch.setattr("quantbench.estimate.calibration_file.default_path", lambda: path)
    report, said = report_of(measured()), damaged("cpu")
    assert said.startswith(f"this machine's calibration, {path}: no calibration; `quantbench cal")
    assert to_json(report)["estimate"] == {"why_not": said} and report.reasons[-1] == said
    assert expected(measured().facts) == Expected(why_not=said)


def test_what_is_expected_before_a_run():
    """The same figures as beside it, and its limit."""
    before = expected(measured().facts, invented.calibration())
    after = beside(measured(), invented.calibration())
    assert before.figures == {name: one.estimated for name, one in after.figures.items()}
    assert before.limit.bytes_per_s == 50e9 and before.why_not is None
    assert before.limit.share(0.05) == after.share_of_limit
    assert before.limit.sentence(0.05, before.figures["token_seconds"]) == after.sentences[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kernel": "reference"}, "int8wo on kernel reference was not calibrated"),
        ({"decoder": "modules"}, "decoder modules over a dense cache was not calibrated"),
        ({"scheme": "fp6"}, "fp6 on kernel cpu was not calibrated"),
    ],
    ids=str,
)
def test_a_run_that_was_not_calibrated(changes, reason):
    calibration = invented.calibration()
    assert to_json(beside(measured(**changes), calibration)) == {"why_not": reason}
    assert Estimator(calibration).reading(measured(**changes).facts) is None
    assert expected(measured(**changes).facts, calibration) == Expected(why_not=reason)


def test_another_machine():
    estimate = beside(measured(), invented.calibration(name="Other CPU"))
    assert estimate.why_not == "calibrated with name Other CPU, here Invented CPU"
    assert estimate.sentences == [f"no estimate: {estimate.why_not}"]


def test_the_table_of_a_run():
    """Estimated, measured and error below the run's own line."""
    value = to_json(beside(measured(), invented.calibration()))
    head, prompt, step, rows, peak = estimates(from_json(Estimates, value)).splitlines()
    assert head.split() == ["estimated", "measured", "error"]
    error = value["token_seconds"]["error"]
    assert step.split() == ["a", "step", *f"{1e3 * value['token_seconds']['estimated']:.3g} ms "
                            f"50 ms {error:+.1%}".split()]  # fmt: skip
    assert "500 ms" in prompt and "2.00 GB" in peak and "tok/s" in rows
    assert estimates(from_json(Estimates, {"why_not": "not calibrated"})) == ""


@pytest.mark.parametrize(("counter", "note"), [(None, True), ("RAPL (package-0)", False)])
def test_energy_that_was_not_measured_stands_alone(counter, note):
    """It is a bound only where nothing counted while calibrating."""
    watts = 30.0 if counter else None
    calibration = invented.calibration(power=Power(65.0, counter, watts, watts))
    value = to_json(beside(measured(), calibration))
    (line,) = (
        line for line in estimates(from_json(Estimates, value)).splitlines() if "J/token" in line
    )
    assert ("≤ " in line, "no counter; power limit × time is an upper bound" in line) == (
        note,
        note,
    )


def test_a_second_estimate_at_the_speed_beside_the_run():
    """A step that reads its weights takes longer, but at most 1.5 times in the exponent, where the
    memory has half of the calibration's speed; at that speed itself both estimates are the same."""
    calibration = invented.calibration()
    usual = calibration.speed
    same = beside(measured(), calibration, usual)
    assert same.at_speed.figures["token_seconds"].estimated == pytest.approx(
        same.figures["token_seconds"].estimated
    )
    slow = beside(measured(), calibration, Speed(usual.read / 2, usual.multiply))
    first, second = (f["token_seconds"] for f in (slow.figures, slow.at_speed.figures))
    assert 1.1 < second.estimated / first.estimated < 2**1.5
    assert (first.measured, second.measured) == (0.05, pytest.approx(0.05))
    value = json.loads(json.dumps(to_json(slow)))
    assert value["at_speed"]["read"] == usual.read / 2
    assert set(value["at_speed"]) == {
        "read", "multiply", "prompt_seconds", "token_seconds", "tokens_per_second",
    }  # fmt: skip
    at_speed = value["at_speed"]["token_seconds"]
    assert at_speed["error"] == pytest.approx(at_speed["estimated"] / 0.05 - 1)
    lines = estimates(from_json(Estimates, value)).splitlines()
    (line,) = (line for line in lines if line.startswith(f"a step at {usual.read / 2e9:.1f} GB/s"))
    assert f"{1e3 * at_speed['estimated']:.3g} ms" in line and f"{at_speed['error']:+.1%}" in line


def test_the_speed_is_read_where_there_is_room_for_it(monkeypatch):
    """By the probe that the calibration was made with; not where its memory might not be free, nor
    where other ranks may be computing."""
    monkeypatch.setattr("quantbench.estimate.probe.Probe", FakeProbe)
    monkeypatch.setattr(
        "quantbench.estimate.beside.of_this_machine", lambda kind: invented.calibration()
    )
    report = report_of(measured())
    assert report.estimate.at_speed.read == 7e9
    assert to_json(report)["estimate"]["at_speed"]["multiply"] == 8e9
    monkeypatch.setattr("quantbench.devices.free_memory", lambda device: 1 << 30)
    assert report_of(measured()).estimate.at_speed is None


class FakeProbe:
    def __init__(self, device, dtype):
        assert (str(device), dtype) == ("cpu", torch.bfloat16)

    def reading(self):
        return Speed(7e9, 8e9)
