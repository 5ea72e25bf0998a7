"""What reaches a terminal: no control characters of others, any locale's text, quiet ends."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from quantbench.compare.comparing import content
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits
from quantbench.compare.recommend import recommend
from quantbench.compare.rows import rows
from quantbench.text import is_control
from quantbench.typed_json import to_json
from tests.compare.example_results import ARMS, example_results
from tests.experts import counted
from tests.latency import latencies
from tests.programs import ROOT, command, python, ran, started
from tests.refusals import one_line

HOSTILE = "a\x1b]0;title\x07\rb\nFAKE line\u202e\x9b31m"
KEYS = ("name", "why", "machine", "probe", "kernel", "why_not", "commit", "date", "decoder")
SHORT = ("--num_samples", "1", "--max_new_tokens", "2", "--device", "cpu", "--write_result", "none")


def spoiled(value, keys=KEYS):
    """JSON whose names and texts are hostile; the names of arms stay different."""
    if isinstance(value, list):
        return [spoiled(item, keys) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item + HOSTILE + 400 * "x" * (key == "name")
        if key in keys and isinstance(item, str)
        else item
        if key == "config"
        else spoiled(item, keys)
        for key, item in value.items()
    }


def spoil(path: Path) -> None:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text("".join(json.dumps(spoiled(json.loads(line))) + "\n" for line in lines))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A folder with results, a log and files whose names and texts somebody made up."""
    folder = tmp_path_factory.mktemp("hostile")
    results = example_results(folder=folder / "ab", arms=ARMS[:3])
    chosen = recommend(rows(results), Limits(), Compared(results).best)
    value = to_json(content(results, rows(results), chosen))
    (folder / "shared.json").write_text(json.dumps(spoiled(value, (*KEYS, "arm", "verdict"))))
    latencies.measured({"none": 1.0, "int8wo": 0.6}, folder / "sweep", why="z")
    for name in ("ab", "sweep"):
        spoil(folder / name / "meta.json")
        spoil(folder / name / "samples.jsonl")
    counts = counted.counts_of(counted.ROUTERS, 40, 1)
    counted.popularity_of(counts).save("--output", folder / "popularity.json")
    spoil(folder / "popularity.json")
    (folder / "benchmarks.txt").write_text(f"{HOSTILE}\n")
    (folder / HOSTILE[:20]).mkdir()
    (folder / HOSTILE[:20] / "log.txt").write_text(f"{HOSTILE}\n")
    return folder


COMMANDS = (
    "recommend --from ab",
    "recommend --from NAME",
    "ab --resume ab",
    "ab --resume NAME",
    "latency tables sweep",
    "latency tables NAME",
    "metrics --baseline sweep --target sweep",
    "collect shared.json",
    "experts show popularity.json",
    "log check benchmarks.txt",
    "log check NAME/log.txt",
    "log check NAME/nothing",
    "estimate --validate ab/meta.json",
    "generate --checkpoint_path NAME",
    "quality --checkpoint_path NAME",
    "readme NAME/log.txt",
    "schemes NAME",
    "NAME",
)


@pytest.mark.parametrize("line", COMMANDS)
def test_no_control_character_of_others_reaches_the_terminal(line, hostile, monkeypatch):
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = command(*(word.replace("NAME", HOSTILE[:20]) for word in line.split()))
    for text in (result.stdout, result.stderr):
        assert not [c for c in text if is_control(c) and c not in "\n\t"], repr(text)
        assert not [row for row in text.splitlines() if row.startswith(("FAKE", "b\n"))], text
        assert 300 * "x" not in text
    assert "Traceback" not in result.output and "report it" not in result.output


def test_a_report_has_no_control_characters_either(hostile, tmp_path):
    from quantbench.bench import store
    from quantbench.compare import tables
    from quantbench.compare.intervals import Compared
    from quantbench.compare.limits import Limits
    from quantbench.compare.recommend import recommend

    results = store.load(hostile / "ab")
    found = Compared(results)
    found_rows = rows(results, found)
    tables.write(tmp_path, results, found_rows, recommend(found_rows, Limits(), best=found.best))
    for path in tmp_path.glob("*.*"):
        text = path.read_text()
        assert not [c for c in text if is_control(c) and c not in "\n\t"], path.name
        assert "\nFAKE" not in text, path.name


def test_generated_text_keeps_lines_and_letters_that_are_joined(capsys):
    from quantbench.cli import Printed

    Printed(sys.stdout).write("a\n\tb\r\x1b[2J\x9b1m\u202e👩\u200d👧 می\u200cخواهم")
    assert capsys.readouterr().out == "a\n\tb\\x0d\\x1b[2J\\x9b1m\\u202e👩\u200d👧 می\u200cخواهم"


# --- locales --------------------------------------------------------------------------------------


def test_a_locale_changes_no_file_and_no_prompt(tmp_path):
    arms = ("--arm", "", "--arm", "--quantization int8wo --prompt Größe", "--allow_different")
    more = ("--tokens", "0", "--max_minutes", "0.1", "--processes", "1", "--output", "é")
    done = in_locale(
        "-m", "quantbench", "ab", *arms, *SHORT[2:-1], "größe.txt", *more, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "--prompt 'Größe'" in (tmp_path / "größe.txt").read_text("utf-8")
    assert "Größe" in (tmp_path / "é" / "report.md").read_text("utf-8")


def in_locale(*words, cwd):
    """A program where nothing but ASCII can be encoded."""
    ascii_ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables = {**os.environ, **ascii_, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return python(*words, cwd=cwd, env=variables)


def test_every_file_is_opened_with_an_encoding():
    """ruff's rule is a preview, so that pyproject.toml does not have it."""
    parts = ("quantbench", "models", "quantize", "kv_cache", "generate.py")
    done = python("-m", "ruff", "check", "--preview", "--select", "PLW1514", *parts)
    assert done.returncode == 0, done.stdout


# --- how commands end -----------------------------------------------------------------------------


def test_a_conversation_needs_an_input():
    done = ran("bash", "-c", f"{sys.executable} generate.py --interactive <&-")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: --interactive") and "stdin" in last


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such limit")
@pytest.mark.parametrize("kilobytes", [300_000, 900_000])
@pytest.mark.parametrize("given", ["generate", "ab --arm= --arm=--quantization=int8wo"])
def test_a_limit_too_small_for_torch_is_named(kilobytes, given):
    words = f"{given} {' '.join(SHORT[4:])}"
    done = ran("bash", "-c", f"ulimit -v {kilobytes}; {sys.executable} -m quantbench {words}")
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: not enough memory to load torch")
    assert "OpenBLAS" not in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_has_read_enough_is_no_error():
    line = f"set -o pipefail; {sys.executable} -m quantbench schemes --list | head -1"
    done = ran("bash", "-c", line)
    assert done.returncode in (0, 128 + signal.SIGPIPE) and done.stderr == ""


def test_no_temporary_folder_is_named(tmp_path, monkeypatch):
    def unwritable(*_, **__):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.mkdtemp", unwritable)
    monkeypatch.setattr("tempfile.TemporaryFile", unwritable)
    monkeypatch.chdir(tmp_path)
    result = command("ab", "--arm", "", "--arm", "--quantization int8wo", *SHORT[4:])
    assert "set TMPDIR" in one_line(result)


def test_a_folder_that_was_removed_is_named_before_torch_is_loaded(tmp_path):
    line = f"mkdir {tmp_path}/x; cd {tmp_path}/x; rmdir {tmp_path}/x; PYTHONPATH={ROOT} "
    done = ran("bash", "-c", f"{line} {sys.executable} {ROOT}/generate.py {' '.join(SHORT)}")
    assert done.returncode == 1 and "the current folder was removed" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_sigterm_before_any_turn_says_what_is_kept(tmp_path):
    arms = ("--arm", "", "--arm", "--quantization int8wo", "--output", "out", *SHORT[4:])
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = started("-m", "quantbench", "ab", *arms, cwd=tmp_path, env=variables)
    assert process.stderr
    process.stderr.readline()  # of the first arm
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 143, stderr
    assert "ended by SIGTERM" in stderr and "--resume out" in stderr
