"""The report of a card: its steps are commands that exist, and a series goes on where it ended.

The CPU stands in for the card. Nothing here says how it runs on one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from quantbench.__main__ import commands
from quantbench.compare.commands import gpu_report as command
from quantbench.compare.commands.gpu_report import FULL, MODELS, planned, slug
from quantbench.compare.figures.rows import rows
from quantbench.compare.sampling.arm import make_arms
from quantbench.compare.sampling.comparison import Comparison
from quantbench.compare.sampling.results import Results, Settings
from quantbench.compare.steps import Step, run
from quantbench.log.config import RunConfig, parse, split
from quantbench.quantize.spec import COMPARED_BRIEFLY, SHOWN
from tests.compare.fake_process import Behaviour, World

ROOT = Path(__file__).parents[2]
WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"


def writes(name, text="{}", **more):
    return Step(name, ("-c", WRITE, f"{{work}}/{name}.x", text), 0.1, f"{name}.x", **more)


def fails(name):
    return Step(name, ("-c", "raise SystemExit('no such card')"), 0.1, "x")


# ---------------------------------------------------------------------------------- the series


def test_a_step_whose_file_exists_is_not_run(tmp_path):
    folder, work = tmp_path / "docs", tmp_path / "work"
    steps = [writes("a", "1"), fails("b"), writes("c", "3")]
    states = [outcome.state for outcome in run(steps, folder, work, minutes=1)]
    assert states == ["done", "failed", "done"]
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "c.json"]
    (folder / "a.json").write_text("kept")
    (folder / "c.json").unlink()
    again = run([writes("a", "1"), writes("b"), writes("c", "3")], folder, work, minutes=1)
    assert [outcome.state for outcome in again] == ["kept", "done", "done"]
    assert (folder / "a.json").read_text() == "kept"


def test_a_failure_says_why_and_where_to_read_more(tmp_path):
    (outcome,) = run([fails("b")], tmp_path / "docs", tmp_path / "work", minutes=1)
    assert outcome.reason == f"no such card; see {tmp_path / 'work' / 'b.log'}"


def test_what_no_longer_fits_into_the_time_is_left(tmp_path):
    long = Step("long", ("-c", ""), 5.0, "x")
    outcomes = run([long, writes("a")], tmp_path / "docs", tmp_path / "work", minutes=1)
    assert [outcome.state for outcome in outcomes] == ["left", "done"]


def test_a_command_that_hangs_is_ended(tmp_path):
    hangs = Step("a", ("-c", "import time; time.sleep(600)"), 0.01 / 3, "x")
    (outcome,) = run([hangs], tmp_path / "docs", tmp_path / "work", minutes=1)
    assert outcome.state == "failed" and "ended after 0.0 min" in outcome.reason


def test_an_unfinished_file_of_an_earlier_attempt_does_not_count(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "x").write_text("half")
    does_nothing = Step("a", ("-c", ""), 0.1, "x")
    (outcome,) = run([does_nothing], tmp_path / "docs", tmp_path / "work", minutes=1)
    assert outcome.state == "failed" and not (tmp_path / "docs" / "a.json").exists()


SERIES = """
import sys
from pathlib import Path
from quantbench.compare.steps import run
from tests.compare.test_gpu_report import writes, Step
sleep = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
steps = [writes("a"), Step("b", ("-c", sleep, "{work}/pid"), 1.0, "pid")]
run(steps, Path(sys.argv[1]) / "docs", Path(sys.argv[1]) / "work", minutes=5)
"""


def _interruptible():
    """A shell's background job, in which the tests may run, ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interruption_ends_the_command_and_keeps_what_was_done(tmp_path):
    series = subprocess.Popen([sys.executable, "-c", SERIES, str(tmp_path)], cwd=ROOT,
                              start_new_session=True, preexec_fn=_interruptible)  # fmt: skip
    pid = tmp_path / "work" / "pid"
    while not (pid.exists() and pid.read_text()):
        assert series.poll() is None
        time.sleep(0.1)
    series.send_signal(signal.SIGINT)
    series.wait(300)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["a.json"]
    again = run([writes("a"), writes("b")], tmp_path / "docs", tmp_path / "work", minutes=1)
    assert [outcome.state for outcome in again] == ["kept", "done"]


# ---------------------------------------------------------------------------------- the steps


def parsed(words):
    """The options of a step's command, as its click command reads them."""
    group = click.Context(commands)
    made = commands.get_command(group, words[0]).make_context(words[0], list(words[1:]))
    return made.params


def test_every_step_is_a_command_that_exists():
    steps = list(planned("cuda", MODELS, SHOWN, FULL))
    for step in steps:
        assert step.command[0] == "-m"
        if step.command[1] == "pytest":
            continue
        module, *words = step.command[1:]
        assert module == "quantbench"
        options = parsed(words)
        for arm in options.get("texts") or ():
            assert parse(split(arm)).quantization in SHOWN
        assert options["device"] == "cuda"
    assert sum(step.minutes for step in steps) < 20


def test_the_schemes_that_matter_get_verdicts(monkeypatch):
    """The step's own options decide a difference of 10 % where processes differ by 2 %."""
    (step,) = (s for s in planned("cuda", MODELS, SHOWN, FULL) if s.name == "verdicts")
    options = parsed(step.command[2:])
    assert [parse(split(arm)).quantization for arm in options["texts"]] == [*COMPARED_BRIEFLY]
    texts = [f"--quantization {name} --device cpu" for name in COMPARED_BRIEFLY]
    settings = Settings(processes=options["processes"], max_minutes=options["max_minutes"])
    common = RunConfig(max_new_tokens=100, checkpoint_path="tiny")
    results = Results.begin(settings, make_arms(common, texts), "none")
    # A token of an 8 B model in bfloat16 takes about 5 ms at 3 TB/s.
    steady = Behaviour(0.005, noise=0.01, between=0.02)
    arms = [replace(steady, seconds=0.005 * share) for share in (1, 0.9, 1.1)]
    world = World.of(*arms)
    world.install(monkeypatch)
    Comparison(results, None, lambda line: None, world.command).run()
    verdicts = [row.verdict for row in rows(results)]
    assert verdicts == ["baseline", "faster", "slower"]


def test_every_scheme_is_compared_on_both_models():
    steps = list(planned("cuda", MODELS, SHOWN, FULL))
    for path in MODELS:
        arms = [word for step in steps if step.name.startswith("ab-") and path in step.command
                for word in step.command]  # fmt: skip
        for name in SHOWN:
            assert f"--quantization {name}" in arms


def test_the_card_s_name_names_the_folder():
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_what_pytest_wrote_is_counted(tmp_path):
    """Written by hand as pytest writes JUnit XML."""
    path = tmp_path / "tests.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="one"/>'
        '<testcase classname="tests.a" name="two"><failure message="x"/></testcase>'
        '<testcase classname="tests.b" name="three"><skipped/></testcase></testsuite></testsuites>'
    )
    value = json.loads(command.tests_json(path, ("-m", "pytest", "-m", "gpu")))
    assert (value["passed"], value["skipped"], value["failed"]) == (1, 1, ["tests.a::two"])
    assert value["about"]["command"] == "python -m pytest -m gpu"
    assert value["about"]["date"] and "commit" in value["about"] and value["about"]["machine"]


def report(*arguments):
    return CliRunner().invoke(command.gpu_report, list(arguments))


def test_the_cpu_stands_in(tmp_path):
    """Real steps, their files with command, commit, date and machine; then nothing is left to do.
    Roofline has its own tests, and the tests marked gpu need a card."""
    options = ["--device", "cpu", "--checkpoint_path", "tiny", "--schemes", "none,int8wo",
               "--short", "--steps", "caches,ab,prompts", "--output", str(tmp_path / "card"),
               "--work", str(tmp_path / "work")]  # fmt: skip
    done = report(*options)
    assert done.exit_code == 0, done.output
    value = json.loads((tmp_path / "card" / "ab-tiny-1.json").read_text())
    assert value["about"]["command"].startswith("python -m quantbench ab ")
    assert {"date", "commit", "machine", "versions"} <= set(value["about"])
    assert "int8wo" in done.stdout and "verdict" in done.stdout
    for name in ("caches", "prompts-64"):
        value = json.loads((tmp_path / "card" / f"{name}.json").read_text())
        assert value["about"]["command"].startswith("python -m quantbench ")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "card").iterdir()}
    again = report(*options)
    assert again.exit_code == 0 and "its file exists" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "card").iterdir()} == before


def test_without_a_card_it_says_what_does_work_here(monkeypatch):
    monkeypatch.setattr(command, "PROBE", """print('{"torch": "2.11.0", "card": null, '
                        '"found": ["torchao"]}')""")  # fmt: skip
    with pytest.raises(command.QuantbenchError, match="no CUDA card here; --device cpu --short"):
        command._card("cuda")
    monkeypatch.setattr(command, "PROBE", 'print(\'{"torch": "2.9.1", "found": []}\')')
    with pytest.raises(command.QuantbenchError, match="torch 2.9.1 is here; 2.11 or newer"):
        command._card("cuda")


def test_a_step_that_does_not_exist_is_refused():
    known = "--steps nothing: there are tests, caches, verdicts, ab-"
    with pytest.raises(command.UsageError, match=known):
        CliRunner().invoke(command.gpu_report, ["--steps", "nothing", "--dry_run"],
                           catch_exceptions=False)  # fmt: skip
