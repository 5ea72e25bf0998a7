"""A run's estimate beside its measurement, on an invented machine."""

import dataclasses

import pytest
import torch

from quantbench.estimate import beside as module
from quantbench.estimate.beside import beside, expected, report_of
from quantbench.estimate.machines import Speed, here
from quantbench.estimate.predict import predict
from quantbench.log.table import Estimates, estimates
from quantbench.models.presets import preset
from quantbench.run.facts import Device, Measured, Peaks, Ready, Sample
from quantbench.run.why import Expected
from quantbench.typed_json import from_json, to_json
from tests.bench.facts import FACTS

CONFIG = preset("TinyLlama-1.1B-Chat-v1.0")
NEW = 11
SPEED = Speed(50e9, 400e9)
NAMES = {"prompt_seconds", "token_seconds", "tokens_per_second", "peak_memory_bytes"}


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
def machine(monkeypatch):
    monkeypatch.setattr("quantbench.devices.last_level_cache", lambda device: 32 << 20)
    monkeypatch.setattr("quantbench.run.energy.power_limit", lambda: None)


def test_estimated_measured_error():
    estimate = beside(measured(), SPEED)
    token = estimate.figures["token_seconds"]
    own = predict(module._request(measured().facts), here(torch.device("cpu"), speed=SPEED))
    assert token.estimated == own.token_seconds.value
    assert token.measured == pytest.approx(0.05)
    assert to_json(estimate)["token_seconds"]["error"] == pytest.approx(token.estimated / 0.05 - 1)
    assert set(estimate.figures) == NAMES


def test_the_share_of_what_memory_allows():
    """1.03 GB at 50 GB/s are 20.7 ms; the cache of 133 positions adds 3 MB. 52 ms were measured."""
    estimate = beside(measured(step=0.052), SPEED)
    assert estimate.share_of_limit == pytest.approx(0.0207 / 0.052, rel=0.01)
    assert estimate.sentences[0] == (
        "a step runs at 40% of what memory allows for these bytes (1.04 GB at 50.0 GB/s)"
    )


def test_the_speed_is_read_for_a_report(monkeypatch):
    monkeypatch.setattr(module, "read_speed", lambda device, precision: SPEED)
    report = report_of(measured())
    assert report.estimate == beside(measured(), SPEED)
    assert report.reasons[-2:] == report.estimate.sentences


def test_where_memory_is_too_full_for_a_reading(monkeypatch):
    monkeypatch.setattr("quantbench.devices.free_memory", lambda device: 1 << 30)
    value = to_json(report_of(measured()))["estimate"]
    assert value == {"why_not": "reading the memory's speed takes 1.07 GB, and 1.07 GB are free"}
    assert expected(measured().facts) == Expected(why_not=value["why_not"])


def test_a_model_in_the_processor_s_caches_has_no_estimate(monkeypatch):
    """And nothing is read for it."""
    monkeypatch.setattr(module, "read_speed", None)
    facts = dataclasses.replace(
        measured().facts, weight_bytes=20_000_000, step_weight_bytes=20_000_000
    )
    report = report_of(dataclasses.replace(measured(), facts=facts))
    assert report.estimate.why_not == (
        "a step's weights, 20.00 MB, fit into the last-level cache of 33.55 MB, so that the speed "
        "of memory does not set its own"
    )
    assert report.reasons[-1] == f"no estimate: {report.estimate.why_not}"
    assert expected(facts) == Expected()


def test_what_is_expected_before_a_run():
    """The same figures as beside it, and its limit."""
    before, after = expected(measured().facts, lambda: SPEED), beside(measured(), SPEED)
    assert before.figures == {name: one.estimated for name, one in after.figures.items()}
    assert before.limit.bytes_per_s == 50e9 and before.why_not is None
    assert before.limit.share(0.05) == after.share_of_limit
    assert before.limit.sentence(0.05) == after.sentences[0]


def test_the_table_of_a_run():
    """Estimated, measured and error below the run's own line."""
    value = to_json(beside(measured(), SPEED))
    head, prompt, step, rows, peak = estimates(from_json(Estimates, value)).splitlines()
    assert head.split() == ["estimated", "measured", "error"]
    error = value["token_seconds"]["error"]
    assert step.split() == ["a", "step", *f"{1e3 * value['token_seconds']['estimated']:.3g} ms "
                            f"50 ms {error:+.1%}".split()]  # fmt: skip
    assert "500 ms" in prompt and "2.00 GB" in peak and "tok/s" in rows
    assert estimates(from_json(Estimates, {"why_not": "it is small"})) == ""


def test_energy_that_was_not_measured_is_a_bound(monkeypatch):
    monkeypatch.setattr("quantbench.run.energy.power_limit", lambda: 65.0)
    value = to_json(beside(measured(), SPEED))
    assert value["joules_per_token"]["at_most"] and value["joules_per_token"]["measured"] is None
    (line,) = (
        line for line in estimates(from_json(Estimates, value)).splitlines() if "J/token" in line
    )
    assert "≤ " in line and "no counter; power limit × time is an upper bound" in line
