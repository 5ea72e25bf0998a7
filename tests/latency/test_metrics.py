"""The four metrics by hand, their intervals and verdicts, and the command with its prose."""

import json
import re
from dataclasses import replace

import pytest

from quantbench.latency.answer import Cell, LatencySample, Table, load
from quantbench.latency.metrics import Metric, Side, compare
from quantbench.latency.metrics_tables import ends, shown
from quantbench.report.interval import Interval
from tests.latency.latencies import MACHINE, MODEL, latencies, measured
from tests.programs import worked


def side(cells, length=100, decode_length=3):
    return Side("folder", Table("tiny", "arm", 1, length, cells=cells), decode_length, 4)


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
# Prefill takes half the time at batch 1, batch 4 the best: prefill 0.4, request 0.5.
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
        quotient = quotient if metric.unit == "ms" else 1 / quotient
        assert metric.ratio.value == pytest.approx(quotient)
    assert [m.ratio_name for m in metrics[:2]] == ["Ratio_Latency", "Ratio_Throughput"]
    # Nothing says that these runs were taken in turns.
    assert {(m.ratio.low, m.verdict) for m in metrics} == {(None, "not in turns")}


def sides(**given):
    made = latencies(**given)
    return [Side("folder", table, 3, made.plan.runs) for table in made.tables]


@pytest.mark.parametrize(("slowness", "verdict"), [(0.8, "better"), (1.3, "worse"), (1.0, None)])
def test_turns_in_the_same_cycles_have_a_verdict(slowness, verdict):
    """The machine's speed halves and doubles between cycles; a ratio within a cycle does not. What
    is assumed of processes has three degrees of freedom, which is wide at a twentieth of 5 %."""
    baseline, target = sides(slownesses={"none": 1.0, "other": slowness}, runs=24)
    for metric in compare(baseline, target).metrics:
        assert metric.verdict == (verdict or "no difference shown")
        assert metric.ratio.low < slowness < metric.ratio.high < 1.4 * metric.ratio.low


def test_runs_that_were_minutes_apart_have_none():
    """Other cycles of one folder; another folder, whose cycles have the same numbers by chance."""
    apart = sides(slownesses={"none": 1.0, "other": 0.5}, together=False)
    baseline, target = sides(slownesses={"none": 1.0, "other": 0.5})
    elsewhere = Side("another", target.table, 3, 16)
    for pair in (apart, (baseline, elsewhere)):
        metrics = compare(*pair).metrics
        assert {m.verdict for m in metrics} == {"not in turns"}
        assert metrics[0].ratio.value == pytest.approx(0.5, rel=0.3)
        assert ends(metrics[0]) == "not taken in turns"
    few = compare(*sides(slownesses={"none": 1.0, "other": 0.5}, runs=5)).metrics
    assert {ends(m) for m in few} == {"too few cycles for an interval"}


def test_the_choice_of_the_batch_size_is_paid_for():
    """The largest throughputs are at batch 4 and at batch 2: the ratio of the largest is between
    the ratios at these sizes, and its interval has both."""
    baseline, target = sides(slownesses={"none": 1.0, "other": 1.0}, runs=48)
    for side, size, slowness in ((baseline, 2, 1.5), (target, 4, 1.2)):
        (cell,) = [cell for cell in side.table.cells if cell.batch_size == size]
        cell.samples[:] = [
            replace(sample, prefill_seconds=slowness * sample.prefill_seconds)
            for sample in cell.samples
        ]
    metric = compare(baseline, target).metrics[1]
    assert (metric.baseline.batch_size, metric.target.batch_size) == (4, 2)
    # At batch 2, the target's best, it is 1/1.5; at batch 4, the baseline's best, 1.2.
    assert metric.ratio.low < 1 / 1.5 < 1.2 < metric.ratio.high
    assert metric.verdict == "no difference shown"
    alone = compare(*sides(slownesses={"none": 1.0, "other": 1.0}, batch_sizes=[1, 2], runs=48))
    three = compare(*sides(slownesses={"none": 1.0, "other": 1.0}, batch_sizes=[1, 2, 4], runs=48))
    widths = [c.metrics[1].ratio.high / c.metrics[1].ratio.low for c in (alone, three)]
    assert widths[0] < widths[1]


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
        f"{name}: no batch size above 1 in the plan" for name in ("baseline", "target")
    )
    partly = compare(side(BASELINE), side([TARGET[0], TARGET[1], Cell(4, [], "killed")])).metrics
    assert partly[1].target.batch_size == 2 and partly[1].reason is None


def test_an_end_that_is_not_one_does_not_read_as_one():
    for *numbers, words in (
        (0.99, 0.98, 0.99996, ["0.99000", "0.98000", "0.99996"]),
        (1.01, 1.00004, 1.02, ["1.01000", "1.00004", "1.02000"]),
        (0.5, 0.4, 0.6, ["0.500", "0.400", "0.600"]),
    ):
        ratio = Interval(*numbers)
        assert shown(Metric("", "ms", None, None, None, ratio, "better")) == words


# ---------------------------------------------------------------------------------- the command


@pytest.fixture
def folders(in_tmp, tmp_path):
    both = {"none": 1.0, "int8wo": 0.8}
    measured(both, tmp_path / "both", sequence_lengths=[100, 200])
    measured({"none": 0.5}, tmp_path / "new", seed=1, model="other `1 B`")
    measured({"none": 1.0}, tmp_path / "ranks", ranks=[1, 2])


def test_numbers_of_ranks(folders):
    same = ("--baseline", "ranks", "--target", "ranks")
    done = worked("metrics", *same, "--baseline_tp", 1, "--target_tp", 2)
    assert "tiny none, 2 ranks (ranks) against tiny none (ranks)" in done.stdout


# ------------------------------------------------------------------------------------- the prose

METRIC = (
    r"- (.+?)(?: \((.+) tokens\))? is (\S+) (\S+) for the target at batch size (\d+) and (\S+) \S+ "
    r"for the baseline at batch size (\d+): (Ratio_\w+) (\S+) \((.+)\)\."
)


def written(baseline, target):
    """The report, the figures, and what is printed."""
    given = ["--baseline", baseline, "--target", target]
    done = worked("metrics", *given, "--narrative", "report.md", "--json", "report.json")
    assert "Time to first token, ms" in done.stdout and "Wrote report.md" in done.stderr
    with open("report.md") as report, open("report.json") as figures:
        return report.read(), json.load(figures)["comparisons"], done.stdout


def test_every_number_is_that_of_the_figures(folders):
    text, comparisons, shown = written("both:none", "both:int8wo")
    assert shown.count("Time to first token, ms") == 2  # for each sequence length
    assert "tiny int8wo (both) against tiny none (both): prompts of 200 tokens" in shown
    assert shown.count("  better\n") == 14
    assert 0.75 < comparisons[0]["metrics"][0]["ratio"][0] < 0.85
    assert text.startswith("# `int8wo` compared with `none`\n")
    sections = text.split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == [
        f"Prompts of {length} tokens, answers of 3 tokens" for length in (100, 200)
    ]
    for section, comparison in zip(sections, comparisons, strict=True):
        assert f"`{MODEL}` in `torch.bfloat16` on `cpu` of `{MACHINE}`" in section
        found = re.findall(METRIC, section)
        assert len(found) == len(comparison["metrics"]) == 7
        for (name, counted, new, unit, at, old, before, kind, ratio, limits), metric in zip(
            found, comparison["metrics"], strict=True
        ):
            assert name.lower() == metric["name"] and (counted or None) == metric["counted"]
            assert unit == metric["unit"] and (kind == "Ratio_Latency") == (unit == "ms")
            for value, size, which in ((new, at, "target"), (old, before, "baseline")):
                assert float(value) == pytest.approx(metric[which]["value"], abs=0.0051)
                assert int(size) == metric[which]["batch_size"]
            numbers = [ratio, *limits.removeprefix("interval ").split(" to ")]
            assert [*map(float, numbers)] == pytest.approx(metric["ratio"], abs=5.1e-4)
        assert "The target is better in time to first token, " in section
    assert written("both:none", "both:int8wo")[0] == text  # a report is replaced


def test_two_folders_have_no_verdict_in_prose(folders, tmp_path):
    number = next(n for n, cell in enumerate(load(tmp_path / "new").plan.cells)
                  if cell.batch_size == 1)  # fmt: skip
    with open("new/samples.jsonl", "a") as file:
        left = {"arm": number, "why": "killed `x`", "failed": True}
        file.write(json.dumps({"left": left}) + "\n")
    text, _, shown = written("both:none", "new")
    assert shown.count("  not in turns\n") == 3
    assert "They were not measured in turns: what else changed" in text
    assert "model `other '1 B'` in `torch.bfloat16` on `cpu`" in text
    assert "- Not measured on both sides, `target: killed 'x'`: time to first token, single" in text
    assert text.count("(not taken in turns)") == 3
    assert "Without a verdict, as it was not measured in turns: maximum prompt throughput" in text
    assert "better in" not in text
