"""Cases of `estimate --validate` in files that our own commands write, made by their own code."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantbench.__main__ import commands
from quantbench.answer.latency import estimate_rows
from quantbench.answer.rows import rows
from quantbench.compare.commands.estimate import estimate
from quantbench.errors import QuantbenchError
from quantbench.estimate.beside import Report, beside
from quantbench.estimate.validate import Case, as_json, of_results, report
from quantbench.log import log
from quantbench.run.energy import Energy
from quantbench.typed_json import to_json
from tests.answer.latencies import ESTIMATE, latencies
from tests.compare.example_results import example_results
from tests.compare.test_estimated_rows import with_figures
from tests.estimate.test_beside import SPEED, measured

KINDS = ["prompt", "token", "run", "memory"]


def written(path, monkeypatch, **changes):
    """Two lines of generate.py --output_json_path, of runs on an invented machine."""
    monkeypatch.setattr("quantbench.devices.last_level_cache", lambda device: None)
    monkeypatch.setattr("quantbench.run.energy.power_limit", lambda: 65.0)
    energy = Energy("a counter", 22.0, 25.0, 1.0, 3.0, 1, 0.01)
    for step in (0.05, 0.06):
        run = dataclasses.replace(measured(step=step), energy=energy, **changes)
        estimate = Report(run, beside(run, SPEED), [])
        log.append_json(path, {"line": "", **to_json(estimate)})
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_generate(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    lines = written(path, monkeypatch)
    cases = of_results(path)
    assert [case.group for case in cases] == KINDS * 2
    prompt, token, run, memory = cases[4:]
    assert prompt.measured == {"runtime": 0.5} and token.measured["runtime"] == pytest.approx(0.06)
    # 11 new tokens, 22 J without the idle machine's.
    assert run.measured == pytest.approx({"throughput": 11 / 1.1, "energy": 2.0})
    assert memory.measured == {"memory": 2e9}
    for case, quantity, name in (
        (prompt, "runtime", "prompt_seconds"),
        (token, "runtime", "token_seconds"),
        (run, "throughput", "tokens_per_second"),
        (run, "energy", "joules_per_token"),
        (memory, "memory", "peak_memory_bytes"),
    ):
        figure = lines[1]["estimate"][name]
        assert case.estimated[quantity] == figure["estimated"]
        assert case.error(quantity) == pytest.approx(figure["error"])
    assert token.name == "fake int8wo × 1, token at 128"
    assert (token.device, token.held_out) == ("Invented CPU", True)


def test_one_line_of_generate_is_a_file_of_json(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(written(tmp_path / "runs.jsonl", monkeypatch)[0]))
    assert [case.group for case in of_results(path)] == KINDS


def test_rows_of_ab(tmp_path):
    results = with_figures(example_results())
    results.save(tmp_path, rows(results))
    row = rows(results)[1]
    cases = of_results(tmp_path / "results.json")
    assert [case.group for case in cases] == KINDS
    prompt, token, run, memory = cases
    assert prompt.measured["runtime"] == pytest.approx(row.time_to_first_token_s)
    assert token.measured["runtime"] == pytest.approx(1 / row.decode_tok_s)
    assert token.error("runtime") == pytest.approx(0.1)
    assert run.measured == pytest.approx(
        {"throughput": row.tok_s_all_rows, "energy": row.joules_per_token}
    )
    assert memory.measured["memory"] == pytest.approx(3e9)
    assert memory.error("memory") == pytest.approx(-0.5)
    assert token.name == "TinyLlama-1.1B-Chat-v1.0 int8wo × 1"
    assert token.device == "Example CPU"


def test_cells_of_latency(tmp_path):
    made = latencies({"none": 1.0, "int8wo": 0.8})
    table, path = made.tables[1], tmp_path / "results.json"
    table.cells[0] = dataclasses.replace(
        table.cells[0], estimate=ESTIMATE, joules_per_token=0.4, energy=None
    )
    path.write_text(json.dumps(to_json(made)))
    cases = of_results(path)
    prompt, token, run = cases  # ESTIMATE has no memory
    shown = [row.values for row in estimate_rows(table.cells) if row.batch_size == 1]
    for case, figures in zip((prompt, token), shown, strict=True):
        assert 1e3 * case.measured["runtime"] == pytest.approx(figures["measured"])
        assert 1e3 * case.estimated["runtime"] == pytest.approx(figures["estimated"])
        assert case.error("runtime") == pytest.approx(figures["error"])
    assert [case.group for case in cases] == ["prompt", "token", "run"]
    assert run.measured["energy"] == 0.4 and run.estimated == {"energy": 0.5}
    samples = table.cells[0].samples
    seconds = sum(sample.prefill_seconds + sample.decode_seconds for sample in samples)
    assert run.measured["throughput"] == pytest.approx(3 * len(samples) / seconds)
    assert prompt.name == "made-up-1B int8wo × 1, prompt at 100"
    assert prompt.device == "2 cores of a CPU"


def test_a_cell_that_failed_and_a_run_without_a_calibration_are_no_cases(tmp_path):
    made, path = latencies({"none": 1.0}, estimate=ESTIMATE), tmp_path / "results.json"
    cells = made.tables[0].cells
    made.tables[0].cells = [dataclasses.replace(cells[0], reason="out of memory"), *cells[1:]]
    path.write_text(json.dumps(to_json(made)))
    with pytest.raises(QuantbenchError, match="where they have an estimate") as caught:
        of_results(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        {"estimate": 1, "estimated": [], "samples": {}},
        {"estimated": {"token_seconds": 1.0}, "estimate_errors": {"token_seconds": -1.0}},
        {"estimated": {"token_seconds": 1.0}, "estimate_errors": {"prompt_seconds": 1.0}},
        {"estimate": {"token_seconds": 1.0}, "batch_size": 1, "samples": []},
        {"estimate": {"token_seconds": {"estimated": 1.0, "measured": None, "error": None}}},
        {"measured_seconds": float("inf"), "estimated_seconds": 1.0},
        {"model": 1, "command": "python generate.py --top_k nine", "about": "x"},
    ],
    ids=str,
)
def test_what_is_no_case(tmp_path, content):
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(QuantbenchError, match="no case in it that was both"):
        of_results(tmp_path / "x.json")


def test_our_three_kinds_of_files_in_one_table(tmp_path, monkeypatch):
    written(tmp_path / "runs.jsonl", monkeypatch)
    results = with_figures(example_results())
    results.save(tmp_path, rows(results))
    again = tmp_path / "again.json"
    text = validated(tmp_path / "runs.jsonl", tmp_path / "results.json", "--json", again).output
    cases = json.loads(again.read_text())
    assert len(cases) == 12 and "Held out" in text
    assert "- scheme int8wo: runtime: " in text
    assert "- model TinyLlama-1.1B-Chat-v1.0: memory: mean |error| 50.00% ÷ measured" in text
    assert as_json(of_results(again)) == cases


def validated(*words):
    return CliRunner().invoke(estimate, ["--validate", *map(str, words)])


def test_results_in_json_are_cases(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(
        '{"device": "here", "cases": [{"model": "a", "kind": "token", "measured_seconds": 2,'
        ' "estimated_seconds": 1.9}, {"model": "b", "measured_bytes": 4e9, "estimated_bytes": 5e9,'
        ' "held_out": false}, {"model": "c", "measured_seconds": 1}]}'
    )
    first, second = of_results(path)
    assert (first.model, first.device, first.group, first.held_out) == ("a", "here", "token", True)
    assert first.error("runtime") == pytest.approx(-0.05)
    assert second.error("memory") == pytest.approx(0.25) and not second.held_out
    shown = validated(path).output
    assert "Held out\n" in shown and "Fitted to\n" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--checkpoint_path PATH or --validate FILE; nothing is given"),
        (["something"], "given: 'something'"),
        (["--validate", "none.json"], "none.json"),
        (["--validate", __file__], "it is neither JSON nor JSON lines"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(words, expected):
    result = CliRunner().invoke(commands, ["estimate", *words])
    (line,) = result.stderr.splitlines()
    assert expected in line and result.exit_code in (1, 2)


# ---------------------------------------------------------------------------------- names, groups


def test_errors_by_both_denominators():
    case = Case("m", "d", "g", True, {"runtime": 0.8}, {"runtime": 1.0})
    assert case.error("runtime") == pytest.approx(0.25)
    assert case.error("runtime", by_estimate=True) == pytest.approx(0.2)
    text = report([case])
    assert "+25.00%" in text and "+20.00%" in text
    assert "mean |error| 25.00% ÷ measured, 20.00% ÷ estimated" in text


def test_means_by_kind_scheme_and_model():
    """By hand: errors of 10 % and 30 % are 20 % on average."""

    def case(model, scheme, kind, error):
        measured, estimated = {"runtime": 1.0}, {"runtime": 1.0 + error}
        return Case(model, "here", kind, True, measured, estimated, scheme, 4, 1024)

    text = report([case("a", "none", "prompt", 0.1), case("a", "fp6", "token", 0.3)])
    assert "- prompt: runtime: mean |error| 10.00% ÷ measured" in text
    assert "- model a: runtime: mean |error| 20.00% ÷ measured" in text
    assert (
        "- scheme fp6: runtime: mean |error| 30.00% ÷ measured, 23.08% ÷ estimated; worst 30.00% "
        "(a fp6 × 4, token at 1024); 1 case" in text
    )


def test_the_accuracy_on_this_machine_is_validated():
    """The committed data: 122 cases in time, and some in memory; errors as its own summary has."""
    path = Path(__file__).parents[2] / "docs" / "data" / "estimate_accuracy.json"
    data = json.loads(path.read_text())
    cases = of_results(path)
    timed = [case for case in cases if "runtime" in case.measured]
    assert len(timed) == len(data["cases"]) and len(cases) - len(timed) == len(data["memory"])
    assert all(case.device and case.scheme and case.batch and case.model for case in cases)
    assert {case.group for case in cases} == {"token", "prompt", "memory"}
    first = data["cases"][0]
    assert timed[0].name == (
        f"{first['model']} {first['scheme']} × {first['batch']}, {first['kind']} at "
        f"{first['positions']}"
    )
