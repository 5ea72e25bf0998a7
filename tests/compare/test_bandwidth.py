"""Readings of bandwidth: each belongs to its round, and says when it is not the memory's speed."""

import sys
from pathlib import Path

import pytest
import torch
from quantbench.compare.sampling.comparison import Comparison
from quantbench.compare.sampling.results import ArmResult, Results, Settings

from quantbench.answer.rows import rows as report_rows
from quantbench.bench.answers import Reading
from quantbench.compare.commands.roofline import model_remarks
from quantbench.compare.figures import decode_limit as whole
from quantbench.errors import KernelError
from quantbench.log.config import RunConfig, argv
from quantbench.report.columns import interval
from quantbench.report.tables import remarks
from quantbench.run.bandwidth import Bandwidth
from quantbench.typed_json import to_json

FAKE = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))


@pytest.mark.parametrize("failure", ["-", "x"])
def test_a_reading_that_fails_moves_no_other(failure):
    """Every round's reading differs, as does the step's time: the share is the same 50 %."""
    readings = ["1e9", failure, "4e9", "3e9", "2e9"]
    said = []

    def command(number):
        return (*FAKE, "--readings", ",".join(readings))

    configs = [RunConfig(max_new_tokens=5), RunConfig(quantization="int8wo", max_new_tokens=5)]
    arms = [ArmResult(config.quantization, "", argv(config)) for config in configs]
    results = Results(Settings.of_rounds(4, 1), arms, "none")
    Comparison(results, None, said.append, command, probe_rounds=True).run()
    assert any("no bandwidth of cpu" in line for line in said)
    # a worker that died is started anew, and begins its list from the front
    rates = [1e9, 4e9, 3e9] if failure == "-" else [1e9, 1e9]
    rounds = [0, 2, 3] if failure == "-" else [0, 2]
    got = results.bandwidth["cpu"]
    assert [reading.round for reading in got] == rounds
    assert [reading.bytes_per_s for reading in got] == rates


def test_a_probe_that_is_too_slow_gives_no_share():
    configs = [RunConfig(max_new_tokens=5), RunConfig(quantization="int8wo", max_new_tokens=5)]
    settings = Settings.of_rounds(4, 1)
    results = whole.measure(configs, settings, command=(*FAKE, "--readings", "1e9s"))
    for row in whole.rows(results):
        assert row.bandwidth == 1e9 and row.bandwidth_probe == "fake"
        assert row.limit_share is None and row.limit_tok_s is None
        assert interval(lambda row: row.limit_share)(row) == "-"
        assert "limit_share" not in to_json(row)
    assert "it is slow" in model_remarks([], results.bandwidth)
    rows = report_rows(results)
    assert all(row.bandwidth_share is None for row in rows)
    assert "it is slow" in remarks(results, rows)


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


def test_readings_are_kept_and_read_back(tmp_path):
    readings = {"cpu": [Reading(1e9, 0, "fake"), Reading(2e9, None, "fake", "it is slow")]}
    results = Results(Settings(), [ArmResult("none", "", [])], "none", bandwidth=readings)
    results.save(tmp_path)
    assert Results.load(tmp_path).bandwidth == readings
