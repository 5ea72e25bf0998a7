"""The report in prose of `quantbench metrics --narrative`: its numbers are those of --json."""

import json
import re

import pytest
from click.testing import CliRunner

from quantbench.__main__ import commands
from quantbench.compare.figures.latency import Cell
from quantbench.compare.sampling.latency_results import Carried, ModelFacts
from tests.compare.latency_folders import CARRIED, MODEL, results

METRIC = (
    r"- (.+?)(?: \((.+) tokens\))? is (\S+) (\S+) for the target at batch size (\d+) and (\S+) \S+ "
    r"for the baseline at batch size (\d+): (Ratio_\w+) (\S+) \((.+)\)\."
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(**folders):
    """The report of a baseline and a target, each FOLDER:ARM or FOLDER, and the figures."""
    words = [word for option, text in folders.items() for word in (f"--{option}", text)]
    done = CliRunner().invoke(
        commands, ["metrics", *words, "--narrative", "report.md", "--json", "report.json"]
    )
    assert done.exit_code == 0, done.output
    assert "Time to first token, ms" in done.stdout and "Wrote report.md" in done.stderr
    with open("report.md") as report, open("report.json") as figures:
        return report.read(), json.load(figures)["comparisons"]


@pytest.mark.parametrize("slowness, side", [(0.8, "target"), (1.3, "baseline"), (1.0001, None)])
def test_every_number_is_that_of_the_figures(tmp_path, slowness, side):
    made = results({"none": 1.0, "int8wo": slowness}, sequence_lengths=[100, 300], seed=4)
    made.save(tmp_path)
    text, comparisons = written(baseline=f"{tmp_path}:none", target=f"{tmp_path}:int8wo")
    assert text.startswith("# `int8wo` compared with `none`\n")
    sections = text.split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == [
        f"Prompts of {length} tokens, answers of 3 tokens" for length in (100, 300)
    ]
    for section, comparison in zip(sections, comparisons, strict=True):
        assert f"`{MODEL.name}` in `{CARRIED.precision}`" in section
        found = re.findall(METRIC, section)
        assert len(found) == len(comparison["metrics"]) == 7
        for (name, counted, new, unit, at, old, before, kind, ratio, ends), metric in zip(
            found, comparison["metrics"], strict=True
        ):
            assert name.lower() == metric["name"] and (counted or None) == metric["counted"]
            assert unit == metric["unit"] and kind == metric["ratio"]["name"]
            for value, size, which in ((new, at, "target"), (old, before, "baseline")):
                assert float(value) == pytest.approx(metric[which]["value"], abs=0.0051)
                assert int(size) == metric[which]["batch_size"]
            shown = [ratio, *ends.removeprefix("interval ").split(" to ")]
            kept = [metric["ratio"][name] for name in ("value", "low", "high")]
            assert [float(number) for number in shown] == pytest.approx(kept, abs=5.1e-4)
        if side:
            assert f"The {side} is better in time to first token, " in section
        else:
            assert "No difference is shown in " in section


def test_two_folders_of_different_machines_and_models(tmp_path):
    carried = Carried("4 cores of another", "cuda:0", "torch.float16")
    other = ModelFacts("other `1 B`", 1, 64, 8, 8, 128, 512)
    made = {
        "a": results({"none": 1.0}, runs=2),
        "b": results({"none": 0.5}, runs=12, carried=carried, model=other),
    }
    made["b"].tables[0].cells[0] = Cell(1, [], "killed")
    for name, kept in made.items():
        (tmp_path / name).mkdir()
        kept.save(tmp_path / name)
    text, _ = written(baseline="a", target="b")
    assert "They are of different folders, or machines" in text
    assert "model `other '1 B'` in `torch.float16` on `cuda:0` of `4 cores of another`" in text
    assert "- Time to first token was not measured on both sides: `target: killed`." in text
    assert text.count("(too few runs for an interval)") == 3
    assert "Not measured on both sides: time to first token, single-user prompt" in text


def test_a_report_is_replaced(tmp_path):
    results({"none": 1.0, "int8wo": 0.8}).save(tmp_path)
    sides = {"baseline": f"{tmp_path}:none", "target": f"{tmp_path}:int8wo"}
    assert written(**sides) == written(**sides)
