"""generate with experts in two tiers: its lines and JSON, and what a careless person gives it."""

import gc
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantbench import devices
from quantbench.commands.generate import generate
from quantbench.errors import UsageError
from quantbench.experts import slow, tiers, trial
from quantbench.experts.layout import whole_pages
from quantbench.experts.popularity import Popularity, Routers
from quantbench.experts.tiers import POLICIES
from quantbench.log import config as log_config
from quantbench.log.options import parse
from quantbench.ops.cpu import build
from quantbench.run import loading
from quantbench.run.plan import make_plan
from quantbench.run.tiers import expert_bytes
from tests.experts.small import CPU, when_held
from tests.test_refusals import only_error

SHORT = ("--num_samples", "2", "--max_new_tokens", "4", "--device", "cpu", "--threads", "1")
DECODER = "modules" if build.refusal() else "cpu-step"
TIERED = (*SHORT, "--checkpoint_path", "tiny_moe", "--quantization", "int8wo")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("benchmarks.txt").write_text("")
    return tmp_path


def run(*words):
    return CliRunner().invoke(generate, [*TIERED, "--expert_folder", "slow", *words])


def expert_megabytes():
    plan = make_plan(parse(TIERED))
    return expert_bytes(plan.architecture, plan.spec.scheme, CPU, plan.precision) / 1e6


def test_the_names_of_options_are_those_of_the_registries():
    assert set(log_config.EXPERT_POLICIES) == {"auto", *POLICIES}


def test_what_is_printed_and_in_json(place):
    words = ("--expert_memory", "12", "--expert_policy", "fetch")
    result = run(*words, "--output_json_path", "runs.jsonl")
    assert result.exit_code == 0, result.stderr
    record = json.loads(Path("runs.jsonl").read_text())
    where = record["experts"]
    assert (where["fast"], where["landing"], where["every"]) == (10, 2, 40)
    assert where["by_layer"] == [2] * 5 and where["slow"] == "disk"
    assert record["kernel"] and record["decoder"] == DECODER
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
    sample = record["samples"][0]["experts"]
    assert sample["decode"]["assignments"] == 3 * 5 * 2
    assert "10 of 40 experts are in fast memory (placed uniform, policy fetch)" in result.stderr
    hits = f"hits {steps['traffic']['hits']} of 60 assignments"
    assert hits in result.stderr and "ms a layer" in result.stderr
    assert " ".join(words) in record["line"]
    gc.collect()  # outside of tests the file is removed when the process ends
    assert not list(Path("slow").iterdir())


@pytest.mark.parametrize("faster", ["cache", "compute_there"])
def test_auto_follows_the_faster_policy_and_says_which(faster, place, monkeypatch):
    monkeypatch.setattr(trial, "faster", lambda *arguments: POLICIES[faster])
    result = run("--expert_memory", "12", "--output_json_path", "runs.jsonl")
    assert result.exit_code == 0, result.stderr
    record = json.loads(Path("runs.jsonl").read_text())
    where, steps = record["experts"], record["expert_steps"]["traffic"]
    assert (where["policy"], where["followed"]) == ("auto", faster)
    assert f"--expert_policy auto: {faster} is faster here" in result.stderr
    assert f"(placed uniform, policy auto: {faster})" in result.stderr
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
    given = ("--cache_size", "256", "--prefill_size", "100", "--expert_memory", "auto")
    config = parse([*TIERED, *given, "--expert_folder", "slow", "--expert_policy", "cache"])
    plan = make_plan(config)
    each = expert_bytes(plan.architecture, plan.spec.scheme, CPU, plan.precision)
    each = -(-each // 4096) * 4096
    for experts, rest in ((17, 0), (17, each - 8), (16, -8)):
        free = (cached + activations + experts * each + rest) / 0.9
        expected = experts if rest >= 0 else experts - 1
        monkeypatch.setattr(devices, "free_memory", lambda device, free=free: free + 4)
        model = loading.load(plan, lambda *a: None, lambda line: None).model
        held = tiers.tiers_of(model)
        assert sum(held.quotas) + held.arrivals == expected
    for free, message in (
        (cached, "--expert_memory auto has room for 0 experts of "),
        (None, "cpu does not say how much memory is free; give a size, such as 8GB"),
    ):
        monkeypatch.setattr(devices, "free_memory", lambda device, free=free: free)
        with pytest.raises(UsageError) as raised:
            loading.load(plan, lambda *a: None, lambda line: None)
        assert message in str(raised.value) and "\n" not in str(raised.value)


def test_the_text_does_not_depend_on_the_tiers(place):
    texts = set()
    for words in (
        ("--expert_memory", "2", "--expert_policy", "fetch"),
        ("--expert_memory", "20", "--expert_policy", "cache", "--expert_placement", "first"),
        ("--expert_memory", "15", "--expert_policy", "compute_there"),
        ("--expert_memory", "auto"),
        ("--expert_memory", "9999"),
    ):
        result = run(*words, "--write_result", "none")
        assert result.exit_code == 0, result.stderr
        texts.add(result.stdout.split("\n\n")[0])
    whole = CliRunner().invoke(generate, TIERED)
    assert texts == {whole.stdout.split("\n\n")[0]}


def test_what_a_run_will_take_is_said_before_it(place):
    each = expert_megabytes()
    result = CliRunner().invoke(generate, [*TIERED, "--expert_memory", "12", "--dry_run"])
    assert f"slow memory      {28 * each / 1e3:.2f} GB of experts" in result.stdout
    room = 12.9 * whole_pages(round(each * 1e6)) / 1e6
    how = "--expert_policy", "cache", "--write_result", "none"
    result = run("--expert_memory", f"{room:.6f}MB", *how)
    assert f"experts in slow memory alone: {28 * each:.2f} MB" in result.stderr
    assert "Experts: 10 of 40 in fast memory" in result.stderr


def popularity(**changes):
    routers = {"model": "Other", "num_experts": 4, "experts_per_token": 2, "dense_layers": ()}
    routers |= {"digests": ("a", "b")} | changes
    layers = len(routers["digests"])
    counts = ((5,) * routers["num_experts"],) * layers
    made = Routers(**routers)
    tokens = 2 * 5 * routers["num_experts"] // routers["experts_per_token"]
    return Popularity(made, "text", tokens, (counts, counts))


BAD = [
    ("--expert_policy cache", 2, "--expert_policy: there is no second tier of memory"),
    ("--expert_placement first", 2, "--expert_placement: there is no second tier of memory"),
    ("--expert_prefetch off", 2, "--expert_prefetch: there is no second tier"),
    ("--expert_folder x", 2, "--expert_folder: there is no second tier"),
    ("--expert_memory 0", 2, "--expert_memory takes a number from 1, a size such as 8GB"),
    ("--expert_memory 8XB", 2, "or auto; given: '8XB'"),
    ("--expert_memory 1", 2, "--expert_memory 1 has room for 1 expert of "),
    ("--expert_memory 1", 2, "the 2 of a token: --expert_memory 2 ("),
    ("--expert_memory 1", 2, "is the least that works"),
    ("--expert_memory 1 --dry_run", 2, "is the least that works"),
    ("--expert_memory 0.001MB", 2, "--expert_memory 0.001MB has room for 0 experts of "),
    ("--expert_memory 4 --expert_policy lru", 2, "--expert_policy takes one of auto, fetch"),
    *(
        (f"--expert_memory 4 --expert_prefetch {how}", 2, f"--expert_prefetch {how}: copies always")
        for how in ("off", "router")
    ),
    ("--expert_memory 4 --expert_prefetch on", 2, "--expert_prefetch takes one of auto, router"),
    ("--expert_memory 4 --tp 2", 2, "--expert_memory is for one process: leave out --tp"),
    ("--expert_memory 4 --checkpoint_path tiny", 2, "is no mixture of experts"),
    ("--expert_memory 4 --checkpoint_path tiny --dry_run", 2, "is no mixture of experts"),
    ("--expert_memory 4 --expert_placement nowhere.json", 2, "nowhere.json"),
    ("--expert_memory 4 --expert_placement other.json", 2, "other.json is of another model"),
    ("--expert_memory 4 --expert_placement alike.json", 2, "alike.json is of another model"),
    ("--expert_memory 4 --expert_placement prose.txt", 2, "prose.txt: it is no JSON"),
    (
        "--expert_memory 4 --expert_folder prose.txt",
        1,
        "--expert_folder prose.txt: Not a directory",
    ),
    ("--expert_memory 4 --decoder cpu-step --kernel reference", 1, "which has no C++ kernel"),
]


@pytest.mark.parametrize(("words", "code", "message"), BAD)
def test_bad_input_is_one_line_and_the_log_untouched(place, words, code, message):
    popularity().save("", "other.json")
    popularity(num_experts=8, digests=tuple("abcde")).save("", "alike.json")
    Path("prose.txt").write_text("Once upon a time\n")
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    result = CliRunner().invoke(generate, [*TIERED, *words.split()])
    assert message in only_error(result) and result.exit_code == code
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


def test_a_policy_without_a_second_tier_is_refused_wherever_it_is_given(place):
    for words in (["--dry_run"], ["--interactive"], []):
        result = CliRunner().invoke(generate, [*TIERED, "--expert_policy", "cache", *words])
        assert "there is no second tier of memory" in only_error(result) and result.exit_code == 2


def no_room(*arguments):
    raise OSError(28, "No space left on device")


def test_a_file_that_is_truncated_in_the_middle_of_a_run(place, monkeypatch):
    when_held(monkeypatch, lambda slow: os.truncate(slow.path, 4096))
    result = run("--expert_memory", "4")
    assert "--expert_folder slow: experts-" in only_error(result)
    assert "was truncated while the run used it; run again" in only_error(result)
    assert result.exit_code == 1 and Path("benchmarks.txt").read_text() == ""


@pytest.mark.parametrize("policy", POLICIES)
def test_a_file_that_is_removed_in_the_middle_of_a_run(policy, place, monkeypatch):
    """The system keeps it until the run ends, which then has its text and its line as usual."""
    expected = run("--expert_memory", "4", "--expert_policy", policy)
    when_held(monkeypatch, lambda slow: slow.path.unlink())
    result = run("--expert_memory", "4", "--expert_policy", policy)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split("\n\n")[0] == expected.stdout.split("\n\n")[0]
    assert len(Path("benchmarks.txt").read_text().splitlines()) == 2


def test_a_disk_that_fails_in_the_middle_of_a_run(place, monkeypatch):
    """A read that fails is one line, and nothing is logged."""
    folder = os.open(place, os.O_RDONLY)
    when_held(monkeypatch, lambda slow: os.dup2(folder, slow.direct or slow.buffered))
    result = run("--expert_memory", "4", "--expert_policy", "fetch")
    line = only_error(result)
    assert "--expert_folder slow: the experts' file cannot be read: Is a directory; give" in line
    assert result.exit_code == 1 and Path("benchmarks.txt").read_text() == ""


def test_a_disk_that_fills_up_in_the_middle_of_a_run(place, monkeypatch):
    write, writes = os.pwrite, []

    def third_fails(*arguments):
        writes.append(arguments)
        return write(*arguments) if len(writes) < 3 else no_room()

    monkeypatch.setattr(slow.os, "pwrite", third_fails)
    result = run("--expert_memory", "4")
    line = only_error(result)
    assert "cannot be written: No space left on device; the experts take" in line
    assert result.exit_code == 1 and Path("benchmarks.txt").read_text() == ""
