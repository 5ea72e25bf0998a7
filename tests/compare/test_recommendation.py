"""The answer of a comparison: hand-made rows, and the exact lines that a person reads."""

import json
import re
from dataclasses import replace

import pytest

from quantbench.compare.figures.choices import Limits, Recommendation
from quantbench.compare.figures.interval import Interval, SpeedUp
from quantbench.compare.figures.recommendation import command, recommend
from quantbench.compare.figures.row import Row
from quantbench.log import shell
from quantbench.log.options import parse
from quantbench.typed_json import from_json, to_json

GB = 10**9


def measured(name, memory, tok_s, perplexity, **more):
    peaks = {"generate": {"resident": round(memory * GB)}}
    return Row(
        name, tok_s=tok_s, perplexity=perplexity, peak_memory_bytes=peaks,
        argv=["--quantization", name], **more,
    )  # fmt: skip


def baseline(memory=4.0, tok_s=10.0):
    return measured("none", memory, tok_s, 8.0, verdict="baseline")


def arm(name, speed, memory, quality=(1.0, 0.99, 1.01), spread=0.01, **more):
    """spread: half the width of the speed-up's interval; None: of a single process."""
    ends = (speed, speed) if spread is None else (speed - spread, speed + spread)
    return measured(
        name, memory, 10 * speed, 8 * quality[0] if quality else None, verdict="faster",
        speed_up=SpeedUp(speed, *ends, None if spread is None else 0.98),
        perplexity_ratio=Interval(*quality) if quality else None, **more,
    )  # fmt: skip


def failed(name):
    return Row(name, "no memory", verdict="failed")


INT8 = arm("int8wo", 1.9, 2.0, (1.002, 1.001, 1.003))
INT4 = arm("int4wo-64", 2.9, 1.2, (1.015, 1.012, 1.018))
FP6 = arm("fp6", 2.1, 1.6, (1.004, 1.002, 1.006))
BROKEN = arm("uintx-2-64", 4.4, 0.8, (5.0, 4.5, 5.5))
MAYBE = arm("uintx-3-64", 3.5, 1.0, (1.01, 0.995, 1.025))

CASES = {
    "one arm that is all three": (
        [baseline(), INT8, INT4, FP6],
        Limits(),
        ["Fastest that keeps quality, smallest and best compromise: int4wo-64, 2.90 × as fast "
         "(98 % interval 2.89 to 2.91), 1.20 GB, perplexity +1.5 % (+1.2 % to +1.8 %)"],
        "",
    ),
    "broken and unclear quality": (
        [baseline(), INT8, BROKEN, MAYBE],
        Limits(),
        ["Fastest that keeps quality, smallest and best compromise: int8wo, 1.90 × as fast "
         "(98 % interval 1.89 to 1.91), 2.00 GB, perplexity +0.2 % (+0.1 % to +0.3 %)"],
        "Ruled out: 2 arms by perplexity more than 2 % above the baseline's (1 of them not shown "
        "to be)",
    ),
    "three answers": (
        [baseline(), arm("fast", 3.0, 3.0), arm("small", 1.1, 0.5, (1.018, 1.017, 1.019)),
         arm("middle", 2.5, 0.8, (1.001, 1.0003, 1.0017)), failed("torch")],
        Limits(),
        ["Fastest that keeps quality: fast, 3.00 × as fast (98 % interval 2.99 to 3.01), 3.00 GB, "
         "perplexity +0.0 % (-1.0 % to +1.0 %)",
         "Smallest: small, 1.10 × as fast (98 % interval 1.09 to 1.11), 500.00 MB, "
         "perplexity +1.8 % (+1.7 % to +1.9 %)",
         "Best compromise: middle, 2.50 × as fast (98 % interval 2.49 to 2.51), 800.00 MB, "
         "perplexity +0.1 % (+0.0 % to +0.2 %)"],
        "Ruled out: 1 arm failed",
    ),
    "ties go to the smaller": (
        [baseline(), arm("a", 2.00, 2.0, spread=0.1, can_be_best=True),
         arm("b", 1.95, 1.5, spread=0.1, can_be_best=True), arm("c", 1.2, 1.45)],
        Limits(),
        ["Fastest that keeps quality and best compromise: b, 1.95 × as fast (98 % interval 1.85 to "
         "2.05), 1.50 GB, perplexity +0.0 % (-1.0 % to +1.0 %); these 2 cannot be told from the "
         "fastest: a, b",
         "Smallest: c, 1.20 × as fast (98 % interval 1.19 to 1.21), 1.45 GB, "
         "perplexity +0.0 % (-1.0 % to +1.0 %)"],
        "",
    ),
    "ties of memory go to quality": (
        [baseline(), arm("a", 2.00, 1.5, (1.01, 1.009, 1.011), spread=0.1),
         arm("b", 1.95, 1.505, (1.001, 1.0, 1.002), spread=0.1)],
        Limits(),
        ["Fastest that keeps quality and best compromise: b, 1.95 × as fast (98 % interval 1.85 to "
         "2.05), 1.50 GB, perplexity +0.1 % (+0.0 % to +0.2 %); these 2 cannot be told from the "
         "fastest: a, b",
         "Smallest: a, 2.00 × as fast (98 % interval 1.90 to 2.10), 1.50 GB, "
         "perplexity +1.0 % (+0.9 % to +1.1 %)"],
        "",
    ),
    "memory and speed rule out": (
        [baseline(), INT8, INT4, FP6, arm("slow", 0.5, 0.9)],
        Limits(max_memory=1_500_000_000, min_tok_s=20),
        ["Fastest that keeps quality, smallest and best compromise: int4wo-64, 2.90 × as fast "
         "(98 % interval 2.89 to 2.91), 1.20 GB, perplexity +1.5 % (+1.2 % to +1.8 %)"],
        "Ruled out: 3 arms by memory above 1.50 GB, 3 arms by less than 20 tok/s",
    ),
    "nothing is better than the baseline": (
        [baseline(), arm("int8wo", 0.9, 5.0), BROKEN],
        Limits(),
        ["Fastest that keeps quality, smallest and best compromise: none, the baseline, "
         "4.00 GB, perplexity 8.00"],
        "Ruled out: 1 arm by perplexity more than 2 % above the baseline's",
    ),
    "limits that exclude everything: memory": (
        [baseline(), INT8, INT4],
        Limits(max_memory=1_100_000_000),
        ["No arm satisfies all limits; the nearest, int4wo-64, needs --max_memory 1.2GB"],
        "Ruled out: 3 arms by memory above 1.10 GB",
    ),
    "limits that exclude everything: perplexity": (
        [baseline(), INT8, arm("int4wo-32", 2.5, 1.3, (1.025, 1.0221, 1.0279))],
        Limits(max_memory=1_500_000_000),
        ["No arm satisfies all limits; the nearest, int4wo-32, needs "
         "--max_perplexity_increase 2.8%"],
        "Ruled out: 2 arms by memory above 1.50 GB, 1 arm by perplexity more than 2 % above the "
        "baseline's",
    ),
    "limits that exclude everything: speed": (
        [baseline(), INT8],
        Limits(min_tok_s=19.5),
        ["No arm satisfies all limits; the nearest, int8wo, needs --min_tok_s 19"],
        "Ruled out: 2 arms by less than 19.5 tok/s",
    ),
    "limits that exclude everything: two at once": (
        [baseline(), arm("int4wo-32", 1.8, 1.3, (1.025, 1.0221, 1.0279))],
        Limits(max_memory=1_290_000_000),
        ["No arm satisfies all limits; the nearest, int4wo-32, needs --max_memory 1.3GB and "
         "--max_perplexity_increase 2.8%"],
        "Ruled out: 2 arms by memory above 1.29 GB, 1 arm by perplexity more than 2 % above the "
        "baseline's",
    ),
    "limits that exclude everything: a speed that the fastest lacks, too": (
        [baseline(), INT8, BROKEN],
        Limits(min_tok_s=1e9),
        ["No arm satisfies all limits; the nearest, int8wo, needs --min_tok_s 19; the fastest, "
         "uintx-2-64, makes 44.0 tok/s"],
        "Ruled out: 3 arms by less than 1e+09 tok/s, 1 arm by perplexity more than 2 % above the "
        "baseline's",
    ),
    "text too short for an interval": (
        [baseline(), arm("a", 2.0, 2.0, (1.001,))],
        Limits(max_memory=3 * GB),
        ["No arm satisfies all limits; the nearest, none, needs --max_memory 4GB"],
        "Ruled out: 1 arm by memory above 3.00 GB, 1 arm by perplexity more than 2 % above the "
        "baseline's (1 of them not shown to be)",
    ),
    "quality of another model": (
        [baseline(), arm("int8wo", 1.9, 2.0, quality_model="tiny")],
        Limits(),
        ["Fastest that keeps quality, smallest and best compromise: int8wo, 1.90 × as fast "
         "(98 % interval 1.89 to 1.91), 2.00 GB, perplexity +0.0 % (-1.0 % to +1.0 %) on the model "
         "tiny"],
        "",
    ),
    "quality was not measured, one process each": (
        [baseline(), arm("int8wo", 1.9, 2.0, None, spread=None)],
        Limits(),
        ["Fastest that keeps quality, smallest and best compromise: int8wo, 1.90 × as fast "
         "(a single process, no range), 2.00 GB, quality not measured"],
        "",
    ),
    "the baseline failed": (
        [failed("none"), Row("int8wo", verdict="no baseline", tok_s=3.0)],
        Limits(),
        ["Nothing to recommend: no arm was measured beside a baseline"],
        "Ruled out: 1 arm failed, 1 arm not measured",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows, limits, lines, excluded", CASES.values(), ids=CASES)
def test_the_answer(request, rows, limits, lines, excluded):
    answer = recommend(rows, limits)
    assert answer.lines() == lines and len(lines) <= 3
    assert answer.exclusions() == excluded
    assert from_json(Recommendation, json.loads(json.dumps(to_json(answer)))) == answer
    for line in lines:
        assert line in answer.text() and line in answer.markdown()
    assert (answer.note is not None) == ("too short" in request.node.name)
    assert answer.note is None or answer.note in answer.text()
    never = {row.arm for row in rows if row.verdict in ("failed", "no baseline")}
    assert not never & {choice.arm for choice in answer.choices}


@pytest.mark.parametrize("tok_s", [0.0123456, 0.999, 19.0, 2.3, 123456.7])
def test_the_speed_to_ask_for_is_one_that_the_arm_has(tok_s):
    """Also below a tenth of a token per second, where a limit of 0 would be none."""
    slow = replace(baseline(), tok_s=tok_s)
    told = recommend([slow], Limits(min_tok_s=1e6)).nothing
    needed = float(re.search("--min_tok_s ([0-9.e+-]+)$", told)[1])
    assert 0.99 * tok_s < needed <= tok_s
    assert not recommend([slow], Limits(min_tok_s=needed)).nothing


def test_relaxing_as_told_gives_an_answer():
    """The limits that the line names, given, let the arm that it names through."""
    rows = [baseline(), arm("int4wo-32", 1.8, 1.3004, (1.025, 1.0221, 1.02791))]
    told = recommend(rows, Limits(1_290_000_000, 0.02, 18.5)).lines()[0]
    words = told.split(" needs ")[1].split(" and ")
    given = dict(word.split() for word in words)
    limits = Limits(
        round(float(given["--max_memory"].removesuffix("GB")) * GB),
        float(given["--max_perplexity_increase"].removesuffix("%")) / 100,
        float(given["--min_tok_s"]),
    )
    assert [choice.arm for choice in recommend(rows, limits).choices] == ["int4wo-32"]


def test_those_compared_are_those_within_the_limits():
    """An arm that a ruled-out arm beats may still be the fastest of the rest."""
    rows = [baseline(), arm("a", 2.0, 2.0, spread=0.2), arm("b", 1.9, 1.5, spread=0.2), BROKEN]
    rows[3].can_be_best = True
    asked = []

    def best_of(numbers):
        asked.append(list(numbers))
        return {1}

    choice = recommend(rows, Limits(), best_of).choices[0]
    assert asked == [[0, 1, 2]] and choice.arm == "a" and choice.tied == []
    assert recommend(rows, Limits()).choices[0].tied == ["a", "b"]  # their intervals overlap


def test_of_ranges_those_that_overlap_are_ties():
    """With too few processes to compare anything, Hsu's set holds every arm."""
    rows = [baseline(1.0), arm("a", 2.0, 2.0, spread=0.2), arm("b", 1.9, 1.5, spread=0.2)]
    for row in rows[1:]:
        row.speed_up = replace(row.speed_up, confidence=None)
    fastest = recommend(rows, Limits(), set).choices[0]
    assert fastest.arm == "b" and fastest.tied == ["a", "b"] and "(range 1.70 to" in fastest.line()


def test_memory_without_a_peak_is_weights_and_cache():
    rows = [baseline(), arm("int8wo", 2.0, 2.0), arm("int4wo-64", 2.5, 3.0)]
    for row, weights in zip(rows, (4, 2, 1), strict=True):
        row.peak_memory_bytes, row.weight_bytes, row.kv_cache_bytes = None, weights * GB, GB // 2
    answer = recommend(rows, Limits(max_memory=2 * GB))
    assert [(c.arm, c.memory_bytes) for c in answer.choices] == [("int4wo-64", 3 * GB // 2)]


def test_the_command_gives_the_same_run():
    written = "--quantization int8wo --checkpoint_path dummy:Llama-3.2-1B --compile --top_k 200"
    written = [*written.split(), "--prompt=-a b", "--num_layers", "4", "--num_samples", "5"]
    for own in (["--max_new_tokens", "32"], ["--write_result", "ab.txt"]):  # a comparison's own
        assert command([*written, *own]) == command(written)
    words = [word.text for word in shell.words(command(written))]
    assert words[:2] == ["quantbench", "generate"] and parse(words[2:]) == parse(written)
    assert command([]) == "quantbench generate --checkpoint_path tiny"
