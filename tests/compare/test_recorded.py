"""What recorded runs tell: published ones, damaged ones, and simulated ones of known truth.

tests/data/mixtral_offload_runs.json holds ten runs of a runtime that keeps a part of Mixtral-8x7B's
experts on an RTX 3090, as they were logged: facts, with their model, device and prompt in the file.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from quantbench.compare.commands.tune import tune
from quantbench.compare.figures.families import FALSE_VERDICTS, against_baseline, against_best
from quantbench.compare.figures.one_way import one_way, scatter
from quantbench.compare.figures.option_tests import by_option
from quantbench.compare.figures.order import Placed, trend, without_drift
from quantbench.compare.figures.recorded import conclude
from quantbench.compare.figures.recorded_answer import answer
from quantbench.compare.figures.recorded_runs import read
from tests.compare.refusals import one_line
from tests.seeds import new_generator

FILE = Path(__file__).parents[1] / "data" / "mixtral_offload_runs.json"
SURE = 1e-6  # a rate that is as promised fails this often


@pytest.fixture
def document():
    return json.loads(FILE.read_text())


@pytest.fixture
def concluded(tmp_path):
    """Conclusions from a document."""

    def concluded(document, metric="generate", **default):
        path = tmp_path / "runs.json"
        path.write_text(json.dumps(document))
        return conclude(read(str(path), metric), default)

    return concluded


def run(*words):
    return CliRunner().invoke(tune, [*words])


# ------------------------------------------------------------------------------- the published runs


def test_leaving_the_default_helped_and_the_others_cannot_be_told_apart(document):
    """The figures by scipy: two samples of logarithms with one variance."""
    conclusions = conclude(read(str(FILE), "generate"), {})
    default, other = conclusions.plans
    assert default.runs == [1, 2, 3, 4] and other.runs == [5, 6, 7, 8, 9, 10]
    assert default.options == {"latency_cpu": "7", "latency_gpu": "70"}
    assert other.options == {"latency_gpu": "1"}
    logs = [math.log(run["generate_ms"]) for run in document["runs"]]
    test = stats.ttest_ind(logs[:4], logs[4:])
    ends = test.confidence_interval(1 - FALSE_VERDICTS)
    assert other.verdict == "faster" and other.speed_up.confidence == 0.98
    for name, expected in (("value", np.mean(logs[:4]) - np.mean(logs[4:])), ("low", ends.low),
                           ("high", ends.high)):  # fmt: skip
        assert math.log(getattr(other.speed_up, name)) == pytest.approx(expected, rel=1e-3)
    assert len(conclusions.settings) == 8
    assert {group.verdict for group in conclusions.settings[1:]} == {"too few runs"}
    assert all(group.can_be_best for group in conclusions.settings)
    assert conclusions.scatter.freedom == 8


def test_what_is_printed_of_them():
    result = run("--recorded", str(FILE))
    assert result.exit_code == 0, result.exception
    lines = [line for line in result.stdout.splitlines() if line.startswith("Answer: ")]
    assert len(lines) == 3
    assert "Leaving the default (latency_cpu=7, latency_gpu=70) did help" in lines[0]
    assert "98 % interval" in lines[0] and "latency_gpu=1" in lines[0]
    assert "These 6 settings of plan B (latency_gpu=1) cannot be told apart" in lines[1]
    assert "162.16 to 205.77 s" in lines[1] and "the fastest run is no winner" in lines[1]
    assert "confounded" in lines[2] and "run the default again" in lines[2]
    assert "95 %" not in result.stdout
    assert "runs 1 to 4) were taken before those of plan B (runs 5 to 10)" in result.stdout
    assert "the default's own runs became faster one after the other" in result.stdout


@pytest.mark.parametrize("metric", ["prefill", "decode"])
def test_prompt_and_steps_by_themselves(document, metric):
    conclusions = conclude(read(str(FILE), metric), {})
    key = f"{metric}_s"
    assert conclusions.recording.source == key and not conclusions.recording.problems
    recorded = [record[key] for record in document["runs"]]
    assert sum((group.seconds for group in conclusions.settings), []) == recorded
    logs = np.log(recorded)
    low = stats.ttest_ind(logs[:4], logs[4:]).confidence_interval(1 - FALSE_VERDICTS).low
    expected = {"prefill": "faster", "decode": "no difference shown"}[metric]
    assert conclusions.plans[1].verdict == expected and (low > 0) == (expected == "faster")


@pytest.mark.parametrize("form", ["md", "csv", "json", "answer"])
def test_other_forms(form):
    result = run("--recorded", str(FILE), "-o", form)
    assert result.exit_code == 0
    if form == "json":
        value = json.loads(result.stdout)
        assert len(value["settings"]) == 8 and len(value["answer"]) == 3
        assert value["plans"][1]["verdict"] == "faster" and value["problems"] == []
    elif form == "csv":
        header, *rows = result.stdout.splitlines()
        assert header.startswith("tokenizers_parallelism,latency_cpu,latency_gpu,threads,plan,runs")
        assert len(rows) == 8 and rows[4].endswith("too few runs")
    else:
        assert "did help" in result.stdout


def test_another_default_is_named():
    conclusions = conclude(read(str(FILE), "generate"), {"latency_gpu": "1", "threads": "32"})
    assert conclusions.settings[0].runs == [9] and conclusions.plans[0].runs[0] == 5
    assert conclusions.plans[1].verdict == "slower"
    assert answer(conclusions)[0].startswith("Keep the default")
    assert (
        "default is taken to be run 9's"
        in run("--recorded", str(FILE), "--default", "threads=32").stdout
    )


def test_constants_of_other_names_leave_each_option_by_itself(document, concluded):
    """Nothing tells the plans apart then; exactly one of the 210 ways to choose 4 of 10 runs sets
    them as far apart as latency_gpu does, and four options are counted."""
    for record in document["runs"]:
        record["cpu_cost"] = record.pop("latency_cpu")
        record["gpu_cost"] = record.pop("latency_gpu")
    conclusions = concluded(document)
    assert len(conclusions.plans) == 1
    best = conclusions.options[0]
    assert (best.name, best.shown) == ("gpu_cost", True) and best.p == pytest.approx(1 / 210)
    lines = answer(conclusions)
    assert lines[0].startswith("Leaving the default of gpu_cost, 70, did help: gpu_cost=1")


def test_a_log_in_another_order_is_not_confounded(document, concluded):
    runs = document["runs"]
    document["runs"] = [runs[place] for place in (0, 4, 5, 1, 6, 2, 7, 8, 3, 9)]
    conclusions = concluded(document)
    assert conclusions.plans[1].verdict == "faster"
    assert not any(line.startswith("order and setting") for line in conclusions.confounded)


# ------------------------------------------------------------------------------- damage


def change(number, **values):
    def apply(document):
        document["runs"][number - 1].update(values)

    return apply


def without(number, *keys):
    def apply(document):
        for key in keys:
            del document["runs"][number - 1][key]

    return apply


def all_of(**values):
    def apply(document):
        for record in document["runs"]:
            record.update({key: value(record) for key, value in values.items()})

    return apply


NAN = float("nan")
DAMAGES = [
    # what is done to the file, what is said, how many runs are left
    (change(3, generate_ms=235.402703125),
     "run 3: generate_ms is 0.235403 s, and prefill_s + decode_s 235.217 s (a thousandth: seconds "
     "in place of milliseconds?)", 9),
    (change(3, prefill_s=131918.67), "prefill_s is 131919 s, and the first of token_ms 131.857 s "
     "(1000 times too long)", 9),
    (change(5, generate_ms=NAN), "run 5: generate_ms is NaN: left out", 9),
    (change(5, generate_ms=None), "run 5: generate_ms is missing (null): left out", 9),
    (change(5, generate_ms=-3.5), "run 5: generate_ms is -3.5, and a time is above 0: left out", 9),
    (change(5, generate_ms="205 s"), "run 5: generate_ms is no number but '205 s': left out", 9),
    (change(5, token_ms=[1.0, 2.0]), "run 5: it has 2 token_ms, and most runs have 5", 9),
    (change(5, token_ms=[1.0, 0, 1, 1, 1]), "token_ms[1] is 0, and a time is above 0", 9),
    (change(5, token_ms=[]), "run 5: token_ms is empty", 9),
    (change(6, hit_rate=1.5), "run 6: hit_rate is 1.5, and a share is at most 1: left out", 9),
    (change(6, experts_on_gpu=300), "run 6: experts_on_gpu is 300, of 256 experts", 9),
    (change(7, latency_cpu=NAN), "run 7: latency_cpu is NaN, so its setting is not known", 9),
    (change(7, latency_gpu=-1), "run 7: latency_gpu is -1, and it is above 0: left out", 9),
    (without(7, "threads"), "run 7: threads is missing, so its setting is not known: left out", 9),
    (without(7, "hit_rate"), "run 7: hit_rate is missing, so its plan is not known: left out", 9),
    (change(8, layer_ms=[1.0, 713.001, 825.604, 529.734, 632.552]),
     "run 8: layer_ms[0] is 1, and token_ms[0] ÷ 32 layers 3204.63", 10),
    (lambda d: d["runs"].insert(4, "none"), "run 5: it is no object but 'none': left out", 10),
    (lambda d: d["runs"].append(d["runs"][0]), "run 11: it is run 1 to the last digit", 10),
    (without(2, "generate_ms"), "", 10),  # the other two clocks agree
    (without(2, "generate_ms", "prefill_s", "token_ms"), "run 2: it has no time to generate", 9),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "said", "left"), DAMAGES, ids=range(len(DAMAGES)))
def test_what_is_damaged_is_listed_and_left_out(document, tmp_path, damage, said, left):
    damage(document)
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(document))
    recording = read(str(path), "generate")
    assert len(recording.runs) == left
    assert any(said in line for line in recording.problems) if said else not recording.problems
    result = run("--recorded", str(path))
    assert result.exit_code == 0 and (not said or said in result.stdout)


def test_other_units_are_read_by_their_names(document, concluded):
    for record in document["runs"]:
        record["generate_s"] = record.pop("generate_ms") / 1000
    conclusions = concluded(document)
    assert conclusions.recording.source == "generate_s" and not conclusions.recording.problems
    assert conclusions.plans[1].verdict == "faster"


@pytest.mark.parametrize("key", ["seconds", "runtime_s", "wall_seconds"])
def test_seconds_of_a_run_under_another_name(document, concluded, key):
    """And nothing else that was timed."""
    for record in document["runs"]:
        record[key] = record.pop("generate_ms") / 1000
        for name in ("token_ms", "layer_ms", "prefill_s", "decode_s"):
            del record[name]
    conclusions = concluded(document)
    assert conclusions.recording.source == key and not conclusions.recording.problems
    assert conclusions.plans[1].verdict == "faster" and key not in conclusions.settings[0].options


def test_a_setting_alone_has_no_default_to_name(document, tmp_path):
    document["runs"] = document["runs"][:2]
    (tmp_path / "runs.json").write_text(json.dumps(document))
    result = run("--recorded", str(tmp_path / "runs.json"))
    assert "one setting alone, in 2 runs" in result.output and "taken to be" not in result.output


REFUSED = [
    ("", "it is no JSON (line 1, column 1: Expecting value)"),
    ('{"runs": [{"token_ms": [1', "it is no JSON (line 1, column 26: "),
    ("7", "holds 7, and no"),
    ("{}", "holds no runs"),
    ('{"runs": []}', "holds no runs"),
    ('{"runs": [{"token_ms": [1, 2]}]}', "of 1 runs, a single one can be compared"),
    ('{"runs": [{"a": 1}, {"a": 2}]}', "of 2 runs, none can be compared by --metric generate: run"),
    ('[{"token_ms": [1], "new_tokens": 1}, {"token_ms": [1, 1], "new_tokens": 2}]',
     "do not do the same work: new_tokens is '1' and '2'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), REFUSED, ids=lambda v: v[:30])
def test_a_file_that_tells_nothing_is_one_line(tmp_path, text, said):
    path = tmp_path / "runs.json"
    path.write_text(text)
    result = CliRunner().invoke(tune, ["--recorded", str(path)])
    assert said in one_line(result) and result.exception.exit_code == 2


def test_all_runs_in_other_units_than_their_names(document, tmp_path):
    """One clock that contradicts two others everywhere is listed and not used; where there is but
    one other, nobody can say which of them is right."""
    all_of(generate_ms=lambda record: record["generate_ms"] / 1000)(document)
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(document))
    recording = read(str(path), "generate")
    assert len(recording.runs) == 10 and recording.source == "prefill_s + decode_s"
    listed = {line.partition(" is ")[0] for line in recording.problems}
    assert listed == {f"run {number}: generate_ms" for number in range(1, 11)}
    result = run("--recorded", str(path))
    assert "did help" in result.stdout and "seconds in place of milliseconds" in result.stdout
    for record in document["runs"]:
        del record["prefill_s"]
    path.write_text(json.dumps(document))
    said = one_line(run("--recorded", str(path)))
    assert "of 10 runs, none can be compared" in said and "seconds in place of milliseconds" in said
    assert run("--recorded", str(path), "--metric", "decode").exit_code == 0


# ------------------------------------------------------------------------------- oracles


def groups(generator, sizes, effects=(), noise=0.1):
    effects = [*effects, *[0.0] * len(sizes)]
    return [
        np.exp(generator.normal(5 + effect, noise, size))
        for size, effect in zip(sizes, effects, strict=False)
    ]


def test_comparisons_with_the_default_are_dunnett_s():
    """Statistics and verdicts; scipy's p is integrated at random, so near the level it decides
    nothing. Its intervals do not always converge."""
    generator, fitted = new_generator(), None
    while fitted is None or fitted.uneven.any():  # a group in a hundred scatters so by chance
        samples = groups(generator, (6, 6, 6, 6), (0.0, 0.1, 0.2, -0.3))
        fitted = one_way(samples)
    logs = [np.log(sample) for sample in samples]
    theirs = stats.dunnett(*logs[1:], control=logs[0], random_state=1)
    assert fitted.log_ratios / fitted.standard_errors == pytest.approx(theirs.statistic)
    for interval, p in zip(against_baseline(fitted), theirs.pvalue, strict=True):
        if abs(p - FALSE_VERDICTS) > 0.002:
            assert (interval.verdict != "no difference shown") == (p < FALSE_VERDICTS)


def test_a_group_that_scatters_more_is_judged_by_welch():
    generator = np.random.default_rng(7)  # the F test has to reject for what is compared
    quiet, loud, other = groups(generator, (8, 8, 8), noise=0.01)
    loud = np.exp(5 + 30 * (np.log(loud) - 5))
    alone = one_way([quiet, loud])
    test = stats.ttest_ind(np.log(loud), np.log(quiet), equal_var=False)
    assert alone.log_ratios[0] / alone.standard_errors[0] == pytest.approx(test.statistic)
    assert alone.freedom[0] == int(test.df)
    among = one_way([quiet, loud, other])
    assert list(among.uneven) == [True, False]
    assert scatter([quiet, other]).freedom == 14 == among.freedom[1]


def test_a_single_run_gets_no_interval():
    fitted = one_way([[10.0, 11.0, 10.5, 10.1], [5.0], [9.0, 9.5]])
    once, twice = against_baseline(fitted)
    assert once.confidence is None and once.verdict == "no difference shown"
    assert twice.confidence is not None
    with pytest.raises(ValueError, match="at least two groups"):
        one_way([[1.0]])


def test_options_are_split_as_scipy_s_permutations():
    # Multiples of 2^-30, whose sums are exact in any order: scipy counts the split itself only if
    # it is not off by a rounding.
    logs = np.round(np.log(groups(new_generator(), (9,))[0]) * 2**30) / 2**30
    values = ["a", "b", "b", "a", "b", "a", "a", "b", "a"]
    (test,) = by_option(list(np.exp(logs)), {"x": values})
    split = [logs[[v == name for v in values]] for name in "ab"]

    def between(first, second, axis):
        squares = sum(sample.shape[axis] * sample.mean(axis) ** 2 for sample in (first, second))
        return np.round(squares, 12)  # else scipy may not find the observed split again: it sums
        # up in another order, and allows for rounding only in proportion to the statistic

    exact = stats.permutation_test(split, between, vectorized=True, alternative="greater",
                                   n_resamples=np.inf)  # fmt: skip
    assert test.p == pytest.approx(exact.pvalue)


def test_a_trend_is_kendall_s():
    rising = Placed([1, 2, 3, 4, 5, 6], [1.0, 1.1, 1.2, 1.15, 1.3, 1.4])
    theirs = stats.kendalltau(rising.places, rising.seconds)
    assert trend([rising]) == pytest.approx(theirs.statistic)
    assert trend([Placed([1, 2, 3, 4], [1.0, 1.2, 1.1, 1.05])]) is None
    assert trend([Placed([1], [1.0]), Placed([2], [1.0])]) is None


def test_a_drift_explains_what_only_time_differs_by():
    """Seconds that fall by 5 % from run to run, whatever the group."""
    generator = np.random.default_rng(3)
    seconds = np.exp(-0.05 * np.arange(12) + generator.normal(0, 0.01, 12))
    first, second = (
        Placed(list(range(start + 1, start + 7)), list(seconds[start : start + 6]))
        for start in (0, 6)
    )
    plain = against_baseline(one_way([first.seconds, second.seconds]))[0]
    assert plain.verdict == "faster"
    left = without_drift(first, [second], 0)
    assert left.verdict == "no difference shown" and left.low < 1 < left.high


# ------------------------------------------------------------------------------- simulated truth


def document_of(generator, settings, repeats, effects, noise=0.08, evidence=True):
    """Runs in an order drawn at random; effects: by the setting's number, of the logarithm."""
    order = generator.permutation(np.repeat(np.arange(settings), repeats))
    runs = []
    for number in order:
        total = 1e5 * math.exp(effects[number] + generator.normal(0, noise))
        record = {"threads": int(number) + 1, "token_ms": [0.6 * total, 0.3 * total, 0.1 * total]}
        runs.append(record | ({"hit_rate": 0.25 * (number % 2)} if evidence else {}))
    return {"runs": runs}


def declared(conclusions):
    """Whether anything is said to differ."""
    groups = [*conclusions.plans, *conclusions.settings]
    return any(g.verdict in ("faster", "slower") for g in groups) or any(
        test.shown for test in conclusions.options
    )


TRIALS = 200


@pytest.mark.parametrize(
    ("settings", "repeats", "evidence"),
    [(6, 1, True), (6, 1, False), (4, 3, False), (4, 3, True), (2, 5, False), (8, 2, True)],
)
def test_equal_settings_are_hardly_ever_told_apart(concluded, settings, repeats, evidence):
    generator, wrong = new_generator(), 0
    for _ in range(TRIALS):
        document = document_of(generator, settings, repeats, np.zeros(settings), evidence=evidence)
        wrong += declared(concluded(document))
    assert wrong <= stats.binom.isf(SURE, TRIALS, FALSE_VERDICTS)


def test_a_setting_that_is_faster_is_found_and_taken(concluded):
    generator, right = new_generator(), 0
    for _ in range(40):
        effects = np.array([0.0, 0.0, math.log(0.5), 0.0])
        document = document_of(generator, 4, 5, effects, noise=0.05, evidence=False)
        conclusions = concluded(document, threads="1")
        lines = answer(conclusions)
        right += lines[0].startswith("Leaving the default did help: threads=3 is")
    assert right >= stats.binom.ppf(SURE, 40, 0.98)


def test_one_run_of_each_setting_tells_nothing(concluded):
    document = document_of(np.random.default_rng(1), 6, 1, np.zeros(6), evidence=False)
    conclusions = concluded(document)
    assert answer(conclusions)[0].startswith("Too few runs to tell settings apart")
    assert {group.verdict for group in conclusions.settings[1:]} == {"too few runs"}


def test_the_fastest_may_always_be_the_fastest():
    """Hsu's candidates hold the truly fastest group but for a share of the trials."""
    generator, kept = new_generator(), 0
    for _ in range(TRIALS):
        samples = groups(generator, (4, 4, 4), (0.0, -0.05, 0.02))
        kept += 1 in {one.arm for one in against_best(one_way(samples)) if one.can_be_best}
    assert kept >= stats.binom.ppf(SURE, TRIALS, 1 - FALSE_VERDICTS)
