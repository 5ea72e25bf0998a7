"""recommend --share and collect: several machines, or several models, in one table."""

import dataclasses
import json
import random
from functools import partial

import pytest

from quantbench.answer import shared
from quantbench.answer.rows import rows
from tests.answer.example_results import example_results
from tests.answer.test_recommend_command import SMALL, run, world  # noqa: F401
from tests.bench.world import FakeProcess
from tests.programs import command
from tests.refusals import one_line


@pytest.fixture
def files(tmp_path):
    """The same comparison of two machines, with other figures."""
    made = {}
    for machine, seed in (("Example CPU", 3), ("Other CPU", 4)):
        results = example_results(seed=seed)
        about = dataclasses.replace(results.about, machine=machine)
        made[machine] = tmp_path / f"{seed}.json"
        shared.write("--share", made[machine], [shared.Model.of(results, rows(results))], about)
    return made


collected = partial(command, "collect")


def test_each_row_has_its_machine_and_its_own_interval(files):
    result = collected(*files.values())
    assert result.exit_code == 0, result.stderr
    head, *lines = result.stdout.splitlines()
    assert "machine" in head and "model" not in head  # one model: it is in the caption
    assert "model: TinyLlama-1.1B-Chat-v1.0; peak memory: 3.00 GB" in lines
    for machine, seed in (("Example CPU", 3), ("Other CPU", 4)):
        of_machine = rows(example_results(seed=seed))
        own = [line for line in lines if line.startswith(f"{machine}  ")]
        assert len(own) == len(of_machine)
        for row, line in zip(of_machine[1:], own[1:], strict=True):
            assert row.arm in line and row.decode_speed_up.written(".2f") in line
        assert any(line.startswith(f"{machine}: 2026-01-01, torch ") for line in lines)
    table = collected("--format", "md", *files.values()).stdout
    assert table.startswith("| machine | arm | ") and table.count("\n| ") >= 24


def test_one_machine_twice_is_two_machines(files, tmp_path):
    value = json.loads(files["Other CPU"].read_text())
    value["about"]["machine"] = "Example CPU"
    value["digest"] = shared._digest(value)
    files["Other CPU"].write_text(json.dumps(value))
    table = collected(*files.values()).stdout
    assert "Example CPU (1)  none" in table and "Example CPU (2)  none" in table


def test_an_edited_file_is_refused(files):
    """Any one figure or word, changed by hand."""
    path = files["Other CPU"]
    text = path.read_text()
    places = [n for n, character in enumerate(text) if character in "12345678"]
    place = random.choice(places)
    path.write_text(text[:place] + str(int(text[place]) + 1) + text[place + 1 :])
    said = one_line(collected(*files.values()))
    assert "is not what recommend --share writes: it " in said


def test_a_file_given_twice_is_refused(files, tmp_path):
    again = tmp_path / "again.json"
    again.write_bytes(files["Other CPU"].read_bytes())
    said = one_line(collected(files["Other CPU"], again))
    assert f"{again} holds the same measurement as " in said


def test_a_recommendation_is_shared(world, tmp_path):  # noqa: F811
    path, folder = tmp_path / "here.json", str(tmp_path / "out")
    result = run(*SMALL, "--share", str(path), "--output", folder)
    assert result.exit_code == 0, result.stderr
    (model,) = shared.read(path).models
    assert {row.arm for row in model.rows} == {"none", "int8wo", "fp6", "uintx-2-64"}
    assert "fp6" in collected(path).stdout and "uintx" not in collected(path).stdout
    again = tmp_path / "again.json"
    assert run("--from", folder, "--share", str(again)).exit_code == 0
    assert shared.read(again).models[0].rows == model.rows


BITS = {"tiny": (1.2, 0.01), "tiny_moe": (1.1, 0.01)}  # and the relative error of the perplexity


@pytest.fixture
def models(world, monkeypatch):  # noqa: F811
    usual = FakeProcess.quality

    def quality(self, *given, **more):
        answer = usual(self, *given, **more)
        bits, error = BITS[self.config.checkpoint_path]
        figures = {"bits_per_byte": bits, "perplexity": 8.0, "perplexity_standard_error": 8 * error}
        return dataclasses.replace(answer, quality=dataclasses.replace(answer.quality, **figures))

    monkeypatch.setattr(FakeProcess, "quality", quality)


BOTH = ("--checkpoint_path", "tiny", "--checkpoint_path", "tiny_moe")


def test_models_are_compared_by_bits_per_byte(models, tmp_path):
    path = tmp_path / "both.json"
    result = run(*SMALL, *BOTH, "--output", str(tmp_path / "out"), "--share", str(path))
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert {(tmp_path / "out" / name / "report.md").exists() for name in BITS} == {True}
    table = result.stdout.rpartition("\n\n")[0].rpartition("\n\n")[2].splitlines()
    assert result.stdout.count("Use fp6: ") == 2
    assert [line.split()[1] for line in table[1:]] == ["fp6", "fp6"] and "1.1000" in table[1]
    assert len(shared.read(path).models) == 2
    assert "takes the fewest bits per byte\n" in result.stdout


def test_models_that_predict_alike_are_not_told_apart(models, monkeypatch):
    monkeypatch.setitem(BITS, "tiny", (1.101, 0.01))
    assert "fewest bits per byte; not told apart from " in run(*SMALL, *BOTH).stdout
