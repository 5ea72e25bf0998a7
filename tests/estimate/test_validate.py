"""Cases of `estimate --validate` in the files that our own commands write."""

import json

import pytest

from quantbench import environment
from quantbench.errors import QuantbenchError
from quantbench.estimate.answer import run_estimator
from quantbench.estimate.predict import Phase
from quantbench.estimate.validate import Case, of_results, report
from quantbench.log.origin import machine
from tests.programs import command


def test_results_of_earlier_versions(tmp_path):
    """A line of --output_json_path, a row of ab and a cell of latency had their estimates."""
    options = "--checkpoint_path dummy:Llama-3.2-1B --batch_size 4 --prefill_size 128"
    step = {"estimated": 4.4, "measured": 4.0, "error": 0.1}
    run = {"scheme": "int8wo", "command": f"python generate.py {options}"}
    content = {
        "about": {"machine": "2 cores"},
        "rows": [run | {"estimate": {"token_seconds": step, "why_not": "no counter"}}],
        "cells": [{"estimate": {"peak_memory_bytes": step | {"measured": None}}}, {"estimate": {}}],
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    (token,) = of_results(path)
    assert (token.kind, token.measured, token.error) == ("token", 4.0, pytest.approx(0.1))
    assert token.name == "Llama-3.2-1B int8wo × 4, token at 128" and token.device == "2 cores"


@pytest.mark.parametrize("where", ["here", "NVIDIA L4", "another machine"])
def test_runs_are_estimated_now(tmp_path, monkeypatch, where):
    """Here on the first layers of the model, on a card by its data sheet, elsewhere not at all."""
    options = "--checkpoint_path dummy:Llama-3.2-1B --max_new_tokens 11 --device cuda --compile"
    options += " --threads 3"
    row = {"model": "Llama-3.2-1B", "command": f"python generate.py {options}", "prompt_tokens": 64,
           "time_to_first_token_s": 0.5, "decode_tok_s": 20.0, "tok_s_all_rows": 11.0,
           "peak_memory_bytes": {"generate": {"allocated": 3e9}}}  # fmt: skip
    path = tmp_path / "results.json"
    path.write_text(json.dumps({
        "about": {"machine": machine() if where == "here" else where},
        "rows": [row, row | {"command": f"{row['command']} --speculate lookup"}, {"failed": "x"}],
    }))  # fmt: skip
    seen, threads = [], []

    def phases(self, request):
        seen.append((request.prompt, request.new_tokens))
        return tuple(Phase({"layers": s}, "layers", "measured", 0.03) for s in (0.4, 0.045))

    monkeypatch.setattr("quantbench.estimate.here.Here.phases", phases)
    monkeypatch.setattr(environment, "use_threads", lambda config: threads.append(config.threads))
    if where == "another machine":
        with pytest.raises(QuantbenchError, match="no case in it that was both"):
            of_results(path, run_estimator())
        return
    cases = {f"{case.quantity} {case.kind}": case for case in of_results(path, run_estimator())}
    assert set(cases) == {"runtime prompt", "runtime token", "throughput run", "memory memory"}
    assert [case.measured for case in cases.values()][0] == 0.5
    assert seen == ([(64, 11)] if where == "here" else [])
    assert set(threads) == ({3} if where == "here" else set())  # as the run had them
    if where == "here":
        assert cases["runtime token"].error == pytest.approx(0.045 / 0.05 - 1)


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
