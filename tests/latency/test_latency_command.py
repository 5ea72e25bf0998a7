"""`quantbench latency` as a command: its files, its mistakes, its end by Ctrl-C."""

import json
import os
import signal
from functools import partial
from itertools import product

import pytest

from quantbench.latency.answer import Latencies, load
from quantbench.latency.cell_plan import CellPlan, make_plan
from quantbench.log.config import RunConfig
from quantbench.log.options import parse
from quantbench.typed_json import from_json, to_json
from tests.latency.latencies import measured as made_up
from tests.programs import command, started, wait_for, worked

SMALL = ("--batch_sizes", "1,3", "--decode_length", "3", "--runs", "4", "--device", "cpu")


latency = partial(command, "latency")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two arms on one and two ranks; a prompt that is too long. The result, and the folder."""
    folder = tmp_path_factory.mktemp("latency") / "out"
    arms = ("--arm", "--quantization none", "--arm", "--quantization int8wo")
    lengths = ("--sequence_lengths", "20,99999")
    return latency(*SMALL, *arms, *lengths, "--tp", "1,2", "--output", folder), folder


def test_the_files(measured):
    done, folder = measured
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {
        "meta.json", "samples.jsonl", "results.json", "report.md", "samples.csv", "latency.svg"
    }  # fmt: skip
    found = load(folder)
    assert found == from_json(Latencies, json.loads((folder / "results.json").read_text()))
    places = [(table.arm, table.ranks, table.sequence_length) for table in found.tables]
    assert places == list(product(("none", "int8wo"), (1, 2), (20, 99999)))
    assert found.ended == "complete"
    for table in found.tables:
        for cell in table.cells:
            if table.sequence_length == 20:
                assert cell.reason is None and len(cell.samples) == 4
                assert table.ran.decoder and table.ran.machine
            else:
                assert "need 100002 positions; the model's context has" in cell.reason
                assert "--decode_length 3" in cell.reason and not cell.samples
    cycles = [[s.cycle for s in found.tables[n].cells[0].samples] for n in (0, 4)]
    assert cycles[0] == cycles[1]  # the arms took turns


def test_the_report_is_what_is_printed_and_is_written_again(measured):
    done, folder = measured
    assert done.stdout == (folder / "report.md").read_text()
    assert worked("latency", "tables", folder).stdout == done.stdout
    (folder / "report.md").unlink()
    worked("latency", "--resume", folder)
    assert (folder / "report.md").read_text() == done.stdout


def test_ctrl_c_keeps_what_there_is(tmp_path):
    folder = tmp_path / "out"
    words = ("--arm", "--quantization none", "--runs", "1000000")
    running = started("-m", "quantbench", "latency", *SMALL, *words, "--output", folder)
    samples = folder / "samples.jsonl"

    def has_steps():
        return samples.exists() and '"kind": "decode"' in samples.read_text()

    wait_for(lambda: has_steps() or running.poll() is not None)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=300)
    assert running.returncode == 0 and "Traceback" not in stderr
    assert f"--resume {folder} goes on" in stderr and "not measured yet" in stdout
    kept = load(folder)
    assert kept.ended == "interrupted" and kept.tables[0].cells[0].samples
    assert (folder / "report.md").read_text() == stdout


# --------------------------------------------------------------------------------------- plans


def test_a_plan_from_a_command_line():
    arms = ("--quantization none", "--quantization int8wo --kernel reference")
    lists = {"ranks": "1", "sequence_lengths": "100", "batch_sizes": "4, 1,2"}
    made = make_plan(RunConfig(compile=True), arms, ("tiny",), **lists, runs=3)
    assert [arm.name for arm in made.arms] == ["none", "int8wo, kernel=reference"]
    second = RunConfig(compile=True, quantization="int8wo", kernel="reference")
    assert parse(made.arms[1].argv) == second
    assert (made.batch_sizes, made.runs, made.decode_length) == ([4, 1, 2], 3, 8)
    assert from_json(CellPlan, to_json(made)) == made
    assert [cell.batch_size for cell in made.cells] == [1, 1, 2, 2, 4, 4]
    config = made.cells[3].config(8)
    assert (config.batch_size, config.prefill_size, config.max_new_tokens) == (2, 100, 8)
    assert config.kernel == "reference" and config.temperature == 0


def test_what_torchrun_starts_is_refused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    done = latency("--tp", "2")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "latency starts its ranks itself, as many as --tp says: run it without" in done.stderr


def test_resume_refuses_results_of_another_machine(tmp_path):
    made_up({"none": 1.0}, tmp_path)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(lines[:-3]))
    done = latency("--resume", tmp_path)
    assert done.exit_code == 2 and "it was measured with machine 2 cores of a CPU" in done.stderr
    assert (tmp_path / "samples.jsonl").read_text() == "".join(lines[:-3])


def test_an_arm_of_which_nothing_can_be_measured_is_the_exit_code(tmp_path):
    """The other arm's table is printed and written all the same."""
    arms = ("--arm", "--quantization none", "--arm", "--cache_size 2")
    done = latency(*SMALL, *arms, "--sequence_lengths", "20", "--output", tmp_path / "out")
    assert done.exit_code == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: no cell of 'none, cache_size=2' could be measured: "), last
    assert last.endswith("hold: change or leave out what failed")
    found = load(tmp_path / "out")
    assert [bool(table.cells[0].samples) for table in found.tables] == [True, False]
    assert done.stdout == (tmp_path / "out" / "report.md").read_text()
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["ended"] == "complete" and os.listdir(tmp_path) == ["out"]
