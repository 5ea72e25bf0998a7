"""Cases of `estimate --validate` in the files that our own commands write."""

import dataclasses
import json
import statistics

import pytest

from quantbench.answer.row import Row
from quantbench.errors import QuantbenchError
from quantbench.estimate.beside import beside
from quantbench.estimate.validate import FIGURES, Case, of_results, report
from quantbench.log import log
from quantbench.run.energy import Energy
from quantbench.run.shown import against
from quantbench.typed_json import to_json
from tests.answer.latencies import ESTIMATE, MACHINE, latencies
from tests.estimate.test_beside import BANDWIDTH, PHASES, measured
from tests.programs import command

KINDS = ["prompt", "token", "run", "run", "memory"]


def written(path, monkeypatch, **changes):
    """Two lines of generate.py --output_json_path, of runs on an invented machine."""
    monkeypatch.setattr("quantbench.devices.last_level_cache", lambda device: None)
    monkeypatch.setattr("quantbench.run.energy.power_limit", lambda: 65.0)
    energy = Energy("a counter", 22.0, 1.0, 3.0, 1)
    for step in (0.05, 0.06):
        run = dataclasses.replace(measured(step=step), energy=energy, **changes)
        log.append_json(path, {"line": "", **to_json(beside(run, PHASES, BANDWIDTH))})
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_generate(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    lines = written(path, monkeypatch)
    cases = of_results(path)
    assert [case.kind for case in cases] == KINDS * 2
    prompt, token, speed, energy, memory = cases[5:]
    # 11 new tokens, 22 J without the idle machine's.
    expected = [0.5, 0.06, 11 / 1.1, 2.0, 2e9]
    assert [case.measured for case in cases[5:]] == pytest.approx(expected)
    for case, name in zip(cases[5:], FIGURES, strict=True):
        figure = lines[1]["estimate"][name]
        assert case.estimated == figure["estimated"]
        assert case.error == pytest.approx(figure["error"])
    assert token.name == "fake int8wo × 1, token at 128"
    assert token.device == "Invented CPU"
    path.write_text(json.dumps(lines[0]))  # one line is a file of JSON
    assert of_results(path) == cases[:5]


def test_rows_of_ab(tmp_path):
    """A row of 4 s a token instead of the 4.4 that were estimated."""
    options = "--checkpoint_path dummy:Llama-3.2-1B --batch_size 4 --prefill_size 128"
    measured = {"token_seconds": 4.0, "peak_memory_bytes": 3e9}
    estimate = against({"token_seconds": 4.4, "peak_memory_bytes": 1.5e9}, measured)
    row = to_json(Row("int8wo", estimate=estimate, command=f"python generate.py {options}"))
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"about": {"machine": "2 cores"}, "rows": [row]}))
    token, memory = of_results(path)
    assert (token.measured, memory.measured) == pytest.approx((4.0, 3e9))
    assert (token.error, memory.error) == pytest.approx((0.1, -0.5))
    assert token.name == "Llama-3.2-1B int8wo × 4, token at 128" and token.device == "2 cores"


def test_cells_of_latency(tmp_path):
    """One that failed is no case."""
    path, made = tmp_path / "results.json", latencies({"none": 1.0}, estimate=ESTIMATE)
    path.write_text(json.dumps(to_json(made)))
    prompt, token = of_results(path)
    samples = made.tables[0].cells[0].samples
    mean = statistics.fmean(sample.prefill_seconds for sample in samples)
    assert prompt.error == pytest.approx(ESTIMATE["prompt_seconds"] / mean - 1)
    assert prompt.name == "made-up-1B none × 1, prompt at 100" and token.device == MACHINE
    failed = latencies({"none": 1.0}, estimate=ESTIMATE, why="out of memory")
    path.write_text(json.dumps(to_json(failed)))
    with pytest.raises(QuantbenchError, match="where they have an estimate"):
        of_results(path)


def test_results_in_json_are_cases(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(
        '{"device": "here", "cases": [{"model": "a", "kind": "token", "measured_seconds": 2,'
        ' "estimated_seconds": 1.9}, {"model": "b", "measured_bytes": 4e9, "estimated_bytes": 5e9},'
        ' {"model": "c", "measured_seconds": 1}]}'
    )
    first, second = of_results(path)
    assert (first.model, first.device, first.kind) == ("a", "here", "token")
    assert first.error == pytest.approx(-0.05)
    assert second.error == pytest.approx(0.25)
    assert "+25.0%" in command("estimate", "--validate", path).output


def test_means_by_kind_scheme_and_model():
    """By hand: errors of 10 % and 30 % are 20 % on average."""
    fields = (("none", "prompt", 1.1), ("fp6", "token", 1.3))
    text = report([Case("a", "here", kind, "runtime", 1.0, estimated, scheme, 4, 1024)
                   for scheme, kind, estimated in fields])  # fmt: skip
    for line in (
        "- prompt: runtime: mean error 10.0%, worst",
        "- model a: runtime: mean error 20.0%, worst 30.0%",
        "- scheme fp6: runtime: mean error 30.0%, worst 30.0% (a fp6 × 4, token at 1024); 1 case",
    ):
        assert line in text
