"""The answer of a comparison, from hand-made rows: who is chosen, and what a person reads."""

import dataclasses

import pytest

from quantbench.compare.limits import OPTIONS, Limits, limits, ruled_out
from quantbench.compare.recommend import Recommendation, command, listed, recommend, verifying
from quantbench.compare.row import Row
from quantbench.log import shell
from quantbench.log.options import parse
from quantbench.quality.types import NoQuality, Quality, QualityReference
from quantbench.report.interval import Interval
from quantbench.typed_json import from_json, to_json

GB = 10**9


def shell_words(text):
    return [word.text for word in shell.words(text)]


def measured(name, memory, tok_s, **more):
    peaks = {"generate": {"resident": round(memory * GB)}}
    return Row(name, tok_s=tok_s, peak_memory_bytes=peaks, argv=["--quantization", name], **more)


def baseline(memory=4.0, tok_s=10.0, **more):
    return measured("none", memory, tok_s, verdict="baseline", **more)


def arm(name, speed, memory, kl=0.005, error=0.001, **more):
    ratio = Interval(speed, speed - 0.01, speed + 0.01)
    verdict = "faster" if speed > 1 else "slower"
    more = {"speed_up": ratio, "decode_speed_up": ratio, "verdict": verdict, **more}
    ends = None if kl is None else [kl - 1.96 * error, kl + 1.96 * error]
    return measured(name, memory, 10 * speed, kl=kl, kl_interval=ends, **more)


INT8, INT4, FP6 = arm("int8wo", 1.9, 2.0), arm("int4wo-64", 2.9, 1.2), arm("fp6", 2.1, 1.6)
BROKEN = arm("uintx-2-64", 4.4, 0.8, 3.0, 0.1)
MAYBE = arm("uintx-3-64", 3.5, 1.0, 0.029, 0.002)
ALL = ["fastest", "smallest", "compromise"]
UNKNOWN = arm("fast", 5.0, 0.5, kl=None, error=None, why_no_quality="another tokenizer")
CASES = {
    # rows behind the baseline, limits, the arms chosen with what for, parts of the remarks
    "one is all three": ([INT8, INT4, FP6], Limits(), {"int4wo-64": ALL}, []),
    "broken, and not shown to be good": (
        [INT8, BROKEN, MAYBE], Limits(), {"int8wo": ALL},
        ["Excluded: KL above 0.03: uintx-2-64", "May exceed a limit: uintx-3-64 (KL above 0.03)"],
    ),
    "three answers": (
        [arm("fast", 3.0, 3.0), arm("small", 1.1, 0.5, 0.028, 0.0), arm("middle", 2.5, 0.8, 0.001),
         Row("torch", "no memory", verdict="failed"), Row("late")], Limits(),
        {"fast": ["fastest"], "small": ["smallest"], "middle": ["compromise"]},
        ["Excluded: failed: torch; not measured: late"],
    ),
    "memory and speed rule out": (
        [INT8, INT4, FP6, arm("slow", 0.5, 0.9)], Limits(max_memory=1_500_000_000, min_tok_s=20),
        {"int4wo-64": ALL},
        ["memory above 1.50 GB: none, int8wo, fp6", "less than 20 tok/s: none, int8wo, slow"],
    ),
    "the speed's interval contains the limit": (
        [dataclasses.replace(INT8, tok_s=21.0, tok_s_interval=[19.0, 23.0]),
         dataclasses.replace(FP6, tok_s=25.0, tok_s_interval=[22.0, 28.0])],
        Limits(min_tok_s=20), {"fp6": ALL},
        ["May exceed a limit: int8wo (less than 20 tok/s)", "Excluded: less than 20 tok/s: none"],
    ),
    "nothing is better than the baseline": (
        [arm("int8wo", 0.9, 5.0), BROKEN], Limits(), {"none": ALL}, ["KL above 0.03: uintx-2-64"],
    ),
    "quality of one not known": (  # which is not a KL of 0
        [INT8, UNKNOWN], Limits(), {"int8wo": ALL},
        ["May exceed a limit: fast (quality not measured)"],
    ),
    "the same, and no limit": ([INT8, UNKNOWN], Limits(max_kl=None), {"fast": ALL}, []),
    "dropped before it was timed": (
        [INT8, Row("nf4", dropped="KL above 0.03", kl=0.3, kl_interval=[0.2, 0.4])], Limits(),
        {"int8wo": ALL},
        ["Excluded: KL above 0.03: nf4"],
    ),
    "perplexity as a limit": (
        [dataclasses.replace(INT8, perplexity_ratio=Interval(1.002, 1.001, 1.003)),
         dataclasses.replace(INT4, perplexity_ratio=Interval(1.04, 1.03, 1.05))],
        Limits(max_perplexity_increase=0.02), {"int8wo": ALL},
        ["perplexity more than 0.02 above the baseline's: int4wo-64"],
    ),
    "agreement as a limit": (
        [dataclasses.replace(INT8, top1=0.99), dataclasses.replace(INT4, top1=0.9)],
        Limits(min_top1=0.95), {"int8wo": ALL}, ["top-1 below 0.95: int4wo-64"],
    ),
}  # fmt: skip
NOTHING = {
    "memory": ([INT8, INT4], Limits(max_memory=int(1.1e9)), "int4wo-64, needs --max_memory 1.2GB"),
    "KL": ([INT8], Limits(max_kl=0.001, max_memory=3 * GB), "int8wo, needs --max_kl 0.00696"),
    "speed": ([INT8], Limits(min_tok_s=19.5), "int8wo, needs --min_tok_s 19"),
    "two": ([INT8], Limits(max_memory=GB, min_tok_s=30), "--max_memory 2GB --min_tok_s 19"),
    "no quality": ([arm("int8wo", 2, 2, kl=None, why_no_quality="--tokens 0")], Limits(),
                   "quality was not measured (--tokens 0), and speed alone says nothing"),
    "no arm": ([], Limits(), "no arm was measured beside a baseline"),
}  # fmt: skip


def best(rows):
    """Those whose intervals reach the fastest's."""

    def of(among):
        ends = {n: rows[n].speed_up or Interval(1, 1, 1) for n in among}
        top = max(ratio.low for ratio in ends.values())
        return {n for n, ratio in ends.items() if ratio.high >= top}

    return of


@pytest.mark.parametrize("name", CASES)
def test_who_is_chosen(name):
    others, asked, chosen, remarks = CASES[name]
    rows = [baseline(), *others]
    answer = recommend(rows, asked, best(rows))
    assert {choice.arm: choice.what for choice in answer.choices} == chosen
    for part in remarks:
        assert part in "\n".join(answer.remarks)
    assert bool(answer.remarks) == bool(remarks)
    assert from_json(Recommendation, to_json(answer)) == answer
    shown = " ".join(answer.text().split())
    assert len(answer.choices) <= 3 and all(one.line in shown for one in answer.choices)


@pytest.mark.parametrize("name", NOTHING)
def test_what_to_relax_where_nothing_is_chosen(name):
    others, asked, needed = NOTHING[name]
    rows = [baseline(), *others]
    answer = recommend(rows, asked, best(rows))
    assert not answer.choices and needed in answer.nothing and "\n" not in answer.nothing
    relaxed = answer.nothing.partition(" needs ")[2].split()
    if relaxed:  # with what it says, the arm is chosen
        given = dict.fromkeys(OPTIONS)
        for option, text in zip(relaxed[::2], relaxed[1::2], strict=True):
            name = option.removeprefix("--")
            given[name] = OPTIONS[name][0].read(text)
        again = recommend(rows, limits(given, asked), best(rows))
        assert again.choices and again.nothing is None


def test_of_arms_that_are_not_told_apart_the_smaller_is_taken():
    wide = {"speed_up": Interval(2.0, 1.9, 2.1)}
    near = {"speed_up": Interval(1.95, 1.85, 2.05)}
    rows = [baseline(), arm("a", 2.0, 2.0, **wide), arm("b", 1.95, 1.5, **near)]
    answer = recommend(rows, Limits(), best(rows))
    assert answer.choices[0].arm == "b" and answer.choices[0].line.endswith("not told apart from a")


@pytest.mark.parametrize("ends", [(), (0.22, 5.87)])
def test_a_speed_that_is_not_known_is_not_called_the_fastest(ends):
    rows = [baseline(), arm("a", 1.14, 0.5, speed_up=Interval(1.14, *ends))]
    line = recommend(rows, Limits(), lambda among: set(among)).choices[0].line
    assert line.startswith("Use a: one of those that may be the fastest (too few cycles to tell;")
    assert line.endswith("not told apart from none")


def test_where_processes_make_the_interval_wide_more_cycles_are_not_asked_for():
    row = arm("a", 1.14, 0.5, speed_up=Interval(1.14, 0.7, 1.86), floor=0.45)
    line = recommend([baseline(), row], Limits(), lambda among: set(among)).choices[0].line
    assert "give more --processes)" in line and "--max_minutes" not in line


def test_an_arm_that_may_be_within_the_limits_and_faster_is_named():
    """MAYBE, 3.5 × as fast, may exceed the KL; int4wo-64, 2.9 ×, is shown to be within it."""
    rows = [baseline(), INT4, MAYBE]
    line = recommend(rows, Limits(), best(rows)).choices[0].line
    assert line.startswith("Use int4wo-64: the fastest of those shown to be within the limits")
    assert line.endswith("; uintx-3-64, which may exceed a limit, may be faster")
    slower = [baseline(), INT4, arm("slow", 1.5, 3.0, 0.029, 0.002)]
    assert "may be faster" not in recommend(slower, Limits(), best(slower)).choices[0].line


def test_one_of_several_is_not_called_one_of_the_fastest():
    """The smallest of those that are not told apart may be a fifth slower."""
    rows = [baseline(), arm("a", 2.4, 2.0, speed_up=Interval(2.4, 1.9, 2.9)),
            arm("b", 2.0, 1.5, speed_up=Interval(2.0, 1.6, 2.4))]  # fmt: skip
    line = recommend(rows, Limits(), best(rows)).choices[0].line
    assert line.startswith("Use b: not shown to be slower than any other within the limits, ")


def test_limits_of_an_earlier_run_are_not_given_as_the_reason():
    """As `recommend --from` a run with --max_kl 0.03 answers 0.1."""
    dropped = "KL above 0.03"
    kls = (("a", 0.05), ("b", 0.3), ("c", 0.101))
    rows = [baseline(), INT8, 
            *(Row(name, kl=kl, dropped=dropped, kl_interval=[kl - 0.004, kl + 0.004])
              for name, kl in kls)]  # fmt: skip
    rows.append(Row("d", dropped="not tried, as a finer variant's KL is far above 0.03"))
    assert recommend(rows, Limits(0.1), best(rows)).remarks == [
        "Excluded: KL above 0.1: b; not tried, as a finer variant's KL is far above 0.03: d",
        "Not ruled out by these limits, but never timed, as that run's were stricter: a, c; "
        "measure again to compare them",
    ]
    (same,) = recommend(rows[:-1], Limits(), best(rows)).remarks
    assert same == "Excluded: KL above 0.03: a, b, c"


def test_what_ruled_every_arm_out_is_what_has_to_be_relaxed():
    rows = [Row("a", dropped="top-1 below 0.95", kl=0.01, top1=0.9)]
    answer = recommend(rows, Limits(min_top1=0.95), set)
    assert answer.nothing == (
        "No arm is shown to satisfy all limits: each was ruled out before it was timed; relax "
        "--min_top1"
    )


def test_the_line_says_speed_memory_and_quality():
    prompt = Interval(3.0, 2.5, 3.5)
    rows = [baseline(), dataclasses.replace(INT8, prompt_speed_up=prompt, quality_model="tiny")]
    (choice,) = recommend(rows, Limits(), best(rows)).choices
    assert choice.line == (
        "Use int8wo: the fastest of those shown to be within the limits, the smallest and the best "
        "compromise by point estimates; decodes 1.90 × as fast (1.89 to 1.91), prompts 3.00 × as "
        "fast (2.50 to 3.50), 2.00 GB peak memory, KL 0.005 on the model tiny (not noticeable)"
    )


def test_a_baseline_that_is_not_full_precision_is_said():
    rows = [dataclasses.replace(baseline(), arm="int8wo", scheme="int8wo"), INT4]
    (last,) = recommend(rows, Limits(), best(rows)).remarks
    assert last == "KL and speed-ups are against int8wo, not full precision"


def test_a_baseline_with_a_kl_has_to_keep_the_limits():
    """As where quality is relative to another file."""
    rows = [baseline(memory=0.9, kl=0.2, kl_interval=[0.18, 0.22], scheme="int4wo-64"), INT8]
    answer = recommend(rows, Limits(), best(rows), QualityReference([], "a.gguf", "gguf-Q8_0"))
    assert [choice.arm for choice in answer.choices] == ["int8wo"]
    assert answer.remarks == [
        "Excluded: KL above 0.03: none",
        "speed-ups are against none, not full precision",
        "quality is relative to a.gguf, whose weights are quantized themselves (gguf-Q8_0)",
    ]
    rows[0].kl, rows[0].why_no_quality = None, "its predictions are not numbers"
    assert (
        "May exceed a limit: none (quality not measured)"
        in recommend(rows, Limits(), best(rows)).remarks
    )


def test_a_failed_baseline_is_the_answer():
    rows = [Row("none", "no memory", verdict="failed"), INT8]
    expected = "No recommendation: the baseline, none, failed"
    assert recommend(rows, Limits(), set).nothing == expected


def test_commands_run_what_was_measured_and_compare_it_again():
    words = ["--quantization", "int8wo", "--compile", "--max_new_tokens", "32", "--debug"]
    assert command(words) == (
        "quantbench generate --quantization int8wo --checkpoint_path tiny --compile"
    )
    said = shell.words(verifying([*words, "--threads", "2"], ["--compile", "--threads", "1"]))
    texts = [word.text for word in said]
    assert texts[:2] == ["quantbench", "ab"] and texts.count("--arm") == 2
    arms = [texts[n + 1] for n, word in enumerate(texts) if word == "--arm"]
    assert parse(arms[1].split()).threads == 2 and "int8wo" in arms[1] and "none" in arms[0]
    words = ["--quantization", "int8wo", "--compile"]  # a switch takes no value
    texts = [word.text for word in shell.words(verifying(words, []))]
    first, second = (parse(shell_words(texts[n + 1])) for n, w in enumerate(texts) if w == "--arm")
    assert (first.compile, second.compile) == (False, True)
    again = verifying(["--checkpoint_path", "b.gguf"], ["--checkpoint_path", "a.gguf"])
    assert again == (  # no scheme is named: the file's own is meant
        "quantbench ab --checkpoint_path tiny --same_model --arm '--checkpoint_path a.gguf' "
        "--arm '--checkpoint_path b.gguf'"
    )


@pytest.mark.parametrize(
    ("quality", "why"),
    [
        (Quality(512, 8.0, 0.1, kl=0.3, kl_interval=[0.28, 0.32]), "KL above 0.03"),
        (Quality(512, 8.0, 0.1, kl=0.031, kl_interval=[0.01, 0.05]), None),
        (Quality(512, 8.0, 0.1, kl=0.0315, kl_interval=[0.031, 0.032]), "KL above 0.03"),
        # the noise of full precision itself may be all of what is above the limit
        (Quality(512, 8.0, 0.1, kl=0.0315, kl_interval=[0.031, 0.032], noise=0.0013), None),
        (Quality(64, 8.0, 0.1, kl=0.3), None),  # too few tokens to tell
        (Quality(512, 8.0, 0.1, kl=0.01, kl_interval=[0.009, 0.011]), None),
        (Quality(512, 8.0, 0.1), None),
        (NoQuality("another tokenizer"), None),
        (None, None),
    ],
)
def test_only_quality_that_is_clearly_beyond_a_limit_rules_out(quality, why):
    assert ruled_out(quality, Limits()) == why


def test_what_is_not_given_stays():
    before = Limits(0.1, 0.02, 0.9, 3, 7)
    assert limits(dict.fromkeys(OPTIONS), before) == before
    texts = {"max_memory": "7.5GiB", "min_top1": "95%"}
    given = {name: OPTIONS[name][0].read(text) for name, text in texts.items()}
    given = {**dict.fromkeys(OPTIONS), **given}
    assert limits(given) == Limits(max_memory=round(7.5 * 2**30), min_top1=0.95)


def test_arms_whose_names_have_commas_are_told_apart():
    assert listed(["int8wo", "fp6"]) == "int8wo, fp6"
    assert listed(["int8wo, threads=1", "fp6"]) == "int8wo, threads=1; fp6"
    assert listed(list("abcdef")) == "a, b, c, d and 2 more"
