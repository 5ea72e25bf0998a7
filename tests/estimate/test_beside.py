"""A run's estimate and its measurement, on an invented machine."""

import dataclasses

import pytest

from quantbench.errors import UsageError
from quantbench.estimate import beside as module
from quantbench.estimate.beside import beside, expected, report_of, seconds_of
from quantbench.estimate.predict import Phase
from quantbench.models.presets import preset
from quantbench.run.facts import Device, Measured, Parallel, Ready, Sample
from quantbench.run.shown import estimates
from quantbench.run.why import Expected
from quantbench.typed_json import to_json
from tests.bench.facts import FACTS
from tests.models.refused import refusal

CONFIG = preset("TinyLlama-1.1B-Chat-v1.0")
NEW = 11
BANDWIDTH = 50e9
PHASES = tuple(Phase({"layers": s}, "layers", "measured", 0.03) for s in (0.4, 0.045))
NAMES = {"prompt_seconds", "token_seconds", "tokens_per_second", "peak_memory_bytes"}


def measured(step=0.05, config=(), **changes):
    """A run of which config and changes are other options and facts."""
    usual = {
        "architecture": CONFIG,
        "config": dataclasses.replace(FACTS.config, max_new_tokens=NEW, **dict(config)),
        "prompt_tokens": 128,
        "cache_size": 139,
        "kv_cache_bytes": 139 * 22 * 2 * 256 * 2,  # layers, keys and values, of bfloat16
        "device": Device("cpu", "Invented CPU", 2),
        "weight_bytes": 1_034_420_224,
        "step_weight_bytes": 0,  # the same: the model has no experts
    }
    facts = dataclasses.replace(FACTS, **usual | changes)
    sample = Sample(0.5, step * (NEW - 1), NEW / (0.5 + step * (NEW - 1)), 256.0, 1 / step)
    return Measured(facts, Ready(None, [1.0], True), None,
                    {"generate": {"resident": 2_000_000_000}}, [sample])  # fmt: skip


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr("quantbench.devices.last_level_cache", lambda device: 32 << 20)
    monkeypatch.setattr("quantbench.run.energy.power_limit", lambda: None)


def test_estimated_measured_error():
    """11 new tokens: a prompt of 0.4 s and ten steps of 45 ms, estimated; 0.5 s and 50 ms are
    measured."""
    estimate = beside(measured(), PHASES, BANDWIDTH)
    figures = estimate.figures
    assert set(figures) == NAMES
    assert figures["prompt_seconds"].error == pytest.approx(0.4 / 0.5 - 1)
    assert figures["token_seconds"].error == pytest.approx(-0.1)
    assert figures["tokens_per_second"].error == pytest.approx((0.5 + 0.5) / (0.4 + 0.45) - 1)
    written = to_json(estimate)["estimate"]
    assert written["token_seconds"]["error"] == figures["token_seconds"].error


def test_the_share_of_what_memory_allows():
    """1.03 GB at 50 GB/s are 20.7 ms; the cache of 133 positions adds 3 MB. 52 ms were measured."""
    estimate = beside(measured(step=0.052), PHASES, BANDWIDTH)
    assert estimate.limit_share == pytest.approx(0.0207 / 0.052, rel=0.01)
    sentence = "a step runs at 40% of what memory allows for these bytes (1.04 GB at 50.0 GB/s)"
    assert estimate.reasons[-1] == sentence


def test_the_machine_is_measured_for_a_report(monkeypatch):
    monkeypatch.setattr(module, "read_bandwidth", lambda device: BANDWIDTH)
    monkeypatch.setattr(module, "of_model", lambda *given: PHASES)
    assert report_of(measured(), None, None) == beside(measured(), PHASES, BANDWIDTH)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel": Parallel(2, "gloo")}, "ranks share this machine"),
        ({"compiled_step": True}, "have to be compiled, too"),
        ({"device": Device("cuda", "Unheard Of 9000")}, "no data sheet of Unheard Of 9000"),
        ({"weight_bytes": 20_000_000, "step_weight_bytes": 20_000_000},
         "a step's weights, 20.00 MB, fit into the last-level cache of 33.55 MB, so that the speed "
         "of memory does not set its own"),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_estimate(changes, reason, monkeypatch):
    """And nothing is read for it."""
    monkeypatch.setattr(module, "read_bandwidth", None)
    run = measured(**changes)
    report = report_of(run, None, None)
    assert reason in report.why_not and expected(run.facts, None) == Expected()
    assert report.reasons[-1] == f"no estimate: {report.why_not}"


def test_too_few_layers_or_too_little_memory_for_an_estimate(monkeypatch):
    reason = (
        "its 22 layers are too few, or too small for the processor's cache, to estimate them "
        "from the first ones"
    )
    assert refusal(UsageError, beside, measured(), None, BANDWIDTH) == reason
    assert expected(measured().facts, None).no_estimate == reason
    monkeypatch.setattr(module, "of_model", lambda *given: PHASES)
    monkeypatch.setattr("quantbench.devices.free_memory", lambda device: 1 << 30)
    reason = "reading the memory's speed takes 1.07 GB, and 1.07 GB are free"
    assert report_of(measured(), None, None).why_not == reason


def test_a_card_is_estimated_by_its_data_sheet(monkeypatch):
    monkeypatch.setattr("quantbench.devices.last_level_cache", lambda device: None)
    estimate = beside(measured(device=Device("cuda", "NVIDIA L4")), None, BANDWIDTH)
    assert "data sheet" in estimate.figures["token_seconds"].source


def test_what_is_expected_before_a_run():
    """The same figures as after it, also by way of another process."""
    told = seconds_of(PHASES)
    before = expected(measured().facts, told)
    after = beside(measured(), PHASES, BANDWIDTH)
    assert before.estimate == {name: one.estimated for name, one in after.figures.items()}
    assert before.no_estimate is None


def test_the_table_of_a_run():
    """Estimated, measured and error below the run's own line."""
    figures = beside(measured(), PHASES, BANDWIDTH).figures
    head, prompt, step, rows, peak = estimates(figures).splitlines()
    assert head.split() == ["estimated", "measured", "error"]
    token = figures["token_seconds"]
    words = f"a step {1e3 * token.estimated:.3g} ms 50 ms {token.error:+.1%}"
    assert step.split() == words.split()
    assert "500 ms" in prompt and "2.00 GB" in peak and "tok/s" in rows
    assert estimates({}) == ""


def test_energy_that_was_not_measured_is_a_bound(monkeypatch):
    monkeypatch.setattr("quantbench.run.energy.power_limit", lambda: 65.0)
    figures = beside(measured(), PHASES, BANDWIDTH).figures
    assert figures["joules_per_token"].at_most and figures["joules_per_token"].measured is None
    (line,) = (line for line in estimates(figures).splitlines() if "J/token" in line)
    assert "≤ " in line and "no counter; power limit × time is an upper bound" in line
