"""Rows of ab: joules per token, and the reason why an arm is slow."""

import dataclasses
import json

import pytest

from quantbench.bench.answers import ArmFacts
from quantbench.bench.store import Ended
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits
from quantbench.compare.recommend import BEATEN, SLOWER, recommend
from quantbench.compare.row import Row
from quantbench.compare.rows import covered, reasons, rows
from quantbench.compare.tables import remarks, tables, terminal
from quantbench.log.config import RunConfig
from quantbench.log.record import NO_COUNTER
from quantbench.report.interval import Interval
from quantbench.run.energy import Energy, NotCounted
from quantbench.run.machine import MachineUse
from tests.bench.facts import arm_facts
from tests.compare.example_results import ARMS, example_results


def shown_of(results):
    """What a terminal shows."""
    found = Compared(results)
    arm_rows = rows(results, found)
    return terminal(results, arm_rows, recommend(arm_rows, Limits(), found.best))


def said(results):
    """The report's remarks."""
    return "\n".join(remarks(results, rows(results)))


def counted(results, *energy):
    """The second arm with what its counter gave."""
    arm = results.arms[1]
    arm.facts = dataclasses.replace(arm.facts, energy=list(energy))
    return results


def test_a_row_has_its_energy():
    results = counted(example_results(), *(Energy("a fake", j, 0.5, 12.0, 2) for j in (5.0, 7.0)))
    row = rows(results)[1]
    config = results.arms[1].facts.run.config
    joules = 6 / config.max_new_tokens / config.batch_size
    assert row.joules_per_token == pytest.approx(joules) and row.idle_watts == 12.0
    words = f"{joules:.3g} J a new token, without the idle machine's, 12 W"
    assert words in " ".join(said(results).split())
    table = shown_of(results).partition("\n\n")[0].splitlines()
    longest = max(len(arm.name) for arm in results.arms)
    assert max(map(len, table)) - longest + len("int4wo-64-gptq") <= 100


@pytest.mark.parametrize(
    ("why_not", "words"),
    [
        (f"{NO_COUNTER} (there is no RAPL counter)", "J a new token"),
        ("it moves by 9 J at once", "joules of a new token are not known: it moves by 9 J at once"),
    ],
)
def test_where_nothing_was_counted(why_not, words):
    """A machine without a counter is no remark."""
    results = counted(example_results(), NotCounted(why_not))
    row = rows(results)[1]
    assert (row.why_no_joules, row.joules_per_token, row.idle_watts) == (why_not, None, None)
    assert (words in said(results)) == (NO_COUNTER not in why_not)


def test_an_arms_energy_goes_through_its_json():
    energy = Energy("a fake", 5.0, 0.5, 12.0, 2), NotCounted("it moves by 9 J")
    facts = counted(example_results(), *energy).arms[1].facts
    assert ArmFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_an_overrun_is_said_with_what_took_the_time():
    results = example_results(arms=ARMS[:3])
    assert "--max_minutes allows" not in said(results)
    results.apply(Ended("max_minutes", 60 * results.settings.max_minutes * 1.5, 700.0))
    assert (
        "it took 15 min where --max_minutes allows 10 min: loading arms and their quality took "
        "12 min" in said(results)
    )


def test_below_the_table_is_the_answer_and_little_more():
    """At most twelve lines of at most 100 columns but for commands: the answer, what is excluded
    and why, noise, limits."""
    results = example_results()
    for number, arm in enumerate(results.arms[1:], 1):
        arm.quality = dataclasses.replace(arm.quality, noise=0.0013)
        if number > 5:
            arm.dropped = (BEATEN, SLOWER, "KL above 0.03")[number % 3]
    table, _, below = shown_of(results).partition("\n\n")
    lines = below.splitlines()
    assert lines[0].startswith("Use ") and len(lines) <= 12
    assert all(len(line) <= 100 for line in lines if " quantbench " not in line)
    heads = [line.split(":")[0].split()[0] for line in lines if line[0] != " "]
    assert heads == ["Use", *["Or"] * (heads.count("Or")), "Excluded", "Noise", "Bytes", "Limits"]
    slowest, fastest = "22% (int4wo-128, kernel=reference)", "104% (int8dq)"
    assert f"Bytes: decoding reached {slowest} to {fastest}" in below
    assert "no KL above 0.03; KL 0.0013 is full precision's own noise; quality on 2048" in below


def test_other_processes_are_said():
    results = example_results(arms=ARMS[:3])
    assert "other processes" not in said(results)
    use = MachineUse(1.0, 2, 0.9, 1.4, 0.0, 12)
    for arm in results.arms:
        arm.samples = [dataclasses.replace(sample, machine=use) for sample in arm.samples]
    words = "other processes used 1.4 of 2 cores"
    assert rows(results)[1].others == words
    last = said(results).splitlines()[-1]
    assert last == f"{words} while samples were taken: speeds are not those of an idle machine"
    assert f"\nBusy: {words}\n" in shown_of(results)


def test_figures_of_quality_say_on_how_many_tokens_they_are():
    """Perplexities of different tokens are not to be compared: the report has ratios to the
    baseline's on the same tokens."""
    results = example_results(arms=ARMS[:3])
    arm = results.arms[2]
    arm.quality = dataclasses.replace(arm.quality, tokens=510, window=64)
    results.arms[1].quality = dataclasses.replace(results.arms[1].quality, window=64)
    shown = said(results)
    assert "quality is of 510 to 2048 tokens of the embedded texts, at most 64 at once" in shown
    assert "(int8dq on 510; int8wo on 2048)" in shown
    headings, *lines = tables(rows(results))[1]
    assert "perplexity" not in headings
    ratio, tokens = (headings.index(h) for h in ("perplexity × baseline", "quality on tokens"))
    assert lines[0][ratio] == "-" and lines[2][ratio].startswith("1.0028 (1.00")
    assert [line[tokens] for line in lines] == ["2048", "2048", "510"]


def test_the_fastest_are_among_those_that_were_timed():
    results = example_results(arms=ARMS[:4])
    found = rows(results)
    for row, can_be_best in zip(found, (False, True, True, None), strict=True):
        row.can_be_best = can_be_best  # None: its KL ruled it out
    assert (
        "of the 3 arms that were timed the fastest is, with 95 % confidence, one of these: int8wo, "
        "int8dq"
    ) in remarks(results, found)
    shown = shown_of(results)
    prompts = tables(rows(results))[0][0]
    assert "prompt of 7 tokens, tok/s" in prompts and "prompt of 7 ×" in shown
    assert "memory of cpu was read at 33.1 to 34.0 GB/s (a probe); decoding is not" in said(results)


@pytest.mark.parametrize(
    ("assumed", "words"),
    [
        (
            1.0,
            "differ by (assumed, not measured here: 1.6 %, where 1.5 % was measured between ",
        ),
        (0.77, "on 2026-11-21; 23% of what is known is from here)"),
        (0.0, "what processes of one arm differ by (measured here)"),
    ],
)
def test_what_processes_differ_by_is_called_assumed_until_it_is_measured(assumed, words):
    measured = {"noise": 0.1, "floor": 0.046, "floor_assumed": assumed, "cycles": 20}
    sentence = covered([Row("none"), Row("arm", **measured)])
    assert words in sentence and "±4.6% for what processes" in sentence


def test_a_line_says_what_the_intervals_cover():
    results = example_results()
    results.end = Ended("answered", 130.0, 30.0)
    shown = said(results)
    assert (
        "states of the machine of up to about 10 s, with memory at 33.1 to 34.0 GB/s; not" in shown
    )


# ---------------------------------------------------------------------------- why it is slow

COMPILED = RunConfig(compile=True)
ROW = Row("arm", verdict="slower")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"decoder": "modules", "decoder_reason": "the KV cache is int8"},
         "a step is not one op (decoder modules): the KV cache is int8"),
        ({"attention_reason": "no compiler"}, "attention runs on plain torch: no compiler"),
        ({"config": RunConfig(), "decoder": "modules"}, "nothing is compiled"),
        ({"kernel": "cpu, torchao"}, "not every layer's shape fits"),
        ({"kernel": "reference", "kernels": {"cpu": "no compiler", "reference": None}},
         "the only kernel that runs here (cpu: no compiler)"),
    ],
)  # fmt: skip
def test_each_reason(facts, said):
    arm = arm_facts(**({"config": COMPILED} | facts))
    (sentence,) = reasons(ROW, arm)
    assert said in sentence
    assert reasons(dataclasses.replace(ROW, verdict="faster"), arm) == []


@pytest.mark.parametrize(
    ("share", "before", "after"),
    [
        (0.97, "memory-bound: ", "; fewer bytes would make it faster"),
        (
            0.86,
            "memory-bound: ",
            "; fewer bytes, or a kernel 1.2 × as fast at most would make it faster",
        ),
        (0.84, "", ""),  # between the two bounds nothing more is claimed
        (0.39, "", ": arithmetic or the cost of each call sets its speed"),
    ],
)
def test_how_near_a_step_is_to_what_the_machine_allows(share, before, after):
    row = dataclasses.replace(ROW, limit_share=Interval(share), bandwidth=50e9)
    own = {"weight_bytes": 1_500_000_000, "kv_cache_bytes": 0}
    arm = arm_facts(config=COMPILED, **own)
    of_limit = f"a step runs at {share:.0%} of what memory allows for these bytes"
    assert reasons(row, arm) == [f"{before}{of_limit} (1.50 GB at 50.0 GB/s){after}"]
    assert reasons(dataclasses.replace(row, verdict="faster"), arm) == []
    assert reasons(ROW, arm) == []  # no readings, or no steps
    crowded = dataclasses.replace(row, others="other processes used 1.4 of 2 cores")
    assert reasons(crowded, arm) == [  # they may be the cause, and no other is given
        f"{of_limit} (1.50 GB at 50.0 GB/s), while other processes used 1.4 of 2 cores"
    ]
