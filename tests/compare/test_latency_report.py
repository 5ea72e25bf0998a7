"""Results of latencies as Markdown, as CSV and as a picture."""

import csv
import io
import re
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from quantbench.__main__ import commands
from quantbench.compare.figures.latency import Cell
from quantbench.compare.sampling.latency_results import LatencyResults
from quantbench.report.latency_pictures import BATCH, LATENCY, PROMPT, RANKS, draw, panels
from quantbench.report.latency_report import NOT_REACHED, report, samples
from tests.compare.latency_folders import plan, results


@pytest.fixture
def made():
    """Two arms; of the second, batch 2 failed and batch 4 was not reached."""
    everything = results({"none": 1.0, "int8wo": 0.8})
    cells = everything.tables[1].cells
    everything.tables[1].cells = [cells[0], Cell(2, cells[1].samples[:3], "out of | memory\n2 GB")]
    return everything


def test_a_report_names_every_reason(made):
    text = report(made)
    for heading, count in (("| Parameter", 2), ("| Step", 4), ("# tiny, ", 2)):
        assert len(re.findall(f"^{re.escape(heading)}", text, re.MULTILINE)) == count
    assert "- batch size 2: out of \\| memory 2 GB\n" in text
    assert f"- batch size 4: {NOT_REACHED}" in text
    second = text[text.index("# tiny, int8wo") :]
    prefill = re.findall(r"^\| Prefill \(TTFT\) +\| (\d) +\| (\S+) ms", second, re.MULTILINE)
    assert [size for size, average in prefill if average == "NaN"] == ["2", "4"]
    assert [float(average) > 0 for _, average in prefill] == [True, False, False]


def test_the_table_of_parameters(made):
    lines = report(made).split("\n\n")[1].splitlines()[2:]
    pairs = dict([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert list(pairs) == [
        "Model", "Sequence Length", "Decode Length", "N Runs", "Warmups", "Sampling", "Arm",
        "Tensor Parallel", "Precision", "Kernel", "Decoder", "Compiled", "Device", "Machine",
    ]  # fmt: skip
    assert (pairs["Decode Length"], pairs["N Runs"]) == ("3", "10")


def test_cells_of_fewer_runs_are_named(made):
    made.tables[0].cells[0] = Cell(1, made.tables[0].cells[0].samples[:6])
    assert "- batch size 1: 6 of 10 runs\n" in report(made)
    assert report(LatencyResults(plan())) == "Nothing was measured.\n"


def test_every_sample_is_in_the_csv(made):
    rows = list(csv.DictReader(io.StringIO(samples(made))))
    for table in made.tables:
        for cell in table.cells:
            lines = [
                row
                for row in rows
                if (row["arm"], row["batch_size"]) == (table.arm, str(cell.batch_size))
            ]
            assert len(lines) == 3 * len(cell.samples)
            for row in lines:
                sample = cell.samples[int(row["run"]) - 1]
                seconds = [sample.prefill_seconds, *sample.step_seconds][int(row["step"])]
                assert float(row["seconds"]) == seconds
            assert {row["reason"] for row in lines} == {(cell.reason or "").replace("\n", " ")}
    (last,) = [row for row in rows if row["seconds"] == "NaN"]
    assert last["batch_size"] == "4" and last["reason"] == NOT_REACHED


def test_panels_by_hand():
    everything = results({"none": 1.0}, ranks=[1, 2], sequence_lengths=[100, 200])
    del everything.tables[2].cells[2]  # 2 ranks, prompt 100: no batch size 4
    shown = panels(everything)
    assert list(shown) == [LATENCY, BATCH, PROMPT, RANKS]
    line = shown[BATCH]["none, 1 rank, prompt 100"]
    assert [point.x for point in line] == [1, 2, 4]
    cell = everything.tables[0].cells[1]
    steps = [second for sample in cell.samples for second in sample.step_seconds]
    assert line[1].y == pytest.approx(2 * len(steps) / sum(steps))
    point = next(p for p in shown[LATENCY]["none, 1 rank, prompt 100"] if p.label == "2")
    assert point.y == pytest.approx(1e3 * sum(steps) / len(steps)) and point.x == line[1].y
    assert [point.x for point in shown[PROMPT]["none, 2 ranks"]] == [100, 200]
    # The largest batch size that both have.
    assert set(shown[RANKS]) == {"none, prompt 100, batch 2", "none, prompt 200, batch 4"}


def test_the_same_results_give_the_same_picture(made, tmp_path):
    for name in ("a.svg", "b.svg"):
        assert draw(made, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    texts = [element.text for element in ElementTree.parse(tmp_path / "a.svg").iter()]
    assert "batch size" in texts and "none" in texts
    assert "int8wo" not in texts  # a single point is no line
    assert not draw(LatencyResults(plan()), tmp_path / "c.svg")
    assert not (tmp_path / "c.svg").exists()


def tables(*words):
    return CliRunner().invoke(commands, ["latency", "tables", *map(str, words)])


def test_the_command(made, tmp_path):
    made.save(tmp_path)
    done = tables(tmp_path, "--csv", tmp_path / "s.csv", "--picture", tmp_path / "p.svg")
    assert done.exit_code == 0 and done.stdout == report(made)
    assert (tmp_path / "s.csv").read_text() == samples(made)


def test_what_the_command_refuses(made, tmp_path):
    made.save(tmp_path)
    (tmp_path / "notes").write_text("mine\n")
    for words, message in (
        ((), "takes one results folder; given: 0"),
        ((tmp_path, tmp_path), "takes one results folder; given: 2"),
        ((tmp_path / "nope",), "nope: results.json: "),
        ((tmp_path, "--csv", tmp_path / "notes"), "holds something that is no table of samples"),
        ((tmp_path, "--picture", tmp_path / "notes"), "holds something that is no SVG"),
    ):
        done = tables(*words)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1 and message in done.stderr
        assert done.stdout == ""
    assert (tmp_path / "notes").read_text() == "mine\n"
