"""A run's estimate beside its measurement, on an invented machine."""

import dataclasses

import pytest

from estimate.beside import beside, expected
from models.presets import preset
from run.facts import Device, Measured, Peaks, Ready, Sample
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
    monkeypatch.setattr("estimate.beside.versions", lambda: invented.calibration().versions)


def test_estimated_measured_error():
    found = beside(measured(), invented.calibration())
    token = found.figures["token_seconds"]
    expected_step = invented.whole(CONFIG, "int8wo", 1, 1, 133)
    assert token.estimated == pytest.approx(expected_step, rel=0.02)
    assert token.measured == pytest.approx(0.05)
    assert found.as_json()["token_seconds"]["error"] == pytest.approx(token.estimated / 0.05 - 1)
    assert set(found.figures) == {
        "prompt_seconds", "token_seconds", "tokens_per_second", "peak_memory_bytes",
    }  # fmt: skip


def test_the_share_of_what_memory_allows():
    """1.03 GB at 50 GB/s are 20.7 ms; the cache of 133 positions adds 3 MB. 52 ms were measured."""
    found = beside(measured(step=0.052), invented.calibration())
    assert found.share_of_limit == pytest.approx(0.0207 / 0.052, rel=0.01)
    assert "a step runs at 40% of what this machine allows for these bytes" in found.sentences[0]


def test_without_a_calibration_it_says_how_to_make_one(monkeypatch):
    monkeypatch.setattr("estimate.beside.of_this_machine", lambda kind: None)
    found = beside(measured())
    assert found.as_json() == {"why_not": "not calibrated"}
    assert "quantbench calibrate" in found.sentences[0]
    assert expected(measured().facts) is None


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
    assert beside(measured(**changes), calibration).as_json() == {"why_not": reason}
    assert expected(measured(**changes).facts, calibration) is None


def test_another_machine():
    found = beside(measured(), invented.calibration(name="Other CPU"))
    assert found.why_not == "calibrated with name Other CPU, here Invented CPU"


def test_the_table_of_a_run():
    """Estimated, measured and error below the run's own line."""
    from benchlog.table import estimates

    found = beside(measured(), invented.calibration()).as_json()
    head, prompt, step, rows, peak = estimates({"estimate": found}).splitlines()
    assert head.split() == ["estimated", "measured", "error"]
    error = found["token_seconds"]["error"]
    assert step.split() == ["a", "step", *f"{1e3 * found['token_seconds']['estimated']:.3g} ms "
                            f"50 ms {error:+.1%}".split()]  # fmt: skip
    assert "500 ms" in prompt and "2.00 GB" in peak and "tok/s" in rows
    assert estimates({"estimate": {"why_not": "not calibrated"}}) == estimates({}) == ""
