"""quantbench recommend: what is measured, what is answered, and answering again; collect: several
machines in one table."""

import dataclasses
import json
from functools import partial

import pytest

from quantbench.compare import menu, share_file
from quantbench.compare.comparing import content
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits
from quantbench.compare.recommend import recommend as recommended
from quantbench.compare.rows import rows
from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.quality import answers
from quantbench.quality.types import DecodeCheck
from quantbench.run import runnable
from quantbench.run.loading import load
from quantbench.run.plan import make_plan
from tests.bench.world import Behaviour, World
from tests.compare.example_results import example_results
from tests.programs import command, worked
from tests.refusals import one_line

GB = 10**9
KL = {"none": 0.0, "int8wo": 0.002, "fp6": 0.02, "uintx-2-64": 3.0}
BYTES = {"none": 16, "int8wo": 8, "fp6": 6, "uintx-2-64": 2}
SECONDS = {"none": 0.1, "int8wo": 0.05, "fp6": 0.04, "uintx-2-64": 0.02}


run = partial(command, "recommend")


@pytest.fixture
def world(monkeypatch):
    made = World.of(
        *(Behaviour(SECONDS[name], between=0.002, noise=0.002, kl=KL[name]) for name in KL)
    )
    made.install(monkeypatch)
    made.weight_bytes = lambda config: BYTES[config.quantization]
    monkeypatch.setattr(runnable, "schemes", lambda config: [*KL, "autoquant"])
    return made


SMALL = ("--device", "cpu", "--write_result", "none", "--max_new_tokens", "8")


def test_a_recommendation_and_another_from_the_same_results(world, tmp_path):
    folder = tmp_path / "out"
    result = worked("recommend", *SMALL, "--output", folder)
    first, figures, more, runs, verify, *remarks = result.stdout.splitlines()
    assert first.startswith("Use fp6: the fastest of those shown to be within the limits, the ")
    assert "KL 0.02" in figures + more and "decodes 2." in figures
    assert "quantbench generate --quantization fp6 --checkpoint_path tiny" in runs
    assert "--compile" not in runs and "--max_new_tokens" not in runs  # nothing is compiled
    assert verify.startswith("    verify: quantbench ab ")
    assert remarks[0] == "Excluded: KL above 0.03: uintx-2-64"
    assert remarks[-1].startswith(
        "Limits: no KL above 0.03; KL 0.001 is full precision's own noise"
    )
    assert [line.partition(":")[0] for line in remarks] == ["Excluded", "Noise", "Limits"]
    kept = json.loads((tmp_path / "out" / "results.json").read_text())["answer"]
    assert [choice["arm"] for choice in kept["choices"]] == ["fp6"]
    assert world.asked("load") and "autoquant" not in result.stdout
    assert 3 not in world.asked("turn")  # its quality rules it out
    del world.journal[:]
    again = run("--from", folder, "--max_kl", "0.01")
    assert again.exit_code == 0 and not world.journal
    assert (
        again.stdout.startswith("Use int8wo: ") and "KL above 0.01: uintx-2-64, fp6" in again.stdout
    )
    none = run("--from", folder, "--min_tok_s", "1e8")
    assert "needs --min_tok_s " in one_line(none) and none.exit_code == 1


def test_lengths_of_answers_are_measured_of_what_is_recommended_and_kept(
    world, tmp_path, monkeypatch
):
    folder = tmp_path / "out"
    monkeypatch.setattr(answers, "MOST", 8)
    monkeypatch.setattr(answers, "PROMPTS", answers.PROMPTS[:3])
    words = ("--max_kl", "0.01", "--answers")
    first = worked("recommend", *SMALL, *words, "--output", folder)
    line = " ".join(first.stdout.split()).partition("int8wo: answers to 3 prompts: ")[2]
    assert line.startswith("median 8 tokens, 1.00 (1.00 to 1.00) × full precision's; 0% end")
    assert " s to the median answer at " in line and " tok/s, full precision " in line
    assert len(json.loads((folder / "answers.json").read_text())) == 2
    monkeypatch.setattr(answers, "answers", None)  # nothing is left to measure
    again = worked("recommend", "--from", folder, *words)
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    refused = run("--checkpoint_path", "dummy:Llama-3.2-1B", "--answers")
    assert "has random weights" in one_line(refused) and refused.exit_code == 2


def test_a_scheme_that_fails_is_the_exit_code_after_the_answer(world):
    world.behaviours[2].fails_to_load = True
    result = run(*SMALL)
    assert result.stdout.startswith("Use int8wo: ") and result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: 'fp6' failed: no such thing; the others were compared: ")


def test_the_report_says_where_decoding_differs(world, tmp_path):
    """The decoder of one arm computes something else; the report has a sentence about that arm."""

    def figures(config):
        differs = config.quantization == "int8wo"
        check = DecodeCheck("cpu-step", 16, 0.5 if differs else 1e-4, 0.002, differs)
        return {"window": 1024, "model": "tiny", "decoding": check}

    world.figures = figures
    worked("recommend", *SMALL, "--output", tmp_path / "out")
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
    worked("recommend", *SMALL, "--max_memory", "10MB")
    assert world.asked("judge") == [1, 2, 3] and 0 in world.asked("load")  # the baseline even so
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
    assert (
        needs["int8wo"].held < 0.8 * needs["none"].held
    )  # of it, the tied embedding stays as it is


# ------------------------------------------------------------- several machines, several models


@pytest.fixture
def shared_files(tmp_path):
    """The same comparison of two machines, with other figures."""
    made = {}
    for machine, seed in (("Example CPU", 3), ("Other CPU", 4)):
        results = example_results(seed=seed)
        results.about = dataclasses.replace(results.about, machine=machine)
        made[machine] = tmp_path / f"{seed}.json"
        own = rows(results)
        value = content(results, own, recommended(own, Limits(), Compared(results).best))
        share_file.write("--share", made[machine], [value])
    return made


collected = partial(command, "collect")


def test_each_row_has_its_machine_and_its_own_interval(shared_files):
    head, *lines = worked("collect", *shared_files.values()).stdout.splitlines()
    assert "machine" in head and "model" not in head  # one model: it is in the caption
    assert "model: TinyLlama-1.1B-Chat-v1.0; peak memory: 3.00 GB" in lines
    for machine, seed in (("Example CPU", 3), ("Other CPU", 4)):
        of_machine = rows(example_results(seed=seed))
        own = [line for line in lines if line.startswith(f"{machine}  ")]
        assert len(own) == len(of_machine)
        for row, line in zip(of_machine[1:], own[1:], strict=True):
            assert row.arm in line and row.decode_speed_up.written(".2f") in line
        assert any(line.startswith(f"{machine}: 2026-01-01, torch ") for line in lines)
    table = collected("--format", "md", *shared_files.values()).stdout
    assert table.startswith("| machine | arm | ") and table.count("\n| ") >= 24


def test_one_machine_twice_is_two_machines(shared_files, tmp_path):
    value = json.loads(shared_files["Other CPU"].read_text())
    value["about"]["machine"] = "Example CPU"
    shared_files["Other CPU"].write_text(json.dumps(value))
    table = collected(*shared_files.values()).stdout
    assert "Example CPU (1)  none" in table and "Example CPU (2)  none" in table


def test_a_shared_file_names_no_folder(tmp_path):
    private = {
        "command": "python generate.py --checkpoint_path /home/ann/m/Llama --text='/srv/a b.txt'",
        "argv": ["--checkpoint_path", "dummy:/home/ann/config.json", "../ann/x", "~/m/y"],
        "failed": "/home/ann/m/z: it is damaged; see /home/ann/log",
        "public": ["org/name", "5 tok/s", "1/2", "https://huggingface.co/org/name", 1.5, None],
    }
    share_file.write("--share", tmp_path / "one.json", [private])
    read = json.loads((tmp_path / "one.json").read_text())
    assert read["public"] == private["public"]
    assert read["command"] == "python generate.py --checkpoint_path Llama --text='a b.txt'"
    assert read["argv"] == ["--checkpoint_path", "dummy:config.json", "x", "y"]
    assert read["failed"] == "z: it is damaged; see log"


def test_a_file_given_twice_is_refused(shared_files, tmp_path):
    again = tmp_path / "again.json"
    again.write_bytes(shared_files["Other CPU"].read_bytes())
    said = one_line(collected(shared_files["Other CPU"], again))
    assert f"{again} holds the same measurement as " in said


def test_a_recommendation_is_shared(world, tmp_path):
    path, folder = tmp_path / "here.json", tmp_path / "out"
    worked("recommend", *SMALL, "--share", path, "--output", folder)
    (made,) = share_file.read(path)
    assert {row.arm for row in made.rows} == {"none", "int8wo", "fp6", "uintx-2-64"}
    assert "fp6" in collected(path).stdout and "uintx" not in collected(path).stdout
    again = tmp_path / "again.json"
    worked("recommend", "--from", folder, "--share", again)
    for path in (again, folder / "results.json"):
        assert [of.rows for of in share_file.read(path)] == [made.rows]


BITS = {"tiny": (1.2, 0.01), "tiny_moe": (1.1, 0.01)}  # and the relative error of the perplexity


@pytest.fixture
def models(world):
    def figures(config):
        bits, error = BITS[config.checkpoint_path]
        return {"bits_per_byte": bits, "perplexity": 8.0, "perplexity_standard_error": 8 * error}

    world.figures = figures


BOTH = ("--checkpoint_path", "tiny", "--checkpoint_path", "tiny_moe")


def test_models_are_compared_by_bits_per_byte(models, tmp_path):
    path = tmp_path / "both.json"
    result = worked("recommend", *SMALL, *BOTH, "--output", tmp_path / "out", "--share", path)
    assert {(tmp_path / "out" / name / "report.md").exists() for name in BITS} == {True}
    table = result.stdout.rpartition("\n\n")[0].rpartition("\n\n")[2].splitlines()
    assert result.stdout.count("Use fp6: ") == 2
    assert [line.split()[1] for line in table[1:]] == ["fp6", "fp6"] and "1.1000" in table[1]
    assert len(share_file.read(path)) == 2
    assert "takes the fewest bits per byte\n" in result.stdout


def test_models_that_predict_alike_are_not_told_apart(models, monkeypatch):
    monkeypatch.setitem(BITS, "tiny", (1.101, 0.01))
    assert "fewest bits per byte; not told apart from " in run(*SMALL, *BOTH).stdout
