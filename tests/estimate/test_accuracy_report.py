"""The report of tests/estimate/accuracy.py, of a small folder as `measure` leaves it."""

import dataclasses
import json
import statistics

import pytest
from click.testing import CliRunner

from quantbench.estimate import calibration_file
from quantbench.estimate.calibration import Speed, WholePoint
from quantbench.estimate.passes import CalibratedMachine
from quantbench.models.presets import preset
from quantbench.typed_json import to_json
from tests.estimate import accuracy, accuracy_report, invented

SCHEMES = ("none", "int8wo")
CONFIGS = {"own": preset("TinyLlama-1.1B-Chat-v1.0")}
SLOW = Speed(invented.MEMORY / 1.25, invented.ARITHMETIC / 1.25)


def samples(scheme):
    """Two of a step of 4 rows and two of a prompt, one of each while the machine was slow."""
    step, prompt = (4, 1, 128), (1, 128, 0)
    return [
        WholePoint(scheme, "own", "dense", "cpu-step", *case, seconds, speed)
        for case, seconds in ((step, 0.05), (prompt, 0.7))
        for speed in (invented.SPEED, SLOW)
    ]


@pytest.fixture
def folder(tmp_path):
    whole = invented.calibration()
    every = dataclasses.replace(whole, products=[], attention=[], wholes=[])
    parts = {"every": {**to_json(every), "calibrating_seconds": 60.0}}
    for scheme in SCHEMES:
        parts[scheme] = to_json({
            "products": [p for p in whole.products if p.scheme == scheme],
            "attention": whole.attention if scheme == SCHEMES[0] else [],
            "weight_stacks": [],
            "cache_stacks": [],
            "wholes": [w for w in whole.wholes if w.scheme == scheme],
            "cases": samples(scheme),
            "calibrating_seconds": 30.0,
        })  # fmt: skip
    run = {"model": "own", "scheme": "none", "batch": 2, "prompt": 64, "cache_size": 72}
    parts["memory"] = {"base_bytes": 425e6, "runs": [{**run, "peak_bytes": 3e9}]}
    for name, part in parts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    return tmp_path


@pytest.fixture
def reported(folder):
    path = folder / "report" / "accuracy.json"
    path.parent.mkdir()
    accuracy_report.report(folder, str(path), CONFIGS, SCHEMES)
    return path


def test_its_calibration_is_one_that_estimates_are_made_from(reported):
    """As a reader would: the calibration alone, as a file for `estimate --calibration`."""
    value = json.loads(reported.read_text())
    assert value["calibration"]["seconds"] == 120.0
    alone = reported.with_name("machine.json")
    alone.write_text(json.dumps(value["calibration"]))
    calibration = calibration_file.load(str(alone))
    assert calibration.base_bytes == 425_000_000  # of the runs of memory
    machine = CalibratedMachine(calibration)
    (step,) = (c for c in value["cases"] if c["kind"] == "token" and c["scheme"] == "int8wo")
    parts = machine.step(CONFIGS["own"], "int8wo", "dense", step["batch"], step["positions"])
    speeds = [Speed(s["read"], s["multiply"]) for s in step["samples"]]
    each = [machine.at_speed(parts, speed, "int8wo", 4, True).seconds for speed in speeds]
    assert step["estimated_seconds"] == pytest.approx(statistics.median(each), rel=1e-9)
    errors = [e / s["seconds"] - 1 for e, s in zip(each, step["samples"], strict=True)]
    assert step["error"] == pytest.approx(statistics.median(errors), rel=1e-9)


def test_a_report_of_its_file_is_the_same(reported):
    """Nothing but the file is needed: estimates and errors are computed anew, from its points."""
    again = reported.with_name("again.json")
    first = json.loads(reported.read_text())
    first["about"]["machine"] = "2 cores of another machine"
    reported.write_text(json.dumps(first))
    accuracy_report.report(reported, str(again), CONFIGS, SCHEMES)
    second = json.loads(again.read_text())
    assert first.pop("about")["machine"] == second.pop("about")["machine"]
    assert first == second and len(first["cases"]) == 4 and len(first["memory"]) == 1


def test_the_measured_points_take_a_line_each(reported):
    lines = reported.read_text().splitlines()
    products = json.loads(reported.read_text())["calibration"]["products"]
    assert sum('"kernel": "cpu"' in line for line in lines) == len(products) > 10


def test_renewing_its_memory_keeps_its_calibration(folder, reported):
    before = json.loads(reported.read_text())
    accuracy_report.renew_memory(folder, str(reported), CONFIGS)
    after = json.loads(reported.read_text())
    assert after["calibration"] == before["calibration"] and after["memory_about"]


def test_a_file_without_the_points_is_one_line(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"calibration": {"date": "2026-01-01"}, "cases": [], "memory": []}))
    result = CliRunner().invoke(accuracy.main, ["report", str(path)])
    assert result.exit_code == 2
    assert "the calibration's points are not in it; report its FOLDER again" in result.output
