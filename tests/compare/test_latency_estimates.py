"""Latency tables with what was estimated before, and with energy."""

import csv
import dataclasses
import io
import json
import re

import pytest

from quantbench.compare.figures.latency import Cell, LatencySample, estimate_rows
from quantbench.compare.sampling.latency_results import LatencyResults
from quantbench.compare.sampling.latency_sweep import Sweep
from quantbench.report.latency_report import report, samples
from quantbench.run.energy import Energy, NotCounted
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


def test_a_report_with_estimates(made):
    text = report(made)
    assert text.count("| Step                 | Batch Size | Estimated") == 1
    estimated, measured, error = re.findall(r"^\| Prefill \(TTFT\).*%", text, re.MULTILINE)[
        0
    ].split("|")[3:6]
    figures = [float(cell.split()[0]) for cell in (estimated, measured, error)]
    assert figures[0] == 100
    assert figures[2] == pytest.approx(100 * (figures[0] / figures[1] - 1), abs=0.1)
    assert "batch size 1: at most 0.5 J a new token (no counter; power limit × time is" in text


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


def swept(**world):
    """One cell of 10 runs, in answers of 3: 2 rows and 3 tokens."""
    results = LatencyResults(plan(("none",), batch_sizes=[2]))
    world = World(estimate=ESTIMATE, **world)
    Sweep(results, lambda: None, lambda line: None, world.start).run()
    return results, world


def test_a_sweep_keeps_estimates_and_energy(tmp_path):
    """Runs of 6 J: 1 J a token. Each of the 4 answers counted 5 repeats."""
    results, _ = swept(energy=Energy("a fake", 6.0, 8.0, 0.2, 10.0, 5, 0.01))
    (cell,) = results.tables[0].cells
    assert cell.estimate == ESTIMATE
    assert cell.joules_per_token == pytest.approx(1.0)
    assert cell.energy == Energy("a fake", 6.0, 8.0, 0.2, 10.0, 20, 0.01)
    text = report(results)
    assert "batch size 2: 1 J a new token, without the idle machine's, 10 W; 0.5 J estim" in text
    results.save(tmp_path)
    assert LatencyResults.load(tmp_path).tables[0].cells == [cell]
    saved = json.loads((tmp_path / "results.json").read_text())["tables"][0]["cells"][0]
    assert saved["energy"]["idle_watts"] == 10.0


def test_energy_that_the_counter_does_not_resolve_is_not_tried_again(tmp_path):
    results, world = swept(energy=NotCounted("a fake moves by 9 J at once"))
    (cell,) = results.tables[0].cells
    assert (cell.joules_per_token, world.metered) == (None, 1)
    said = "joules of a new token are not known: a fake moves by 9 J at once; 0.5 J estimated"
    assert f"batch size 2: {said}" in report(results)
    results.save(tmp_path)
    assert LatencyResults.load(tmp_path).tables[0].cells == [cell]
