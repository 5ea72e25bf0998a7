"""`quantbench latency` as a command: its files, its mistakes, its end by Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantbench.__main__ import commands
from quantbench.compare.sampling.latency_results import LatencyResults
from tests.compare.latency_folders import plan, results

ROOT = Path(__file__).parents[2]
SMALL = ("--batch_sizes", "1,3", "--decode_length", "3", "--runs", "4", "--device", "cpu")


def latency(*words):
    return CliRunner().invoke(commands, ["latency", *map(str, words)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two arms on one and two ranks; a prompt that is too long. The result, and the folder."""
    folder = tmp_path_factory.mktemp("latency") / "out"
    arms = ("--arm", "--quantization none", "--arm", "--quantization int8wo")
    lengths = ("--sequence_lengths", "20,99999")
    return latency(*SMALL, *arms, *lengths, "--tp", "1,2", "--output", folder), folder


def test_a_sweep_and_its_files(measured):
    done, folder = measured
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {
        "results.json", "report.md", "samples.csv", "latency.svg"
    }  # fmt: skip
    found = LatencyResults.load(folder)
    assert found.ended == "complete" and len(found.tables) == 8
    for table in found.tables:
        assert table.model.heads == 4
        for cell in table.cells:
            if table.sequence_length == 20:
                assert cell.reason is None and len(cell.samples) == 4
                assert table.carried.decoder and table.carried.machine
            else:
                assert cell.reason.startswith("past the context") and not cell.samples
    assert all(t.spent.overhead_share is not None for t in found.tables if t.carried)
    assert "overhead_share" in (folder / "results.json").read_text()


def test_the_report_is_what_tables_prints(measured):
    done, folder = measured
    assert done.stdout == (folder / "report.md").read_text()
    assert latency("tables", folder).stdout == done.stdout


def test_metrics_compares_two_arms(measured):
    _, folder = measured
    words = ["metrics", "--baseline", f"{folder}:none", "--target", f"{folder}:int8wo"]
    done = CliRunner().invoke(commands, words)
    assert done.exit_code == 0 and "multi-user" in done.stdout.lower()


def test_a_complete_folder_is_written_again(measured):
    done, folder = measured
    (folder / "report.md").unlink()
    assert latency("--resume", folder).exit_code == 0
    assert (folder / "report.md").read_text() == done.stdout


def test_ctrl_c_keeps_what_there_is(tmp_path):
    folder = tmp_path / "out"
    # The second arm's cell takes hours.
    words = ("--arm", "--quantization none", "--arm", "--quantization int8wo", "--runs", "1000000")
    command = [sys.executable, "-m", "quantbench", "latency", *SMALL, *words, "--output", folder]
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and running.poll() is None:
        text = (folder / "results.json").read_text() if (folder / "results.json").exists() else ""
        if "prefill_seconds" in text:
            break
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=300)
    assert running.returncode == 0 and "Traceback" not in stderr
    assert f"--resume {folder} goes on" in stderr and "not measured yet" in stdout
    kept = LatencyResults.load(folder)
    assert kept.ended == "interrupted" and kept.tables[0].cells[0].samples
    assert (folder / "report.md").read_text() == stdout


# ---------------------------------------------------------------------------------- mistakes

BAD = [
    (("--batch_sizes", "0"), "--batch_sizes takes numbers from 1 to 16777216; given: 0 in '0'"),
    (("--batch_sizes", "1,2,1"), "--batch_sizes has 1 twice in '1,2,1': leave one out"),
    (("--sequence_lengths", "1,long"), "given: 'long' in '1,long'"),
    (("--tp", "1,,2"), "--tp takes numbers from 1 to 16777216 with commas between them"),
    (("--tp", "-1"), "--tp takes numbers from 1 to 16777216 with commas between them"),
    (("--runs", "9" * 30), "--runs takes a whole number up to 2**63-1"),
    (("--batch_sizes", "9" * 30), "--batch_sizes takes numbers from 1 to 16777216; given: 9"),
    (("--tp", "3"), "4 query and 4 key/value heads, which 3 ranks cannot share evenly; --tp takes"),
    (("--decode_length", "1"), "--decode_length takes a number from 2: the first token is prefill"),
    (("--runs", "0"), "--runs takes a number from 1; given: 0"),
    (("--runs", "many"), "--runs takes a whole number up to 2**63-1; given: 'many'"),
    (("--timeout", "0"), "0"),
    (("--checkpoint_path", "nope"), "nope"),
    (("--arm", "--batch_size 3"), "--batch_size does not belong into an arm: it is --batch_sizes"),
    (("--arm", "--temperature 1"), "--temperature does not belong into an arm: it is always the"),
    (("--arm", "--quantization int9wo"), "nearest: int8wo"),
    (("--arm", "", "--arm", "--quantization none"), "arms 1 and 2 are the same run"),
    (("--prefill_size", "3"), "no such option: '--prefill_size'"),
    (("measure",), "'measure' belongs to no option"),
    (("--resume", "nope"), "--resume nope: results.json: "),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), BAD)
def test_a_mistake_is_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = latency(*words, "--output", "out") if "--resume" not in words else latency(*words)
    assert done.exit_code in (1, 2), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr and done.stdout == ""
    assert not any(tmp_path.iterdir())  # neither a folder nor a log


def test_what_torchrun_starts_is_refused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    done = latency("--tp", "2")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "latency starts its ranks itself, as many as --tp says: run it without" in done.stderr


def test_what_resume_refuses(tmp_path):
    kept = results({"none": 1.0})
    kept.save(tmp_path)
    for words, message in (
        (("--runs", 3), "is of another plan: --runs is '10' there and '3' here"),
        (("--tp", "1,2"), "--tp is '1' there and '1,2' here"),
        (("--tp", "no"), "--tp takes numbers from 1 to"),
        (("--arm", "--quantization fp6"), "--arm is '--quantization none' there and"),
        (("--num_layers", 2), "the arm 'none' has other options of generate.py there"),
        (("--output", tmp_path / "other"), "leave out --output"),
    ):
        done = latency("--resume", tmp_path, *words)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1 and message in done.stderr
    kept.tables[0].cells.pop()
    kept.save(tmp_path)
    done = latency("--resume", tmp_path)
    assert done.exit_code == 2 and "a part of a table was measured on 2 cores of a CPU" in (
        done.stderr
    )
    assert LatencyResults.load(tmp_path).tables == kept.tables


def test_a_folder_that_is_taken(tmp_path):
    results({"none": 1.0}).save(tmp_path)
    done = latency("--output", tmp_path)
    assert done.exit_code == 2 and f"--resume {tmp_path} goes on with them" in done.stderr
    (tmp_path / "results.json").rename(tmp_path / "notes")
    done = latency("--output", tmp_path)
    assert done.exit_code == 2 and "neither new nor an empty folder" in done.stderr


def test_an_arm_of_which_nothing_can_be_measured_is_the_exit_code(tmp_path):
    """The other arm's table is printed and written all the same."""
    arms = ("--arm", "--quantization none", "--arm", "--cache_size 2")
    done = latency(*SMALL, *arms, "--sequence_lengths", "20", "--output", tmp_path / "out")
    assert done.exit_code == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: no cell of 'none, cache_size=2' could be measured: "), last
    assert last.endswith("hold: change or leave out what failed")
    results = LatencyResults.load(tmp_path / "out")
    assert [bool(table.cells[0].samples) for table in results.tables] == [True, False]
    assert done.stdout == (tmp_path / "out" / "report.md").read_text()


def test_nothing_that_can_be_measured(tmp_path):
    words = ("--sequence_lengths", "99999", "--batch_sizes", "1", "--output", tmp_path / "out")
    done = latency(*words)
    assert done.exit_code == 1
    assert "error: no cell could be measured: past the context" in done.stderr
    assert json.loads((tmp_path / "out" / "results.json").read_text())["ended"] == "complete"
    assert os.listdir(tmp_path) == ["out"]
    assert plan().cells == 6
