"""Plans and results of latencies, and the four metrics: by hand, and what is refused."""

import dataclasses
import json
import math

import pytest
from click.testing import CliRunner
from scipy import stats

from quantbench.__main__ import commands
from quantbench.compare.figures.latency import Cell, LatencySample
from quantbench.compare.figures.metrics import Side, compare
from quantbench.compare.sampling.latency_plan import LatencyPlan, make_plan, whole_numbers
from quantbench.compare.sampling.latency_results import LatencyResults, TableResult
from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.log.options import parse
from quantbench.typed_json import from_json, to_json
from tests.compare.latency_folders import plan, results


def side(cells, length=100, decode_length=3):
    return Side("folder", TableResult("tiny", "arm", 1, length, cells=cells), decode_length, 4, 1)


def cell(batch_size, *runs):
    return Cell(batch_size, [LatencySample(run[0], list(run[1:])) for run in runs])


# Batch 1: prefill 0.1 and 0.3 s, mean 0.2; whole requests 0.2 and 0.5 s, mean 0.35.
# Batch 2: prefill 0.4, request 0.5. Batch 4: prefill 1.0, request 1.1: more tokens/s of either kind
# at batch 2 for the prompt (500 against 400), and at batch 2 as a whole (4 against 3.64 requests).
BASELINE = [
    cell(1, (0.1, 0.05, 0.05), (0.3, 0.1, 0.1)),
    cell(2, (0.4, 0.05, 0.05)),
    cell(4, (1.0, 0.05, 0.05)),
]
# Prefill half as long at batch 1, batch 4 the best: prefill 0.4, request 0.5.
TARGET = [
    cell(1, (0.1, 0.2, 0.2), (0.1, 0.2, 0.2)),
    cell(2, (0.4, 0.05, 0.05)),
    cell(4, (0.4, 0.05, 0.05)),
]


def test_the_metrics_by_hand():
    metrics = compare(side(BASELINE), side(TARGET)).metrics
    assert [(m.name, m.counted) for m in metrics] == [
        ("time to first token", None),
        ("maximum prompt throughput", "input"),
        ("single-user prompt throughput", "input"),
        ("single-user throughput", "output"),
        ("single-user throughput", "input + output"),
        ("multi-user maximum throughput", "output"),
        ("multi-user maximum throughput", "input + output"),
    ]
    values = [(m.baseline.value, m.baseline.batch_size) for m in metrics]
    expected = [
        (200, 1), (2 * 100 / 0.4, 2), (100 / 0.2, 1), (3 / 0.35, 1), (103 / 0.35, 1),
        (2 * 3 / 0.5, 2), (2 * 103 / 0.5, 2),
    ]  # fmt: skip
    assert [size for _, size in values] == [size for _, size in expected]
    assert [value for value, _ in values] == pytest.approx([value for value, _ in expected])
    assert [m.target.batch_size for m in metrics] == [1, 4, 1, 1, 1, 4, 4]
    # Latency: target ÷ baseline. Throughput: baseline ÷ target.
    ratios = [100 / 200, 500 / 1000, 500 / 1000, 0.5 / 0.35, 0.5 / 0.35, 0.5, 0.5]
    assert [m.ratio.value for m in metrics] == pytest.approx(ratios)
    for metric in metrics:
        quotient = metric.target.value / metric.baseline.value
        assert metric.ratio.value == pytest.approx(
            quotient if metric.unit == "ms" else 1 / quotient
        )
    assert metrics[0].ratio.name == "Ratio_Latency" and metrics[1].ratio.name == "Ratio_Throughput"
    # One or two runs are too few for an interval, and for a verdict.
    assert {(m.ratio.low, m.verdict) for m in metrics} == {(None, "no difference shown")}


def test_the_interval_is_welch_s():
    """For small scatter, log of a mean is its relative deviation: scipy's Welch test of the two
    samples, each divided by its mean, has the same error and the same degrees of freedom. Four
    ratios share 2 %: 0.5 % each."""
    before, after = [0.100, 0.101, 0.099, 0.102, 0.098], [0.080, 0.082, 0.081, 0.079]
    cells = [[cell(1, *((s, 0.01, 0.01) for s in some))] for some in (before, after)]
    ratio = compare(side(cells[0]), side(cells[1])).metrics[0].ratio
    means = [sum(some) / len(some) for some in (before, after)]
    relative = [
        [s / mean for s in some] for some, mean in zip((after, before), means[::-1], strict=True)
    ]  # noqa: E501
    apart = stats.ttest_ind(*relative, equal_var=False).confidence_interval(0.995)
    centre = means[1] / means[0]
    assert ratio.value == pytest.approx(centre)
    assert ratio.low == pytest.approx(centre * math.exp(apart.low))
    assert ratio.high == pytest.approx(centre * math.exp(apart.high))
    assert ratio.verdict == "better"


def test_what_cannot_be_measured_has_its_reason():
    broken = [
        Cell(1, TARGET[0].samples, "killed"),
        Cell(2, [], "does not fit"),
        Cell(4, [], "killed"),
    ]
    metrics = compare(side(BASELINE), side(broken)).metrics
    assert all(m.ratio is None and m.verdict == "not measured" for m in metrics)
    assert metrics[0].reason == "target: killed"
    assert metrics[1].reason == "target: does not fit; killed"
    assert metrics[0].baseline.value == pytest.approx(200)
    only = compare(side(BASELINE[:1]), side(TARGET[:1])).metrics
    assert only[1].reason == "; ".join(
        f"{n}: no batch size above 1 in the plan" for n in ("baseline", "target")
    )  # noqa: E501
    partly = compare(side(BASELINE), side([TARGET[0], TARGET[1], Cell(4, [], "killed")])).metrics
    assert partly[1].target.batch_size == 2 and partly[1].reason is None


def test_an_end_that_is_not_one_does_not_read_as_one():
    metrics = compare(side(BASELINE), side(TARGET)).metrics
    ratio = type(metrics[0].ratio)
    assert ratio("Ratio_Latency", 0.99, 0.98, 0.99996).shown == ["0.99000", "0.98000", "0.99996"]
    assert ratio("Ratio_Latency", 1.01, 1.00004, 1.02).shown == ["1.01000", "1.00004", "1.02000"]
    assert ratio("Ratio_Latency", 0.5, 0.4, 0.6).shown == ["0.500", "0.400", "0.600"]


# ---------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    "text, message",
    [
        ("0", "takes numbers from 1 to"),
        ("1,2,0", "given: 0 in '1,2,0'"),
        ("1,2,1", "has 1 twice"),
        ("1,two", "given: 'two' in '1,two'"),
        ("1,,2", "given: ''"),
        ("", "given: ''"),
        ("-1", "given: '-1'"),
        ("1.5", "given: '1.5'"),
        ("1e3", "given: '1e3'"),
        ("٣", "with commas between them"),
        ("²", "with commas between them"),
        ("9" * 5000, "with commas between them"),
        ("99999999", "takes numbers from 1 to"),
        (",".join(map(str, range(1, 1002))), "1001 numbers"),
    ],
)
def test_lists_that_are_none(text, message):
    with pytest.raises(UsageError, match=r"^--batch_sizes ") as caught:
        whole_numbers("--batch_sizes", text)
    assert message in str(caught.value) and len(str(caught.value)) < 400


def test_a_list_keeps_its_order():
    assert whole_numbers("--tp", "4, 1,2") == [4, 1, 2]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"decode_length": 1}, "--decode_length takes a number from 2: the first token is prefill"),
        ({"runs": 0}, "--runs takes a number from 1; given: 0"),
        ({"warmups": -1}, "--warmups takes a number from 0"),
        ({"ranks": []}, "--tp takes from 1"),
        ({"ranks": [2, 2]}, "--tp has 2 twice"),
        ({"arms": ("none", "none")}, "'none' is twice among the arms"),
        ({"arms": ()}, "a plan without arms"),
    ],
)
def test_plans_that_measure_nothing(changes, message):
    with pytest.raises(UsageError) as caught:
        plan(**changes)
    assert message in str(caught.value)


def test_a_plan_says_what_differs():
    assert plan().difference(plan()) is None
    assert plan().difference(plan(runs=20)) == "--runs is '10' there and '20' here"
    assert plan().difference(plan(batch_sizes=[1])) == "--batch_sizes is '1,2,4' there and '1' here"
    assert plan().difference(plan(ranks=[2])) == "--tp is '1' there and '2' here"
    assert "--arm is '--quantization none,--quan" in plan().difference(plan(("none",)))


def test_a_model_is_loaded_once_for_each_arm_and_number_of_ranks():
    both = plan(ranks=[1, 2], sequence_lengths=[100, 200])
    assert [(load.arm.name, load.ranks) for load in both.loads] == [
        ("none", 1), ("none", 2), ("int8wo", 1), ("int8wo", 2),
    ]  # fmt: skip
    assert both.cells == 4 * 2 * 3


def made_plan(*arms, ranks="1", lengths="100", sizes="1,2", checkpoints=("tiny",), **counts):
    return make_plan(RunConfig(compile=True), arms, checkpoints, ranks, lengths, sizes, **counts)


def test_a_plan_from_a_command_line():
    made = made_plan("--quantization none", "--quantization int8wo --kernel reference", runs=3)
    assert [arm.name for arm in made.arms] == ["none", "int8wo, kernel=reference"]
    assert parse(made.arms[1].argv) == RunConfig(
        compile=True, quantization="int8wo", kernel="reference"
    )
    assert (made.batch_sizes, made.runs, made.decode_length, made.warmups) == ([1, 2], 3, 8, 1)
    assert from_json(LatencyPlan, to_json(made)) == made
    assert made_plan("").arms[0].name == "none"  # one arm is enough


@pytest.mark.parametrize(
    "arms, message",
    [
        (("--quantization int9wo",), "arm 1, '--quantization int9wo': "),
        (("", "--batch_size 4"), "arm 2, '--batch_size 4': --batch_size does not belong into an arm"
         ": it is --batch_sizes"),
        (("--max_new_tokens 5",), "it is --decode_length"),
        (("--prefill_size 5",), "it is --sequence_lengths"),
        (("--checkpoint_path tiny2",), "it is --checkpoint_path outside"),
        (("--num_samples 3",), "--num_samples does not belong into an arm"),
        (("", "--quantization none"), "arms 1 and 2 are the same run"),
        ((), "a plan without arms"),
    ],
)  # fmt: skip
def test_arms_that_do_not_belong(arms, message):
    with pytest.raises(UsageError) as caught:
        made_plan(*arms)
    assert message in str(caught.value)


# ---------------------------------------------------------------------------------- results


def test_what_is_left_to_measure(tmp_path):
    made = results({"none": 1.0}, sequence_lengths=[100, 200], runs=5)
    assert made.left(made.plan.loads[0]) == []
    made.tables[0].cells[1] = Cell(2, made.tables[0].cells[1].samples[:4])
    made.tables[0].cells[2] = Cell(4, [], "out of memory")
    del made.tables[1]
    assert made.left(made.plan.loads[0]) == [(100, 2), (200, 1), (200, 2), (200, 4)]
    made.save(tmp_path)
    assert LatencyResults.resume(tmp_path, made.plan) == made
    with pytest.raises(UsageError, match="is of another plan: --runs is '5' there and '6' here"):
        LatencyResults.resume(tmp_path, dataclasses.replace(made.plan, runs=6))


def test_results_are_read_back(tmp_path):
    made = results({"none": 1.0, "int8wo": 0.8}, ranks=[1, 2])
    made.tables[0].cells[2] = Cell(4, [], "out of memory")
    made.save(tmp_path)
    assert LatencyResults.load(tmp_path) == made
    assert isinstance(made.plan, LatencyPlan)
    found = made.table("tiny", "int8wo", 2, 100)
    assert found.key == ("tiny", "int8wo", 2, 100) and made.table("tiny", "x", 2, 100) is None


DAMAGED = {
    "empty": "",
    "deep": "[" * 100_000,
    "list": "[]",
    "word": '"latency"',
    "torn": None,
    "negative": ("prefill_seconds", -1.0),
    "infinite": ("prefill_seconds", math.inf),
    "no number": ("prefill_seconds", "fast"),
    "too few steps": ("step_seconds", [0.1]),
    "huge": ("prefill_seconds", 10**400),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_results_are_one_line(tmp_path, name):
    made = results({"none": 1.0})
    made.save(tmp_path)
    text = (tmp_path / "results.json").read_text()
    match DAMAGED[name]:
        case None:
            text = text[: len(text) // 2]
        case str() as other:
            text = other
        case (key, value):
            whole = json.loads(text)
            whole["tables"][0]["cells"][0]["samples"][0][key] = value
            text = json.dumps(whole)
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UsageError, match="results.json(:| is not what latency --output writes:) "):
        LatencyResults.load(tmp_path)


# ---------------------------------------------------------------------------------- the command


def command(*words):
    return CliRunner().invoke(commands, ["metrics", *map(str, words)])


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = {
        "both": results({"none": 1.0, "int8wo": 0.8}, sequence_lengths=[100, 200]),
        "new": results({"none": 0.5}, seed=1),
        "longer": results({"none": 1.0}, sequence_lengths=[300]),
        "more": results({"none": 1.0}, decode_length=5),
        "ranks": results({"none": 1.0}, ranks=[1, 2]),
    }
    for name, kept in made.items():
        (tmp_path / name).mkdir()
        kept.save(tmp_path / name)
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "results.json").write_text('{"format": 3, "arms": []}')
    return made


def test_two_arms_of_a_folder(folders, tmp_path):
    done = command("--baseline", "both:none", "--target", "both:int8wo", "--json", "x.json")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("Time to first token, ms") == 2  # for each sequence length
    assert "tiny int8wo (both) against tiny none (both): prompts of 200 tokens" in done.stdout
    assert done.stdout.count("  better\n") == 14
    written = json.loads((tmp_path / "x.json").read_text())["comparisons"]
    assert len(written) == 2 and 0.75 < written[0]["metrics"][0]["ratio"]["value"] < 0.85


def test_two_folders_and_numbers_of_ranks(folders):
    done = command("--baseline", "both:none", "--target", "new")
    assert done.exit_code == 0 and done.stdout.count("Time to first token") == 1
    done = command("--baseline", "ranks", "--baseline_tp", 1, "--target", "ranks", "--target_tp", 2)
    assert done.exit_code == 0, done.output
    assert "tiny none, 2 ranks (ranks) against tiny none (ranks)" in done.stdout


@pytest.mark.parametrize(
    "line, message",
    [
        ("--baseline both --target new", "--baseline both: it has several arms; give both:ARM, one "
         "of none, int8wo"),
        ("--baseline both:fp6 --target new", "there is no arm 'fp6'; give both:ARM"),
        ("--baseline nope --target new", "--baseline nope: results.json: "),
        ("--baseline new:none:x --target new", "--baseline new:none: results.json"),
        ("--baseline ab --target new", "results.json is of ab; latency --output writes its own"),
        ("--baseline new --target new", "are the same tables"),
        ("--baseline new --target longer", "sequence lengths 100 and 300"),
        ("--baseline new --target more", "decodes 3 tokens and the target 5: not the same work"),
        ("--baseline new --target ranks --target_tp 4", "no table of 4 ranks; there are tables of "
         "1, 2 ranks"),
        ("--baseline new --target ranks --target_tp 0", "--target_tp takes a whole number from 1"),
        ("--baseline new", "--target is missing"),
        ("--baseline both:none --target new --narrative report.txt", "path that ends with .md"),
        ("--baseline both:none --target new --narrative other.md", "holds something that is no"),
        ("--baseline both:none --target new --json /nope/x", "No such file"),
    ],
)  # fmt: skip
def test_what_is_refused(folders, tmp_path, line, message):
    (tmp_path / "other.md").write_text("My notes\n")
    done = command(*line.split())
    assert done.exit_code in (1, 2) and done.stderr.count("\n") == 1
    assert message in done.stderr and done.stdout == ""
    assert (tmp_path / "other.md").read_text() == "My notes\n"
