"""quantbench tune: the grid, which of its settings are one plan, and the answer."""

import dataclasses
import html
import json
import os
import random
import re
from functools import partial
from types import SimpleNamespace

import pytest

from quantbench import host
from quantbench.bench import store as stores
from quantbench.bench.answers import Planned
from quantbench.bench.grid import DEFAULT, group, read_grid, said, settings_of
from quantbench.commands import tune
from quantbench.errors import QuantbenchError, UsageError
from quantbench.generate import make_generator
from quantbench.log.config import RunConfig
from quantbench.log.options import parse
from quantbench.run import identity
from quantbench.run.environment import choose_threads
from quantbench.run.loading import load
from quantbench.run.plan import make_plan
from tests.bench.world import Behaviour, World
from tests.programs import command
from tests.refusals import one_line

COMMON = RunConfig(max_new_tokens="4")
USUAL = choose_threads(None, host.cores() or 1, os.environ).count  # threads of the default


run = partial(command, "tune")


# ------------------------------------------------------------------------------- the grid


def settings_over(*texts):
    return settings_of(COMMON, read_grid(COMMON, texts))


def test_a_grid_is_every_combination_and_the_default():
    settings = settings_over("threads=1,2", "compile=on,off", "kv-cache=dense,int8")
    assert len(settings) == 1 + 8 and settings[0].name == DEFAULT
    assert settings[1].name == "threads=1, compile=on, kv_cache=dense"
    assert settings[1].config == dataclasses.replace(COMMON, threads=1, compile=True)
    assert settings[-1].config == dataclasses.replace(COMMON, threads=2, kv_cache="int8")
    assert [setting.changes for setting in settings[:5]] == [0, 2, 3, 1, 2]


def test_a_value_may_be_the_default():
    assert [s.config.threads for s in settings_over("threads=default,1")] == [None, None, 1]
    assert list(read_grid(COMMON, ["dtype=bfloat16,float32"])) == ["precision"]


# ------------------------------------------------------------------------------- identical plans


def of(*words):
    return identity.identity(make_plan(parse(words)))


EXPERTS = "--checkpoint_path tiny_moe"
TIERS = f"{EXPERTS} --expert_memory 20"
# Options of a run, what is added to them, and whether the plan stays the same.
ADDED = [
    *(("", words, True) for words in (
        f"--threads {USUAL}", "--kv_cache dense", "--linear_causal_mask", "--prefill_chunk 512")),
    ("--top_k 50000", "--top_k 100000", True),  # more than the vocabulary has
    *(("", words, False) for words in (
        f"--threads {USUAL + 1}", "--kv_cache int8", "--quantization int8wo", "--kernel torch",
        "--decoder modules", "--precision float32", "--prefill_chunk 2", "--temperature 0",
        "--cache_size 4000")),
    *((TIERS, words, True) for words in ("--expert_policy auto", "--decoder cpu-step")),
    (f"{TIERS} --batch_size 2", "--decoder cpu-step", True),
    *((TIERS, words, False) for words in (
        "--expert_memory 21", "--expert_policy fetch", "--expert_placement first",
        "--decoder modules")),
    (EXPERTS, "--expert_memory 900", False),
]  # fmt: skip


@pytest.mark.parametrize(("options", "added", "alike"), ADDED)
def test_options_change_the_plan_if_they_change_the_run(options, added, alike):
    given = ("--device", "cpu", *options.split())
    assert (of(*given, *added.split()) == of(*given)) == alike


CARRIED_OUT = [
    ("--quantization", "none"),
    ("--quantization", "int8wo", "--kv_cache", "int8"),
    ("--quantization", "int4wo-64", "--kernel", "reference"),
    ("--quantization", "embed-int8"),
    ("--quantization", "int8dq", "--batch_size", "3"),
    ("--checkpoint_path", "tiny_moe", "--quantization", "int8wo"),
    ("--checkpoint_path", "tiny_moe", "--batch_size", "2"),
]


@pytest.mark.parametrize("words", CARRIED_OUT, ids=" ".join)
def test_kernel_and_decoder_are_those_that_the_loaded_model_gets(words):
    """Of shapes, against what a run of the same options has when its weights are read."""
    plan = make_plan(parse(["--device", "cpu", *words]))
    expected = identity.identity(plan)
    loaded = load(plan, lambda done, total: None, lambda line: None)
    generator = make_generator(plan, loaded.model)
    assert expected["decoder"] == generator.decoder.name
    assert expected["kernel"] == loaded.kernels
    named = of("--device", "cpu", *words, "--decoder", generator.decoder.name)
    assert named == expected
    compiled = of("--device", "cpu", *words, "--compile")
    one_op = generator.decoder.name == "cpu-step" or not loaded.model.compiles()
    assert (compiled == expected) == one_op


def test_settings_of_one_plan_are_measured_once():
    plans = [Planned({"threads": n}) for n in "2123"]
    able, refused = group(settings_over("threads=1,2,3"), plans)
    assert [(one.name, one.also) for one in able] == [
        (DEFAULT, ["threads=2"]), ("threads=1", None), ("threads=3", None)]  # fmt: skip
    lines = said(able, refused, None, 3)
    assert lines[0] == "3 settings of the grid: 3 plans to measure"
    assert lines[1] == "identical plans: default is measured for threads=2, too"


def test_a_default_that_cannot_run_is_no_baseline():
    settings = settings_over("threads=1,2,3")
    plans = [Planned(None, "too little memory", "refused"), Planned(None, "bad", "usage"),
             Planned({"threads": "2"}), Planned({"threads": "3"})]  # fmt: skip
    able, refused = group(settings, plans)
    assert [one.name for one in (*able, *refused)] == ["threads=2", "threads=3", "threads=1"]
    lines = said(able, refused, plans[0].problem, 3)
    assert "too little memory" in lines[1] and "threads=1 cannot run: bad" in lines
    with pytest.raises(QuantbenchError, match="no setting can run here: too little"):
        group(settings, [plans[0]] * 4)
    with pytest.raises(UsageError, match="no setting can run here: bad"):
        group(settings, [plans[1]] * 4)


# ------------------------------------------------------------------------------- the comparison


NO_ROOM = Planned(None, "no room", "refused")


@pytest.fixture
def plans(monkeypatch):
    """Sets the plans of settings, by number; without, a setting's identity is its options."""

    def plans(of=lambda number, argv: Planned({"argv": " ".join(argv)})):
        def answer(kind, do, argvs):
            assert (kind, do) == (list[Planned], "plans")
            return [of(number, argv) for number, argv in enumerate(argvs)]

        worker = SimpleNamespace(answer=answer, close=lambda: None)
        monkeypatch.setattr(tune, "Process", lambda: worker)

    plans()
    return plans


@pytest.fixture
def measured(monkeypatch, plans):
    """Tune in a world whose settings take these seconds a token, the default first; None fails."""

    def measured(seconds, *words, seed=0, between=0.002):
        usual = Behaviour(between=between, noise=0.002)
        own = ({"seconds": each} if each else {"fails_to_load": True} for each in seconds)
        World([dataclasses.replace(usual, **each) for each in own], seed=seed).install(monkeypatch)
        return run("--device", "cpu", "--write_result", "none", "--max_new_tokens", "8", *words)

    return measured


GRID = ("--over", "threads=1,2,3", "--max_minutes", "1000")


def test_the_fastest_setting_is_taken(measured, tmp_path):
    folder = tmp_path / "out"
    result = measured((1.0, 1.0, 0.5, 2.0), *GRID, "--output", str(folder))
    assert result.exit_code == 0, result.output
    line = result.stdout[result.stdout.index("\nTake ") :].splitlines()[1]
    assert line.startswith("Take threads=2: decodes 2.") or "decodes 1.9" in line
    assert re.search(r"    run: +quantbench generate .*--threads 2", result.stdout)
    for name in ("default", "threads=1", "threads=2", "threads=3"):
        assert f"\n{name} " in result.stdout
    assert line in (folder / "report.md").read_text()
    assert line in html.unescape((folder / "report.html").read_text())


def test_a_tune_goes_on_with_its_answer(measured, tmp_path):
    folder = str(tmp_path / "out")
    first = measured((1.0, 1.0, 0.2, 1.0), *GRID, "--processes", "1", "--output", folder)
    assert first.exit_code == 0, first.output
    result = run("--resume", folder, "--processes", "2")
    assert "Take threads=2: " in result.stdout, result.output
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert saved["answer"]["choices"][0]["arm"] == "threads=2"
    assert [arm.processes for arm in stores.load(tmp_path / "out").arms] == [2] * 4


def test_a_setting_that_fails_is_the_exit_code_after_the_answer(measured, plans):
    """A setting whose plan shows that it cannot run is named before, and has not failed."""
    result = measured((1.0, None, 0.5, 1.0), *GRID, "-o", "answer")
    assert "Take threads=2: " in result.stdout and result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: 'threads=1' failed: no such thing; the others were compared")

    plans(lambda number, argv: NO_ROOM if number == 3 else Planned({"argv": " ".join(argv)}))
    result = measured((1.0, 1.0, 0.5, 1.0), *GRID, "-o", "answer")
    assert "threads=3 cannot run: no room" in result.stderr and result.exit_code == 0


def test_one_plan_is_not_measured(plans):
    plans(lambda number, argv: Planned({}))
    result = run("--over", "threads=1,2")
    assert result.exit_code == 0 and "every setting comes to the same plan" in result.stdout
    saved = json.loads(run("--over", "threads=1,2", "-o", "json").stdout)
    assert "the same plan" in saved["answer"]["nothing"] and not saved["answer"]["choices"]
    plans(lambda number, argv: NO_ROOM if number else Planned({}))
    line = one_line(run("--over", "threads=1,2"))
    assert "no setting but default can run here; threads=1: no room" in line


def test_equal_settings_are_hardly_ever_told_apart(measured):
    """Of 15 tunes in which nothing differs, at most 5 % take a setting: 5 come once in 1000."""
    taken, spread = 0, random.choice([0.005, 0.015])
    for seed in random.sample(range(1000), 15):
        result = measured((1.0,) * 4, *GRID, "-o", "answer", seed=seed, between=spread)
        taken += "Take" in result.stdout
    assert taken < 5


# ------------------------------------------------------------------------------- for real


def test_a_real_tune_of_two_thread_counts(tmp_path):
    """One of the two is the default, so there are two arms; the other's plan is the default's."""
    other = 1 if USUAL > 1 else 2
    folder = tmp_path / "out"
    result = run("--over", f"threads={USUAL},{other}", "--max_new_tokens", "4", "--processes", "1",
                 "--half_width", "90%", "--write_result", "none", "--output", str(folder)
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    results = stores.load(folder)
    assert [arm.name for arm in results.arms] == ["default", f"threads={other}"]
    assert results.arms[0].also == [f"threads={USUAL}"]
    assert all(arm.turns and arm.samples and arm.quality is None for arm in results.arms)
    assert f"identical plans: default was measured for threads={USUAL}, too" in result.stdout
    assert "Keep default" in result.stdout or f"Take threads={other}" in result.stdout
