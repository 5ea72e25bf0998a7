"""generate.py as several ranks: what is logged, and how a run ends when one rank does; and arms and
lines of a log, whose workers are several ranks each."""

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantbench import environment
from quantbench.errors import UsageError
from quantbench.log.log import config_of
from quantbench.log.log import read as read_log
from quantbench.log.record import Record
from quantbench.parallel import launch
from quantbench.parallel.launch import RankFailed
from quantbench.run import checks
from tests.compare.test_ab import ENVIRONMENT
from tests.models.hugging_face import rewritten
from tests.programs import ROOT, children, finished, python, started, worked
from tests.replay.test_replay import RECORDS

SHORT = ("--num_samples", "1", "--max_new_tokens", "8", "--temperature", "0.8", "--device", "cpu")


def command(*words, program=(), cores=None):
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    pinned = {"preexec_fn": lambda: os.sched_setaffinity(0, cores)} if cores else {}
    words = (*program, ROOT / "generate.py", *SHORT, *words)
    return started(*words, env=one_thread, **pinned)


def check_record(log):
    """The log's only record, which is of two ranks."""
    (line,) = log.read_text().splitlines()
    record = Record.parse(line)
    assert record.render() == line and config_of(record).tp == 2
    start = "torchrun --nproc_per_node 2 generate.py --checkpoint_path tiny --device cpu"
    assert record.repro.startswith(start) and "--tp" not in record.repro


def errors_in(stderr):
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def test_a_run_of_two_ranks_is_logged_as_torchruns(tmp_path):
    """On one core: it ends nevertheless, and says what that costs."""
    log, details = tmp_path / "log.txt", tmp_path / "details.json"
    files = ("--write_result", log, "--output_json_path", details)
    one_core = {min(os.sched_getaffinity(0))}
    stdout, stderr = command("--tp", 2, *files, cores=one_core).communicate(timeout=300)
    check_record(log)
    written = json.loads(details.read_text())
    assert written["config"]["tp"] == 2
    assert written["parallel"] == {"ranks": 2, "backend": "shared memory"}
    assert "2 ranks share the model and exchange numbers through shared memory" in stderr
    assert stdout.startswith("Hello, my name is") and stdout.count("Hello") == 1
    assert not errors_in(stderr)
    warning = "2 ranks on 1 core take turns and wait for one another at every layer"
    assert f"{warning}: slower than --tp 1" in stderr


def test_a_rank_that_is_killed_ends_all(tmp_path):
    log = tmp_path / "log.txt"
    running = command("--tp", 2, "--num_samples", 100000, "--write_result", log)
    for line in running.stderr:
        if line.startswith("Warming up"):
            break
    ranks = children(running.pid)
    os.kill(ranks[1], signal.SIGKILL)
    killed = time.monotonic()
    _, stderr = running.communicate(timeout=300)
    assert running.returncode == 1
    assert time.monotonic() - killed < 30  # what users are promised, and not a speed
    (error,) = errors_in(stderr)
    assert error.startswith("error: rank 1 of 2 was killed (SIGKILL)")
    assert not log.exists()
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_a_rank_that_fails_ends_all(tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(ROOT / "models" / "tiny", folder)
    with rewritten(folder) as tensors:
        tensors["model.layers.1.self_attn.q_proj.weight"][-1, 0] = torch.nan  # rank 1 has this row
    log = tmp_path / "log.txt"
    options = ("--checkpoint_path", folder, "--write_result", log)
    stdout, stderr = command("--tp", 2, *options).communicate(timeout=300)
    message = "rank 1 of 2: layers.1.attention.wqkv has 1 weights that are NaN or infinite"
    assert errors_in(stderr) == [f"error: {message}: fetch the checkpoint again"]
    assert not log.exists()


def test_torchrun_writes_one_line_with_its_repro(tmp_path):
    log, program = tmp_path / "log.txt", "-m torch.distributed.run --nproc_per_node 2".split()
    running = command("--threads", 1, "--write_result", log, program=program)
    stdout, stderr = running.communicate(timeout=300)
    assert running.returncode == 0, stderr
    check_record(log)
    assert stdout.count("Hello, my name is") == 1


def ranks_that(program):
    return launch.Running([sys.executable, "-c", program], 3)


def test_the_first_cause_is_reported_and_not_what_follows_from_it():
    program = (
        "import os, sys, time, pathlib; rank = int(os.environ['RANK'])\n"
        "if rank == 0: pathlib.Path(os.environ['QUANTBENCH_RANK_REPORT']).write_text("
        "'Connection closed by peer'); sys.exit(1)\n"
        "time.sleep(0.5)\n"
        "if rank == 2: print('a last line', file=sys.stderr); sys.exit(7)\n"
        "time.sleep(60)"
    )
    with (
        pytest.raises(RankFailed, match="^rank 2 of 3 ended with exit code 7: a last line") as e,
        ranks_that(program) as ranks,
    ):
        ranks.wait()
    assert e.value.exit_code == 7
    assert all(process.poll() is not None for process in ranks.processes)


def test_what_every_rank_says_of_the_options_is_said_once():
    program = (
        "import os, sys, pathlib; "
        "pathlib.Path(os.environ['QUANTBENCH_RANK_REPORT']).write_text('--top_k takes 5')\n"
        "sys.exit(2)"
    )
    with pytest.raises(RankFailed, match="^--top_k takes 5$"), ranks_that(program) as ranks:
        ranks.wait()
    assert not ranks.folder.exists()


SCHEDULER = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = SCHEDULER | {"TORCHELASTIC_RUN_ID": "none"}


def test_a_place_is_read_from_torchruns_variables():
    assert environment.place(TORCHRUN) == environment.Place(1, 4, 1, 2)
    assert environment.place({}) is None
    assert environment.place({"WORLD_SIZE": "4"}) is None
    assert environment.place(SCHEDULER | {"MASTER_ADDR": "host", "MASTER_PORT": "1"}) is None
    assert environment.place(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize("given", [2, 4])
def test_torchrun_says_how_many_ranks_there_are_and_not_the_option(monkeypatch, given):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"^--tp {given}: torchrun has started 4 ranks; leave"):
        checks.check(checks.RunConfig(tp=given))


def test_a_run_without_tp_does_not_look_at_a_schedulers_ranks():
    """Its error is printed, too, though it is not of rank 0."""
    given = ("-m", "quantbench", "generate", "--num_samples", "1", "--max_new_tokens", "2")
    given += ("--device", "cpu", "--write_result", "none")
    done = finished(*given, env=os.environ | SCHEDULER, timeout=100)
    assert "tok/s" in done.stdout
    bad = python(*given, "--top_k", "x", env=os.environ | SCHEDULER, timeout=100)
    assert bad.returncode == 2 and bad.stderr.startswith("error: --top_k")


@pytest.mark.parametrize("option", ["interactive", "dry_run"])
def test_what_runs_in_one_process_is_refused(option):
    with pytest.raises(UsageError, match=f"--{option} runs in one process: leave out --tp 2"):
        checks.check(checks.RunConfig(tp=2, **{option: True}))


@pytest.mark.parametrize(
    ("cores", "ranks", "each"), [(8, 2, 4), (2, 4, 1), (7, 2, 3), (None, 2, None)]
)
def test_threads_are_divided_among_ranks(cores, ranks, each):
    assert environment.choose_threads(None, cores, {}, ranks).count == each
    assert bool(environment.crowded(ranks, cores)) == (cores == 2)


# ------------------------------------------------------------------------------ replay and ab

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


def test_a_line_of_torchrun_is_replayed_by_ranks(old_log):
    again = old_log.with_name("again.txt")
    worked("replay", old_log, "--all", "--write_result", again)
    ((_, record),) = read_log(again).records
    assert record.repro.startswith(REPRO) and config_of(record).tp == 2


def test_what_a_replay_of_ranks_would_do(old_log):
    told = worked("replay", old_log, "--all", "--dry_run").stdout
    assert re.search(r"now 0\.01 GB \(5 layers\), kernel ", told)


def test_an_arm_of_two_ranks(tmp_path):
    short = ("--max_new_tokens", "4", "--tokens", "64", "--processes", "1", "--half_width", "90%")
    words = ("-m", "quantbench", "ab", *short, "--arm", "", "--arm", "--tp 2")
    words += ("--device", "cpu", "--output", "out")
    finished(*words, cwd=tmp_path, env=ENVIRONMENT, timeout=200)
    alone, shared = json.loads(Path(tmp_path, "out/results.json").read_text())["rows"]
    assert shared["arm"] == "none, tp=2" and not shared["failed"]
    # every rank reads the norms
    assert alone["weight_bytes"] < shared["weight_bytes"] < 1.001 * alone["weight_bytes"]
    assert shared["decoder"] == "cpu-step"
    # bfloat16 parts of sums are rounded on each rank: far less than what a scheme changes
    assert 0 <= shared["kl"] < 1e-3
    repros = [record.repro for _, record in read_log(tmp_path / "benchmarks.txt").records]
    assert [repro.split()[0] for repro in repros] == ["python", "torchrun"]
