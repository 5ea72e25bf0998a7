"""generate with experts in two tiers: its lines and JSON, and what a careless person gives it."""

import gc
import json
import os
from pathlib import Path

import pytest

from quantbench import devices
from quantbench.errors import UsageError
from quantbench.experts import loading as tiers_of_a_run
from quantbench.experts.layout import whole_pages
from quantbench.experts.popularity import Popularity, Routers
from quantbench.experts.tiers import POLICIES
from quantbench.log import config as log_config
from quantbench.log.options import parse
from quantbench.run import loading, measure
from quantbench.run.plan import make_plan
from quantbench.run.sizes import size_of
from tests.experts.small import CPU, REFUSAL, disk_full, when_held
from tests.models.refused import refusal
from tests.programs import command, worked
from tests.refusals import one_line

SHORT = ("--num_samples", "2", "--max_new_tokens", "4", "--device", "cpu", "--threads", "1")
TIERED = (*SHORT, "--checkpoint_path", "tiny_moe", "--quantization", "int8wo")


@pytest.fixture
def place(in_tmp):
    Path("benchmarks.txt").write_text("")
    return in_tmp


def run(words, start=worked):
    return start("generate", *TIERED, "--expert_folder", "slow", *words.split())


def record_of(words):
    """The JSON of a run, and what it said on stderr."""
    said = run(f"{words} --output_json_path runs.jsonl").stderr
    return json.loads(Path("runs.jsonl").read_text()), said


def tiny_expert_bytes():
    plan = make_plan(parse(TIERED))
    return size_of(plan.architecture, plan.spec.scheme, CPU, plan.precision).expert_bytes


def test_the_names_of_options_are_those_of_the_registries():
    assert set(log_config.EXPERT_POLICIES) == {"auto", *POLICIES}


def test_what_is_printed_and_in_json(place):
    words = "--expert_memory 12 --expert_policy fetch"
    record, said = record_of(words)
    where = record["experts"]
    assert (where["fast"], where["landing"], where["every"]) == (10, 2, 40)
    assert where["by_layer"] == [2] * 5 and where["slow"] == "disk"
    assert record["kernel"] and record["decoder"] == ("modules" if REFUSAL else "cpu-step")
    prompts, steps = record["expert_prompts"], record["expert_steps"]
    tokens = record["prompt_tokens"]
    assert (prompts["passes"], steps["passes"]) == (2, 6)
    assert prompts["traffic"]["assignments"] == 2 * tokens * 5 * 2
    assert steps["traffic"]["assignments"] == 2 * 3 * 5 * 2
    for phase in (prompts, steps):
        counts = phase["traffic"]
        assert counts["hits"] + counts["fetched"] == counts["assignments"]
        assert counts["bytes_moved"] == counts["fetches"] * where["expert_bytes"]
        assert phase["hit_rate"] == counts["hits"] / counts["assignments"]
        assert 0 < phase["waiting_ms"] < phase["expert_ms"] < phase["ms"]
        assert phase["layer_ms"] == pytest.approx(phase["expert_ms"] / 5)
    assert record["samples"][0]["experts"]["decode"]["assignments"] == 3 * 5 * 2
    assert "10 of 40 experts are in fast memory (placed uniform, policy fetch)" in said
    assert f"hits {steps['traffic']['hits']} of 60 assignments" in said and "ms a layer" in said
    assert words in record["line"]
    assert not list(Path("slow").iterdir())


@pytest.mark.parametrize("faster", ["cache", "compute_there"])
def test_auto_follows_the_faster_policy_and_says_which(faster, place, monkeypatch):
    monkeypatch.setattr(tiers_of_a_run, "faster", lambda *arguments: POLICIES[faster])
    record, said = record_of("--expert_memory 12")
    where, steps = record["experts"], record["expert_steps"]["traffic"]
    assert (where["policy"], where["followed"]) == ("auto", faster)
    assert f"--expert_policy auto: {faster} is faster here" in said
    assert f"(placed uniform, policy auto: {faster})" in said
    there = faster == "compute_there"
    assert (where["fast"], where["landing"]) == ((12, 0) if there else (10, 2))
    assert (steps["there"] > 0) is there and (steps["fetches"] > 0) is not there


def test_auto_takes_what_is_free_without_the_cache_activations_and_a_reserve(monkeypatch, place):
    """tiny_moe by hand, in bytes: the KV cache holds keys and values of 5 layers, 4 heads of 64 in
    bfloat16, 256 positions. A pass of 100 tokens has for each, in float32, six vectors of 256
    (the sum, its norm, the output, what attention adds; two experts' outputs) and two of 1536 (a
    gate and a projection of 768); and two rows of 4096 logits. Nine tenths of what is free count.
    """
    cached = 5 * 2 * 4 * 64 * 256 * 2
    activations = 4 * (100 * (6 * 256 + 2 * 1536) + 2 * 4096)
    given = "--cache_size 256 --prefill_size 100 --expert_memory auto --expert_policy cache"
    plan = make_plan(parse([*TIERED, *given.split(), "--expert_folder", "slow"]))
    each = whole_pages(tiny_expert_bytes())

    def load(free):
        monkeypatch.setattr(devices, "free_memory", lambda device: free)
        return loading.load(plan, lambda *a: None, lambda line: None).model

    for experts, rest in ((17, 0), (17, each - 8), (16, -8)):
        held = measure.tiers_of(load((cached + activations + experts * each + rest) / 0.9 + 4))
        assert sum(held.quotas) + held.arrivals == (experts if rest >= 0 else experts - 1)
    for free, message in (
        (cached, "--expert_memory auto has room for 0 experts of "),
        (None, "cpu does not say how much memory is free; give a size, such as 8GB"),
    ):
        assert message in refusal(UsageError, load, free)


def test_the_text_does_not_depend_on_the_tiers(place):
    whole = command("generate", *TIERED)
    for words in ("2 --expert_policy fetch", "20 --expert_placement first", "auto", "9999"):
        result = run(f"--expert_memory {words} --write_result none")
        assert result.stdout.split("\n\n")[0] == whole.stdout.split("\n\n")[0], words


def test_what_a_run_will_take_is_said_before_it(place):
    each = tiny_expert_bytes()
    result = run("--expert_memory 12 --dry_run")
    assert f"slow memory      {28 * each / 1e9:.2f} GB of experts" in result.stdout
    room = 12.9 * whole_pages(each) / 1e6
    result = run(f"--expert_memory {room:.6f}MB --expert_policy cache --write_result none")
    assert f"experts in slow memory alone: {28 * each / 1e6:.2f} MB" in result.stderr
    assert "Experts: 10 of 40 in fast memory" in result.stderr


BAD = {  # words: the line; more of them are in tests/messages.txt
    "--expert_memory 1": "and a layer needs the 2 of a token: --expert_memory 2 (",
    "--expert_memory 1 --dry_run": "is the least that works",
    "--expert_memory 0.001MB": "--expert_memory 0.001MB has room for 0 experts of ",
    "--expert_memory 4 --expert_placement alike.json": "alike.json is of another model",
    "--expert_memory 4 --decoder cpu-step --kernel reference": "which has no C++ kernel",
}


@pytest.mark.parametrize(("words", "message"), BAD.items())
def test_bad_input_is_one_line_and_the_log_untouched(place, words, message):
    """What only sizes and weights of the model show."""
    routers, counts = Routers("Other", 8, 2, (), tuple("abcde")), ((5,) * 8,) * 5
    Popularity(routers, "text", 40, (counts, counts)).save("", "alike.json")
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    result = command("generate", *TIERED, *words.split())
    assert message in one_line(result) and result.exit_code == (1 if "--kernel" in words else 2)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def becomes_a_folder(slow):
    os.dup2(os.open(".", os.O_RDONLY), slow.file)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (lambda patch: disk_full(patch, "pwrite", 2),
         "cannot be written: No space left on device; the experts take"),
        (lambda patch: when_held(patch, lambda slow: os.ftruncate(slow.buffered, 4096)),
         "was truncated while the run used it; run again"),
        (lambda patch: when_held(patch, becomes_a_folder), "cannot be read: Is a directory; give"),
    ],
)  # fmt: skip
def test_a_disk_that_fails_in_the_middle_of_a_run(fails, message, place, monkeypatch):
    """A failure is one line, and nothing is logged."""
    fails(monkeypatch)
    result = run("--expert_memory 4 --expert_policy fetch", command)
    assert f"--expert_folder slow: the experts' file {message}" in one_line(result)
    assert result.exit_code == 1 and Path("benchmarks.txt").read_text() == ""
    gc.collect()
    assert not list(Path("slow").iterdir())
