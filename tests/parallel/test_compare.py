"""Arms and log lines with --tp: their workers are several ranks each."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from quantbench.answer.replayed import beside
from quantbench.errors import QuantbenchError
from quantbench.log.log import config_of
from quantbench.log.log import read as read_log
from tests.answer.test_ab import ENVIRONMENT
from tests.answer.test_replay import RECORDS
from tests.programs import command, python

REPRO = (
    "torchrun --nproc_per_node 2 generate.py --checkpoint_path tiny --device cpu --precision "
    "torch.bfloat16 --num_samples 1 --max_new_tokens 5 --top_k 200 --temperature 0.8 --threads 1"
)


@pytest.fixture
def old_log(tmp_path):
    """A log whose one line has a repro of torchrun."""
    line = replace(RECORDS[0][1], mod="tiny", compile=False, device="cpu", repro=REPRO)
    (tmp_path / "old.txt").write_text(line.render() + "\n")
    return tmp_path / "old.txt"


run = partial(command, "replay")


def test_a_line_of_torchrun_is_replayed_by_ranks(old_log):
    again = old_log.with_name("again.txt")
    result = run(old_log, "--all", "--write_result", again)
    assert result.exit_code == 0, result.stderr
    ((_, record),) = read_log(again).records
    assert record.repro.startswith(REPRO) and config_of(record).tp == 2


def test_what_a_replay_of_ranks_would_do_and_cannot_do(old_log):
    result = run(old_log, "--all", "--dry_run")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"now 0\.01 GB \(5 layers\), kernel ", result.stdout)
    ((_, record),) = read_log(old_log).records

    class Old:
        name, has_ranks = "abc1234", False

    with pytest.raises(QuantbenchError, match="abc1234: that commit measures no ranks"):
        beside(config_of(record), Old, None)


def test_an_arm_of_two_ranks(tmp_path):
    short = ("--max_new_tokens", "4", "--tokens", "64", "--processes", "1", "--half_width", "90%")
    words = ("-m", "quantbench", "ab", *short, "--arm", "", "--arm", "--tp 2")
    words += ("--device", "cpu", "--output", "out")
    done = python(*words, cwd=tmp_path, env=ENVIRONMENT, timeout=200)
    assert done.returncode == 0, done.stderr
    alone, shared = json.loads(Path(tmp_path, "out/results.json").read_text())["rows"]
    assert shared["arm"] == "none, tp=2" and not shared["failed"]
    # every rank reads the norms
    assert alone["weight_bytes"] < shared["weight_bytes"] < 1.001 * alone["weight_bytes"]
    assert shared["decoder"] == "cpu-step"
    # bfloat16 parts of sums are rounded on each rank: far less than what a scheme changes
    assert 0 <= shared["kl"] < 1e-3
    repros = [record.repro for _, record in read_log(tmp_path / "benchmarks.txt").records]
    assert [repro.split()[0] for repro in repros] == ["python", "torchrun"]
