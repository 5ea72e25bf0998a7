"""Latency tables with what was estimated before, and with energy."""

import csv
import dataclasses
import io

import pytest

from compare.figures.latency import Cell, LatencySample, estimate_rows
from compare.figures.latency_checks import findings
from compare.output.latency_report import report, samples
from compare.output.latency_tables import read
from compare.sampling.latency_progress import LatencyProgress
from compare.sampling.latency_results import LatencyResults
from compare.sampling.latency_sweep import Sweep
from tests.compare.fake_latency_worker import World
from tests.compare.latency_folders import plan, results

ESTIMATE = {"prompt_seconds": 0.1, "token_seconds": 0.03, "joules_per_token": 0.5}
# Prefill of 100 and 120 ms, 110 on average; steps of 20 ms.
CELL = Cell(1, [LatencySample(0.12, [0.01, 0.03]), LatencySample(0.1, [0.02, 0.02])])


def with_estimates(cells):
    """The estimate of the first cell alone."""
    return [dataclasses.replace(cells[0], estimate=ESTIMATE), *cells[1:]]


@pytest.fixture
def made():
    everything = results({"none": 1.0, "int8wo": 0.8})
    everything.tables[0].cells = with_estimates(everything.tables[0].cells)
    return everything


def test_rows_by_hand():
    prefill, failed, token, _ = estimate_rows(
        with_estimates([CELL, Cell(2, [], reason="out of memory")])
    )
    assert (prefill.step, prefill.unit) == ("Prefill (TTFT)", "ms")
    assert list(prefill.figures.values.values()) == pytest.approx([100, 110, -1 / 11])
    assert list(token.figures.values.values()) == pytest.approx([30, 20, 0.5])
    assert all(value != value for value in failed.figures.values.values())
    assert estimate_rows([CELL]) == []


def test_a_report_with_estimates_reads_back(made):
    text = report(made, "correct")
    tables = read(text).tables
    assert [at.table.kind for at in tables] == [
        *("parameters", "latency", "throughput", "estimates"),
        *("parameters", "latency", "throughput"),
    ]
    assert all(at.renders for at in tables)
    assert findings(read(text)) == []
    prefill = tables[3].table.rows[0].figures
    assert prefill.estimated == 100 and prefill.error == pytest.approx(
        prefill.estimated / prefill.measured - 1, abs=1e-3
    )
    assert "batch size 1: 0.5 J estimated (no counter; power limit × time is an upper" in text


def test_a_wrong_error_is_found(made):
    text = report(made, "correct")
    line = next(line for line in text.splitlines() if line.endswith("% |"))
    error = line.split("|")[-2]
    (finding,) = findings(read(text.replace(error, " +77.00 %".ljust(len(error)))))
    assert "the error is" in finding.text


def test_the_legacy_style_knows_no_estimates(made):
    assert report(made, "legacy") == report(results({"none": 1.0, "int8wo": 0.8}), "legacy")


def test_estimates_are_in_the_csv_and_the_json(made, tmp_path):
    made.save(tmp_path)
    kept = LatencyResults.load(tmp_path).tables[0].cells[0]
    assert kept.estimate == ESTIMATE and kept.joules_per_token is None
    rows = list(csv.DictReader(io.StringIO(samples(made))))
    own = [row for row in rows if (row["arm"], row["batch_size"]) == ("none", "1")]
    assert {row["estimated_seconds"] for row in own} == {"0.1", "0.03"}
    for row in own:
        assert float(row["error"]) == float(row["estimated_seconds"]) / float(row["seconds"]) - 1
    assert {row["error"] for row in rows if row not in own} == {""}


def test_a_sweep_keeps_estimates_and_energy():
    """10 runs of 6 J, 2 rows and 3 tokens: 1 J a token."""
    swept = LatencyResults(plan(("none",), batch_sizes=[2]))
    world = World(estimate=ESTIMATE, joules=6.0)
    Sweep(swept, lambda: None, LatencyProgress(swept.plan, lambda line: None), world.start).run()
    (cell,) = swept.tables[0].cells
    assert cell.estimate == ESTIMATE
    assert cell.joules_per_token == pytest.approx(1.0)
    assert "batch size 2: 1 J measured, without the idle machine's; 0.5 J" in report(
        swept, "correct"
    )
