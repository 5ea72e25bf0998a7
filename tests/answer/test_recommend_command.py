"""quantbench recommend: what is measured, what is answered, and answering again."""

import dataclasses
import json
from functools import partial

import pytest

from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.plans import menu
from quantbench.quality.types import DecodeCheck
from quantbench.run.loading import load
from quantbench.run.plan import make_plan
from tests.bench.world import Behaviour, FakeProcess, World
from tests.programs import command
from tests.refusals import one_line

GB = 10**9
KL = {"none": 0.0, "int8wo": 0.002, "fp6": 0.02, "uintx-2-64": 3.0}
SECONDS = {"none": 0.1, "int8wo": 0.05, "fp6": 0.04, "uintx-2-64": 0.02}


run = partial(command, "recommend")


class Schemes:
    """As a worker that knows which schemes run here."""

    def answer(self, kind, do, **arguments):
        return [*KL, "autoquant"]

    def close(self):
        pass


@pytest.fixture
def world(monkeypatch):
    made = World.of(
        *(Behaviour(SECONDS[name], between=0.002, noise=0.002, kl=KL[name]) for name in KL)
    )
    made.install(monkeypatch)
    monkeypatch.setattr(menu, "Process", Schemes)
    return made


SMALL = ("--device", "cpu", "--write_result", "none", "--max_new_tokens", "8")


def test_a_recommendation_and_another_from_the_same_results(world, tmp_path):
    folder = tmp_path / "out"
    result = run(*SMALL, "--output", folder)
    assert result.exit_code == 0, result.stderr
    first, runs, verify, *remarks = result.stdout.splitlines()
    assert first.startswith("Use fp6: the fastest within the limits, the smallest and the best")
    assert "KL 0.02 (good)" in first and "decodes 2." in first
    assert "quantbench generate --quantization fp6 --checkpoint_path tiny" in runs
    assert "--compile" in runs and "--max_new_tokens" not in runs
    assert verify.startswith("    verify: quantbench ab ")
    assert remarks == ["Excluded: KL above 0.03: uintx-2-64"]
    kept = json.loads((tmp_path / "out" / "results.json").read_text())["answer"]
    assert [choice["arm"] for choice in kept["choices"]] == ["fp6"]
    assert world.asked("load") and "autoquant" not in result.stdout
    assert 3 not in world.asked("turn")  # its quality rules it out
    del world.journal[:]
    again = run("--from", folder, "--max_kl", "0.01")
    assert again.exit_code == 0 and not world.journal
    assert again.stdout.startswith("Use int8wo: ") and "KL above 0.01: fp6" in again.stdout
    none = run("--from", folder, "--max_memory", "2B")
    assert "needs --max_memory 0.01MB" in one_line(none) and none.exit_code == 1


def test_a_scheme_that_fails_is_the_exit_code_after_the_answer(world):
    world.behaviours[2].fails_to_load = True
    result = run(*SMALL)
    assert result.stdout.startswith("Use int8wo: ") and result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: 'fp6' failed: no such thing; the others were compared: ")


def test_the_report_says_where_decoding_differs(world, monkeypatch, tmp_path):
    """The decoder of one arm computes something else; the report has a sentence about that arm."""
    usual = FakeProcess.quality

    def differing(self, *given, **more):
        answer = usual(self, *given, **more)
        differs = self.config.quantization == "int8wo"
        check = DecodeCheck("cpu-step", 16, 0.5 if differs else 1e-4, 0.002, differs)
        found = dataclasses.replace(answer.quality, window=1024, model="tiny", decoding=check)
        return dataclasses.replace(answer, quality=found)

    monkeypatch.setattr(FakeProcess, "quality", differing)
    assert run(*SMALL, "--output", str(tmp_path / "out")).exit_code == 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "quality is of the model tiny on " in report
    (said,) = [line for line in report.splitlines() if "differs from reading" in line]
    assert said.startswith("- int8wo: decoding by cpu-step") and "at most 0.002 expected" in said


def test_a_checkpoint_that_is_quantized_already_is_one_line(world, tmp_path):
    folder = tmp_path / "saved"
    config = RunConfig(quantization="int8wo", device="cpu", save=str(folder))
    load(make_plan(config), lambda done, total: None, lambda line: None)
    result = run("--checkpoint_path", str(folder), *SMALL)
    assert "was saved as int8wo: schemes are compared on the full-precision" in one_line(result)


def test_limits_that_exclude_everything_measured(world, tmp_path):
    result = run(*SMALL, "--min_tok_s", "1e6")
    assert "needs --min_tok_s" in one_line(result) and result.exit_code == 1
    assert one_line(result).endswith(
        "; with --output DIR, recommend --from DIR answers other limits without measuring"
    )
    folder = tmp_path / "out"
    result = run(*SMALL, "--min_tok_s", "1e6", "--output", folder)
    assert one_line(result).endswith(f"; --from {folder} answers other limits without measuring")


def test_schemes_that_cannot_satisfy_the_memory_are_not_measured(world):
    """The embedded model takes 12.7 MB in full precision, 7.5 in int8wo."""
    result = run(*SMALL, "--max_memory", "10MB")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert world.asked("load")[:4] == [0, 1, 2, 3]  # the baseline even so
    result = run(*SMALL, "--max_memory", "6.9MB")
    assert "exceed --max_memory 6.90 MB: int8wo (" in result.stderr
    line = one_line(run(*SMALL, "--max_memory", "1MB"))
    assert "--max_memory 1.00 MB: the smallest scheme for this model, uintx-2-64" in line


NEEDS = {"none": 16 * GB, "int8wo": 8 * GB, "int4wo-64": 4 * GB, "fp6": 6 * GB}


@pytest.mark.parametrize(
    "free, most, chosen",
    [
        (None, None, ["none", "int8wo", "fp6", "int4wo-64"]),
        (23 * GB, 7 * GB, ["none", "fp6", "int4wo-64"]),
        (15 * GB, None, ["int8wo", "fp6", "int4wo-64"]),
        (7 * GB, None, ["int4wo-64", "fp6"]),
    ],
)
def test_the_baseline_fits_the_machine_and_the_others_the_limit(free, most, chosen):
    assert menu.select(NEEDS, free, most) == chosen


def test_a_single_scheme_is_nothing_to_measure():
    with pytest.raises(UsageError, match="only int4wo-64 is left to measure"):
        menu.select(NEEDS, 5 * GB, None)


def test_what_is_calibrated_comes_last():
    needs = {"int4wo-32-gptq": 5 * GB, **NEEDS, "uintx-3-64": 3 * GB}
    assert menu.select(needs, None, None)[-2:] == ["uintx-3-64", "int4wo-32-gptq"]


def test_autoquant_and_schemes_that_the_shapes_refuse_are_left_out():
    common = RunConfig(checkpoint_path="dummy:Qwen2.5-0.5B", device="cpu")
    needs, _ = menu.needed(common, ["none", "int8wo", "int4wo-256"])
    assert list(needs) == ["none", "int8wo"]  # in_features 896 is no multiple of 256
    assert needs["int8wo"] < 0.8 * needs["none"]  # of it, the tied embedding stays as it is
