"""quantbench recommend: what is measured, what is answered, and answering again."""

import dataclasses
import functools
import json
import re

import pytest
from click.testing import CliRunner

from quantbench.compare.commands import ab
from quantbench.compare.commands import recommend as command
from quantbench.compare.figures.choices import Limits
from quantbench.compare.figures.rows import rows
from quantbench.compare.limit_options import OPTIONS, limits, size_of
from quantbench.compare.output import tables
from quantbench.compare.sampling.answers import SchemeNames
from quantbench.compare.sampling.arm import make_arms
from quantbench.compare.sampling.comparison import Comparison
from quantbench.compare.sampling.results import Results, Settings
from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.quality.types import DecodeCheck, Quality, QualityAnswer, ReferenceFile
from quantbench.run.loading import load
from quantbench.run.plan import make_plan
from tests.compare.fake_process import Behaviour, FakeProcess, World
from tests.compare.refusals import one_line

GB = 10**9
RATIOS = {"none": 1.0, "int8wo": 1.002, "fp6": 1.01, "uintx-2-64": 5.0}
SECONDS = {"none": 1.0, "int8wo": 0.5, "fp6": 0.4, "uintx-2-64": 0.2}


def run(*arguments):
    return CliRunner().invoke(command.recommend, list(arguments))


class Schemes:
    """As a worker that knows which schemes run here."""

    def answer(self, kind, do, **arguments):
        return SchemeNames([*RATIOS, "autoquant"])

    def close(self):
        pass


def quality(self, tokens, text, reference, keep):
    ratio = RATIOS[self.config.quantization]
    found = Quality(tokens, 8 * ratio, 0.1)
    if reference:
        ends = [ratio - 0.001, ratio + 0.001]
        found = dataclasses.replace(
            found, perplexity_ratio=ratio, perplexity_ratio_interval=ends,
            kl=ratio - 1, kl_standard_error=0.001,
        )  # fmt: skip
    return QualityAnswer(found, ReferenceFile(keep) if keep else None)


@pytest.fixture
def world(monkeypatch):
    made = World.of(*(Behaviour(SECONDS[name], between=0.01, noise=0.002) for name in RATIOS))
    made.install(monkeypatch)
    monkeypatch.setattr(FakeProcess, "quality", quality)
    monkeypatch.setattr(command, "Process", Schemes)
    monkeypatch.setattr(ab, "Comparison", functools.partial(Comparison, command=made.command))
    return made


SMALL = ("--device", "cpu", "--write_result", "none", "--max_new_tokens", "4")


def test_a_recommendation_and_another_from_the_same_results(world, tmp_path):
    folder = str(tmp_path / "out")
    result = run(*SMALL, "--output", folder)
    assert result.exit_code == 0, result.stderr
    conditions, *answers = result.stdout.splitlines()
    assert conditions.startswith("Recommendation: KL divergence at most 0.03")
    assert answers[0].startswith("  Fastest that keeps quality, smallest and best compromise: fp6")
    assert "quantbench generate --quantization fp6 --checkpoint_path tiny" in answers[1]
    assert "--compile" in answers[1] and "--max_new_tokens" not in answers[1]
    assert answers[2] == "  Ruled out: 1 arm by KL divergence above 0.03"
    kept = json.loads((tmp_path / "out" / "results.json").read_text())["recommendation"]
    assert [choice["arm"] for choice in kept["choices"]] == ["fp6"]
    assert world.asked("load") and "autoquant" not in result.stdout
    del world.journal[:]
    again = run("--from", folder, "--max_perplexity_increase", "0.5%")
    assert again.exit_code == 0 and not world.journal
    assert re.search(r": int8wo, (1\.9|2\.)", again.stdout)  # of samples that scatter
    assert "perplexity more than 0.5 %" in again.stdout
    other = run("--from", folder, "--checkpoint_path", "dummy:Llama-3.2-1B")
    assert "holds results of tiny, not of --checkpoint_path 'dummy:Llama" in one_line(other)
    assert other.exception.exit_code == 2
    none = run("--from", folder, "--max_memory", "2B")
    assert "needs --max_memory 0.01MB" in one_line(none) and none.exception.exit_code == 1
    slow = run("--from", folder, "--min_tok_s", "100000")
    assert "No arm satisfies all limits; the nearest, fp6, needs --min_tok_s 2." in one_line(slow)


def test_a_scheme_that_fails_is_the_exit_code_after_the_answer(world):
    world.behaviours[2].fails_to_load = True
    result = run(*SMALL)
    assert "smallest and best compromise: int8wo" in result.stdout and result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: 'fp6' failed: no such thing; the others were compared: ")


def test_the_report_says_what_quality_is_of_and_where_decoding_differs(world, monkeypatch):
    """The decoder of one arm computes something else; the report has a sentence about that arm."""

    def differing(self, tokens, text, reference, keep):
        answer = quality(self, tokens, text, reference, keep)
        differs = self.config.quantization == "int8wo"
        check = DecodeCheck("cpu-step", 16, 0.5 if differs else 1e-4, 1.0, 1.01, 0.002, differs)
        found = dataclasses.replace(answer.quality, window=1024, model="tiny", decoding=check)
        return dataclasses.replace(answer, quality=found)

    monkeypatch.setattr(FakeProcess, "quality", differing)
    texts = ("--quantization none", "--quantization int8wo", "--quantization fp6")
    arms = make_arms(RunConfig(device="cpu", max_new_tokens="4"), texts)
    results = Results.begin(Settings(max_minutes=1000), arms, "none")
    Comparison(results, None, lambda line: None, world.command).run()
    report = tables.terminal(results, rows(results))
    assert (
        "quality is of the model tiny on 4096 tokens of the embedded texts, at most 1024" in report
    )
    (said,) = [line for line in report.splitlines() if "differs from reading" in line]
    assert said.startswith("int8wo: decoding by cpu-step") and "at most 0.002 expected" in said


def test_a_checkpoint_that_is_quantized_already_is_one_line(world, tmp_path):
    folder = tmp_path / "saved"
    config = RunConfig(quantization="int8wo", device="cpu", save=str(folder))
    load(make_plan(config), lambda done, total: None, lambda line: None)
    result = run("--checkpoint_path", str(folder), *SMALL)
    assert "was saved as int8wo: schemes are compared on the full-precision" in one_line(result)


def test_limits_that_exclude_everything_measured(world, tmp_path):
    result = run(*SMALL, "--min_tok_s", "1e6")
    assert "needs --min_tok_s" in one_line(result) and result.exception.exit_code == 1
    assert one_line(result).endswith(
        "; with --output DIR, recommend --from DIR answers other limits without measuring"
    )
    folder = str(tmp_path / "out")
    result = run(*SMALL, "--min_tok_s", "1e6", "--output", folder)
    assert one_line(result).endswith(f"; --from {folder} answers other limits without measuring")


def test_schemes_that_cannot_satisfy_the_memory_are_not_measured(world):
    """The embedded model takes 12.7 MB in full precision, 7.5 in int8wo."""
    result = run(*SMALL, "--max_memory", "10MB")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert world.asked("load")[:4] == [0, 1, 2, 3]  # the baseline even so
    result = run(*SMALL, "--max_memory", "6.9MB")
    assert "exceed --max_memory 6.90 MB: int8wo (" in result.stderr
    result = run(*SMALL, "--max_memory", "1MB")
    assert "--max_memory 1.00 MB: the smallest scheme for this model, uintx-2-64" in one_line(
        result
    )


NEEDS = {"none": 16 * GB, "int8wo": 8 * GB, "int4wo-64": 4 * GB, "fp6": 6 * GB}


@pytest.mark.parametrize(
    "free, most, chosen",
    [
        (None, None, ["none", "int8wo", "int4wo-64", "fp6"]),
        (23 * GB, 7 * GB, ["none", "int4wo-64", "fp6"]),
        (15 * GB, None, ["int8wo", "int4wo-64", "fp6"]),
        (7 * GB, None, ["int4wo-64", "fp6"]),
    ],
)
def test_the_baseline_fits_the_machine_and_the_others_the_limit(free, most, chosen):
    assert command.select(NEEDS, free, most) == chosen


@pytest.mark.parametrize(
    "free, most, reason",
    [
        (None, 3 * GB, "the smallest scheme for this model, int4wo-64, needs 4.00 GB"),
        (5 * GB, None, "only int4wo-64 is left to measure"),
    ],
)
def test_nothing_to_measure_is_one_line(free, most, reason):
    with pytest.raises(UsageError, match=reason):
        command.select(NEEDS, free, most)


def test_autoquant_and_schemes_that_the_shapes_refuse_are_left_out():
    common = RunConfig(checkpoint_path="dummy:Qwen2.5-0.5B", device="cpu")
    needs, _ = command.needed(common, ["none", "int8wo", "int4wo-256"])
    assert list(needs) == ["none", "int8wo"]  # in_features 896 is no multiple of 256
    assert needs["int8wo"] < 0.8 * needs["none"]  # of it, the tied embedding stays as it is


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (("--from", "nowhere"), "--from nowhere: results.json: "),
        (("--from", "empty"), "--from empty: results.json: "),
        (("--from", "damaged"), "--from damaged: results.json is not what ab --output writes"),
        (("--from", "empty", "--max_minutes", "3"), "--max_minutes would measure anew"),
        (("--from", "empty", "--kernel", "cpu"), "--kernel would measure anew"),
        (("--max_memory", "8 apples"), "--max_memory takes a size such as 8GB or 7.5GiB"),
        (("--max_memory", "0"), "--max_memory takes a size"),
        (("--max_perplexity_increase", "many"), "--max_perplexity_increase takes a share"),
        (("--max_kl", "0"), "--max_kl takes nats per token, above 0 and below 100; given: '0'"),
        (("--min_top1", "2"), "--min_top1 takes a share such as 2% or 0.02"),
        (("--min_tok_s", "-3"), "--min_tok_s takes tokens per second, above 0"),
        (("--min_tok_s", "1e9"), "above 0 and below 1e9; given: '1e9'"),
        (("--text", "nowhere.txt"), "--text nowhere.txt: No such file"),
        (("--quantization", "int8wo"), "no such option: '--quantization'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "results.json").write_text('{"format": 4, "arms": []}')
    assert reason in one_line(run(*arguments))
    assert not (tmp_path / "benchmarks.txt").exists()


@pytest.mark.parametrize(
    "text, size",
    [
        ("8GB", 8 * GB),
        ("8 gb", 8 * GB),
        ("7.5GiB", 7.5 * 2**30),
        ("8e9", 8 * GB),
        ("500MB", GB / 2),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert size_of(text) == size


def test_what_is_not_given_stays():
    before = Limits(max_memory=3, max_perplexity_increase=0.1, min_tok_s=7)
    none = dict.fromkeys(OPTIONS)
    assert limits(none, before) == before and limits(none) == Limits()
    given = none | {"max_memory": "4GB", "max_kl": "0.1", "min_top1": "95%"}
    assert limits(given, before) == Limits(4 * GB, 0.1, 7, max_kl=0.1, min_top1=0.95)
