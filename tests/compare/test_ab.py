"""quantbench ab on the embedded model, as a person starts it: processes, kills, files."""

import csv
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantbench.bench import store as stores
from quantbench.bench.answers import Runnable
from quantbench.bench.arm import make_arms, of_one_model
from quantbench.bench.process import Process
from quantbench.bench.worker import NeverFits, Worker
from quantbench.compare.commands import ab as command
from quantbench.errors import MemoryShortage, UsageError
from quantbench.log.config import RunConfig
from quantbench.log.log import config_of
from quantbench.log.log import read as read_log
from quantbench.log.options import parse
from quantbench.models.formats import EMBEDDED
from quantbench.quality.same_model import same_model
from quantbench.quality.types import SameModel
from quantbench.report.interval import Interval
from tests import fake_counter, programs
from tests.bench.world import Behaviour, World
from tests.models.test_gguf import tokenizer_of_tiny, written
from tests.programs import ROOT, alive, children, started, wait_for
from tests.refusals import one_line

SHORT = ("--max_new_tokens", "4", "--tokens", "64", "--processes", "1", "--max_minutes", "10")
SHORT += ("--half_width", "90%")  # ends as soon as there are intervals
ENDLESS = ("--half_width", "0.01%", "--processes", "1", "--max_minutes", "1000")
QUICK = ("--max_new_tokens", "4", "--tokens", "0")
SEARCH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {**os.environ, "PYTHONPATH": SEARCH, "OMP_NUM_THREADS": "1"}


STARTED = []


@pytest.fixture(autouse=True)
def ended():
    """What a test that fails leaves running would measure for hours."""
    yield
    while STARTED:
        STARTED.pop().kill()  # its workers end with their input


def start(folder, *arguments):
    process = started("-m", "quantbench", "ab", *arguments, cwd=folder, env=ENVIRONMENT)
    STARTED.append(process)
    return process


run = partial(programs.command, "ab")  # in this process: for tests whose workers are fakes


def finish(process):
    stdout, stderr = process.communicate(timeout=300)
    assert "Traceback" not in stderr
    return process.returncode, stdout, stderr


# ------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Three arms that run; one that no plan takes, one that never fits; and what came of them."""
    folder = tmp_path_factory.mktemp("ab")
    arms = ["", "--quantization uintx-2-64", "--cache_size 2", "--kv_cache int4"]
    arms = [word for arm in (*arms, "--cache_size 2000000000") for word in ("--arm", arm)]
    code, stdout, stderr = finish(start(folder, *arms, *SHORT, "--output", "out"))
    results = json.loads((folder / "out" / "results.json").read_text())
    why = results["rows"][2]["failed"]
    assert code == 1 and stderr.splitlines()[-1] == (
        "error: 2 of 5 arms failed ('none, cache_size=2', 'none, cache_size=2000000000'); "
        f"'none, cache_size=2': {why}; the others were compared: change or leave out what failed; "
        "`quantbench generate` runs it alone"
    )
    return folder, stdout, results


def test_every_arm_has_its_row(done):
    folder, stdout, results = done
    names = ["none", "uintx-2-64", "none, cache_size=2", "none, kv_cache=int4"]
    assert [row["arm"] for row in results["rows"]] == [*names, "none, cache_size=2000000000"]
    assert [bool(row["failed"]) for row in results["rows"]] == [False, False, True, False, True]
    assert "--cache_size 2 is too small" in results["rows"][2]["failed"]
    assert "need 10240" in results["rows"][4]["failed"]
    for name in names:
        assert re.search(rf"^{re.escape(name)} ", stdout, re.M)
    assert "KL divergence: not noticeable up to 0.01" in (folder / "out" / "report.md").read_text()
    below = stdout[stdout.index("\n\n") :].strip().splitlines()
    assert below[0].startswith("Use ") and len(below) <= 12
    assert all(len(line) <= 100 for line in below if not line.startswith("    "))
    assert {line.partition(":")[0] for line in below} >= {"Noise", "Limits"}


def whole_runs(turns, new_tokens):
    """Seconds of each prompt and of the steps of its cycle and those until the next one."""
    runs = []
    for turn in sorted(turns, key=lambda turn: (turn.cycle, turn.kind == "decode")):
        if turn.kind == "prompt":
            runs.append((turn.seconds, []))
        elif runs:
            runs[-1][1].append(turn)
    return [
        prompt + (new_tokens - 1) * sum(t.seconds for t in steps) / sum(t.tokens for t in steps)
        for prompt, steps in runs
        if steps
    ]


def test_figures_are_those_of_turns_and_samples(done):
    """Recomputed from the events in the folder, by other means."""
    folder, _, results = done
    kept = stores.load(folder / "out")
    for arm, row in zip(kept.arms, results["rows"], strict=True):
        if row["failed"]:
            continue
        runs = whole_runs(arm.turns, new_tokens=4)
        assert row["tok_s"] == pytest.approx(4 / statistics.fmean(runs))
        prompts = [t.seconds for t in arm.turns if t.kind == "prompt"]
        assert row["time_to_first_token_s"] == pytest.approx(statistics.fmean(prompts))
        steps = [t for s in arm.samples for t in s.token_seconds]
        assert row["token_p50_s"] == pytest.approx(statistics.median(steps))
        for name, kind in (("decode_tok_s", "decode"), ("prefill_tok_s", "prompt")):
            turns = [t for t in arm.turns if t.kind == kind]
            tokens, seconds = sum(t.tokens for t in turns), sum(t.seconds for t in turns)
            assert row[name] == pytest.approx(tokens / seconds)
        rate = row["tok_s"] * arm.run.step_weight_bytes
        assert row["weight_bytes_per_s"] == pytest.approx(rate)
        rates = {r["cycle"]: r["bytes_per_s"] for r in results["bandwidth"]["cpu"]}
        logs = [
            math.log(arm.run.mean_step_bytes / rates[t.cycle] / (t.seconds / t.tokens))
            for t in arm.turns
            if t.kind == "decode" and t.cycle in rates
        ]
        assert row["limit_share"][0] == pytest.approx(math.exp(statistics.fmean(logs)), rel=1e-6)
    base = {t.cycle: t.seconds / t.tokens for t in kept.arms[0].turns if t.kind == "decode"}
    arm = [t for t in kept.arms[1].turns if t.kind == "decode"]
    logs = [math.log(base[t.cycle] / (t.seconds / t.tokens)) for t in arm]
    ratio = results["rows"][1]["decode_speed_up"][0]
    # with one process an arm, the mean log ratio of the cycles that both have
    assert ratio == pytest.approx(math.exp(statistics.fmean(logs)), rel=1e-6)


def test_quality_stands_in_the_same_row(done):
    _, _, results = done
    full, two_bits, _, int4_cache, _ = results["rows"]
    assert full["tokens"] and full["kl"] is None
    assert two_bits["perplexity"] > int4_cache["perplexity"] > 1
    assert two_bits["kl"] > 10 * int4_cache["kl"] > 0
    assert two_bits["top1"] < int4_cache["top1"] <= 1


def test_it_ends_with_an_answer(done):
    """On the terminal, in report.md and in results.json, with commands that can be pasted."""
    folder, stdout, results = done
    choices = results["answer"]["choices"]
    assert choices and not {choice["arm"] for choice in choices} & {"uintx-2-64"}
    report = (folder / "out" / "report.md").read_text()
    for choice in choices:
        for words in (choice["line"], choice["run"]):
            assert words in " ".join(stdout.split()) and words in report
    (excluded,) = [line for line in results["answer"]["remarks"] if line.startswith("Excluded")]
    assert "KL above 0.03: uintx-2-64" in excluded
    assert "failed: none, cache_size=2; none, cache_size=" in excluded


def shown(results):
    """How every figure of a row has to look in the report."""
    for row in results["rows"]:
        if row["failed"]:
            continue
        yield f"{row['tok_s']:.2f}"
        for name in ("speed_up", "decode_speed_up", "prompt_speed_up"):
            if ratio := row.get(name):
                yield Interval(*ratio).written(".2f")
        yield f"{row['decode_tok_s']:.2f}"
        yield f"{row['prefill_tok_s']:.1f}"
        yield f"{1000 * row['time_to_first_token_s']:.2f} ms"
        yield f"{1000 * row['token_p50_s']:.3f}, {1000 * row['token_p99_s']:.3f} ms"
        yield f"{row['weight_bytes'] / 1e6:.2f} MB"
        yield f"{row['peak_memory_bytes']['generate']['resident'] / 1e6:.2f} MB"
        yield f"{row['weight_bytes_per_s'] / 1e9:.2f} GB/s"
        yield Interval(*row["limit_share"]).written(".0%")
        if ratio := row.get("perplexity_ratio"):
            yield Interval(*ratio).written(".4f")
        yield f"{row['tokens']}"
        if row["kl"] is not None:
            error = row["kl_standard_error"]
            yield f"{row['kl']:.4f}" + ("" if error is None else f" ± {error:.4f}")
            yield f"{100 * row['top1']:.1f}%"


def test_every_number_of_the_report_is_in_the_results(done):
    folder, _, results = done
    table = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in (folder / "out" / "report.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    in_report = {
        cell
        for line in table
        for cell in line
        if re.search(r"\d[\d.]*( ms| MB| GB/s|%|\)|$)", cell) and not re.match("[a-z]", cell)
    }
    assert in_report == set(shown(results))


def test_the_csv_and_the_pictures(done):
    folder, _, results = done
    lines = list(csv.DictReader((folder / "out" / "results.csv").read_text().splitlines()))
    for line, row in zip(lines, results["rows"], strict=True):
        assert line["arm"] == row["arm"]
        assert not row.get("tok_s") or float(line["tok_s"]) == row["tok_s"]
        if "speed_up" in row:
            assert float(line["speed_up.high"]) == row["speed_up"][-1]
    picture = ElementTree.parse(folder / "out" / "pareto.svg")
    assert picture.getroot().tag.endswith("svg")


def test_every_arm_that_ran_has_its_line_in_the_log(done):
    folder, _, results = done
    reading = read_log(folder / "benchmarks.txt")
    assert not reading.bad
    ran = [row for row in results["rows"] if not row["failed"]]
    for (_, record), row in zip(reading.records, ran, strict=True):
        assert record.quant == ("None" if row["scheme"] == "none" else row["scheme"])
        assert f"{record.tok_s:.2f}" == f"{row['tok_s']:.2f}"
        config = config_of(record)
        assert config.quantization == row["scheme"] and config.num_samples == row["samples"]
    assert reading.records[2][1].kv_quant


def test_a_finished_comparison_is_not_repeated(done, monkeypatch):
    folder, _, results = done
    monkeypatch.chdir(folder)
    before = (folder / "benchmarks.txt").read_text()
    result = run("--resume", "out")
    assert result.exit_code == 1 and "loading" not in result.stderr
    assert "2 of 5 arms failed" in result.stderr
    again = json.loads((folder / "out" / "results.json").read_text())
    assert again["rows"] == results["rows"]
    assert (folder / "benchmarks.txt").read_text() == before


# ------------------------------------------------------------------------- kills


def processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spent_in_a_second(pid):
    before = processor_seconds(pid)
    time.sleep(1)
    return processor_seconds(pid) - before


def turns_in(folder, arm=0):
    """How many turns the arm has so far."""
    path = folder / stores.SAMPLES
    return path.read_text().count(f'{{"turn": {{"arm": {arm},') if path.exists() else 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_and_a_killed_coordinator(tmp_path):
    """A worker is killed and the others go on; all is killed, and gone on with."""
    arms = ["--arm", "", "--arm", "--quantization int8wo", "--arm", "--quantization fp6"]
    process = start(tmp_path, *arms, *QUICK, *ENDLESS, "--output", "out", "--write_result", "none")
    out = tmp_path / "out"
    wait_for(lambda: turns_in(out, 2) > 2)
    (template,) = children(process.pid)
    keepers = children(template)
    workers = [worker for keeper in keepers for worker in children(keeper)]
    # The three arms', and the one that reads the memory.
    assert len(workers) == 4
    os.kill(workers[1], signal.SIGKILL)
    wait_for(lambda: '"failed": true' in (out / stores.SAMPLES).read_text())
    before = turns_in(out)
    wait_for(lambda: turns_in(out) > before)
    process.kill()
    process.communicate()
    left = [template, *keepers, *workers]
    wait_for(lambda: not any(map(alive, left)))  # nobody is left behind
    kept = stores.load(out)
    assert kept.ended is None and "killed (SIGKILL)" in kept.arms[1].failed
    process = start(tmp_path, "--resume", "out", "--processes", "2")
    before = turns_in(out, 2)
    wait_for(lambda: turns_in(out, 2) > before)
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(process)
    assert code == 1 and "error: 'int8wo' failed: " in stderr
    assert "int8wo: loading" not in stderr and "with a second process" in stderr
    again = stores.load(out)
    assert again.ended == "interrupted"
    for arm, old in zip(again.arms, kept.arms, strict=True):
        assert arm.turns[: len(old.turns)] == old.turns  # nothing is lost
    assert not (tmp_path / "benchmarks.txt").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_and_sigterm_end_with_the_results_so_far(tmp_path):
    number = random.choice([signal.SIGINT, signal.SIGTERM])
    arms = ["--arm", "", "--arm", "--quantization int8wo"]
    process = start(tmp_path, *arms, *QUICK, *ENDLESS, "--output", "out")
    wait_for(lambda: turns_in(tmp_path / "out", 1) > 2)
    process.send_signal(number)
    code, stdout, stderr = finish(process)
    assert code == (143 if number == signal.SIGTERM else 0) and "it was interrupted" in stdout
    ended = "ended by SIGTERM" if number == signal.SIGTERM else "interrupted"
    assert re.search(
        rf"^{ended}; \d+ turns are kept in out; quantbench ab --resume out goes on$", stderr, re.M
    )
    assert (tmp_path / "out" / "report.md").exists() and re.search("^int8wo ", stdout, re.M)
    assert len(read_log(tmp_path / "benchmarks.txt").records) == 2
    assert "No recommendation: quality was not measured" in stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_waits_burns_nothing():
    worker = Process()
    try:
        worker.ask("load", argv=["--max_new_tokens", "8"])
        worker.ask("get_ready")
        worker.ask("sample", index=0)
        # One that spins does so in every second; one that ends its last work late, in the first.
        assert any(spent_in_a_second(worker.pid) <= 0.02 for _ in range(5))  # steps of 0.01
    finally:
        worker.close()
    assert not alive(worker.pid)


# ------------------------------------------------------------------------- what cannot be compared

NONE, INT8 = ("--arm", "--quantization none"), ("--arm", "--quantization int8wo")


def test_a_text_shorter_than_a_window(tmp_path):
    (tmp_path / "short.txt").write_text("def f(x):\n    return x\n")
    (tmp_path / "benchmarks.txt").write_text("the log\n")
    process = start(tmp_path, *NONE, *INT8, "--text", "short.txt", "--output", "out")
    code, stdout, stderr = finish(process)
    assert code == 2 and stdout == "" and "quality takes 16 tokens or more" in stderr
    assert [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert (tmp_path / "benchmarks.txt").read_text() == "the log\n"


def test_arms_of_other_models_are_compared_when_asked(monkeypatch):
    begun = []
    monkeypatch.setattr(command, "compare", lambda *given, **_: begun.append(given) or 0)
    run(*NONE, "--arm", "--num_layers 2", "--allow_different")
    assert [arm.name for arm in begun[0][0].arms] == ["none", "none, num_layers=2"]


@pytest.fixture(scope="module")
def files_of_tiny(tmp_path_factory):
    """Q8_0.gguf and Q4_0.gguf of tiny, and another.gguf, whose tokenizer is another."""
    folder = tmp_path_factory.mktemp("files")
    made = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    tokenizer = tokenizer_of_tiny()
    for kind in ("Q8_0", "Q4_0"):
        written(folder / f"{kind}.gguf", made, "llama", kind, tokenizer.items())
    key = "tokenizer.ggml.scores"
    changed = {**tokenizer, key: [-score for score in tokenizer[key]]}
    written(folder / "another.gguf", made, "llama", "Q8_0", changed.items())
    return folder


def test_files_of_one_model(files_of_tiny, tmp_path, monkeypatch):
    """Quality is relative to the weights of the best file as floats, as none is in full precision;
    what is kept goes on without measuring again."""
    arms = ["--arm", f"--checkpoint_path {files_of_tiny}/Q4_0.gguf"]
    arms += ["--arm", f"--checkpoint_path {files_of_tiny}/Q8_0.gguf", "--same_model"]
    code, stdout, _ = finish(start(tmp_path, *arms, *SHORT, "--output", "out"))
    assert code == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    four, eight = results["rows"]
    assert [four["arm"], eight["arm"]] == ["Q4_0, gguf-Q4_0", "Q8_0, gguf-Q8_0"]
    assert four["kl"] > 0.01 > 10 * eight["kl"] and four["verdict"] == "baseline"
    sentence = (
        f"quality is relative to {files_of_tiny}/Q8_0.gguf, whose weights are quantized themselves "
        "(gguf-Q8_0)"
    )
    assert sentence in " ".join(stdout.split())
    assert sentence in (tmp_path / "out" / "report.md").read_text()
    records = read_log(tmp_path / "benchmarks.txt").records
    logged = [config_of(record).checkpoint_path for _, record in records]
    assert logged == [f"{files_of_tiny}/{kind}.gguf" for kind in ("Q4_0", "Q8_0")]
    monkeypatch.chdir(tmp_path)
    again = run("--resume", "out")
    assert again.exit_code == 0 and "loading" not in again.stderr
    assert sentence in " ".join(again.stdout.split())


def test_the_reference_is_the_first_file_in_full_precision(files_of_tiny):
    paths = [f"{files_of_tiny}/Q4_0.gguf", "tiny", f"{files_of_tiny}/Q8_0.gguf"]
    found = same_model(paths)
    assert found == SameModel(["gguf-Q4_0", None, "gguf-Q8_0"], 1, True)
    assert same_model(paths[::2]) == SameModel(["gguf-Q4_0", "gguf-Q8_0"], 1, True)
    with pytest.raises(UsageError, match="another model.*tokenizer's encoding of "):
        same_model([paths[0], f"{files_of_tiny}/another.gguf"])
    texts = [f"--checkpoint_path {path} --kv_cache int8" for path in paths]
    texts += ["--checkpoint_path tiny --quantization fp6"]
    arms = make_arms(RunConfig(), texts, ("checkpoint_path",))
    worker = SimpleNamespace(answer=lambda *_, **__: found)
    named, reference = of_one_model(RunConfig(), arms, worker)
    assert [arm.name for arm in named] == [
        "Q4_0, gguf-Q4_0, kv_cache=int8", "tiny, none, kv_cache=int8",
        "Q8_0, gguf-Q8_0, kv_cache=int8", "tiny, fp6",
    ]  # fmt: skip
    assert [arm.config for arm in named] == [arm.config for arm in arms]
    config = parse(reference.argv)
    assert (config.checkpoint_path, config.quantization) == ("tiny", "none")
    assert config.kv_cache == "dense"


def all_arms(monkeypatch, *refused):
    """--arms all beside --arm int8wo, where a worker knows four schemes, and of some no plan can
    be made: how it ends, and the names of the arms."""
    begun, closed = [], []

    def answer(kind, do, argv=None, argvs=()):
        if do == "schemes":
            assert "--device" in argv
            return ["none", "int8wo", "uintx-4-64", "fp6"]
        bad = {name: Runnable(f"{name} takes no such shape", "refused") for name in refused}
        return [bad.get(parse(argv).quantization, Runnable()) for argv in argvs]

    worker = SimpleNamespace(answer=answer, close=lambda: closed.append(True))
    monkeypatch.setattr(command, "Process", lambda: worker)
    monkeypatch.setattr(command, "compare", lambda *given, **_: begun.append(given) or 0)
    result = run("--arms", "all", *INT8)
    assert closed
    return result, [arm.name for results, *_ in begun for arm in results.arms]


def test_every_scheme_that_runs_here_is_an_arm(monkeypatch):
    """After the arms that are given, each once; not a scheme that the model cannot take."""
    assert all_arms(monkeypatch)[1] == ["int8wo", "none", "uintx-4-64", "fp6"]
    result, names = all_arms(monkeypatch, "fp6")
    assert names == ["int8wo", "none", "uintx-4-64"]
    assert "Not measured: fp6 takes no such shape" in result.stderr
    result, _ = all_arms(monkeypatch, "none", "fp6", "uintx-4-64")
    assert one_line(result) == "none takes no such shape"


def test_the_worker_knows_what_runs_here():
    schemes = Worker().schemes(["--device", "cpu"])
    assert {"none", "int8wo", "fp6", "uintx-2-64", "autoquant"} <= set(schemes)
    only = Worker().schemes(["--device", "cpu", "--kernel", "reference"])
    assert "fp6" in only and "none" not in only  # what is not quantized has no such kernel


def test_the_energy_of_an_arm_is_counted_before_its_samples(monkeypatch):
    """Samples that are timed are not repeated for it."""
    looks = fake_counter.install(monkeypatch)
    worker = Worker()
    worker.load(["--device", "cpu", "--max_new_tokens", "4", "--checkpoint_path", "tiny"])
    (counted,) = worker.get_ready().energy
    assert counted.repeats == 1 and counted.joules == 3.0 and len(looks) == 3
    worker.sample(0)
    assert len(looks) == 3


def test_an_arm_too_large_for_the_machine_is_told_from_one_without_room(monkeypatch):
    """The arm waits for room that its neighbours hold, and fails if that would not do."""
    monkeypatch.setattr("quantbench.devices.free_memory", lambda device: 300_000_000)
    arguments = ["--device", "cpu", "--cache_size", "100000"]  # 512 MB of bfloat16 keys and values
    with pytest.raises(MemoryShortage):
        Worker().load(arguments, headroom=100_000_000, others=400_000_000)
    with pytest.raises(NeverFits, match="400.00 MB free"):
        Worker().load(arguments, headroom=100_000_000, others=100_000_000)


@pytest.mark.parametrize("form", ["md", "csv", "json", None])
def test_another_format_takes_the_place_of_the_tables(monkeypatch, form):
    world = World.of(Behaviour(between=0.002), Behaviour(0.05, between=0.002, joules=6.0))
    world.install(monkeypatch)
    words = (*QUICK, "--write_result", "none", "--device", "cpu")
    result = run(*NONE, *INT8, *words, *(["-o", form] if form else []))
    assert result.exit_code == 0
    out = result.stdout
    if form == "json":
        value = json.loads(out)
        assert value["rows"][1]["speed_up"][0] == pytest.approx(2, rel=0.05)
        assert value["rows"][1]["verdict"] == "faster" and value["ended"] == "answered"
        assert (value["rows"][1]["joules_per_token"], value["rows"][1]["idle_watts"]) == (1.5, 10)
        counted = value["arms"][1]["facts"]["energy"]
        assert len(counted) == world.asked("get_ready").count(1) > 1
    elif form == "csv":
        line = list(csv.DictReader(out.splitlines()))[1]
        assert float(line["speed_up"]) == pytest.approx(2, rel=0.05)
        assert float(line["speed_up.low"]) < 2 < float(line["speed_up.high"])
    elif form == "md":
        assert out.startswith("# fake on fake") and "| int8wo | " in out
    else:
        assert re.search(r"^int8wo +\S+ +[12]\.\d\d \([\d.]+–[\d.]+\) .* faster$", out, re.M)


@pytest.mark.parametrize(
    "bad, said",
    [
        ((1,), "'int8wo' failed: no such thing; the others were compared: "),
        ((1, 2), "2 of 3 arms failed ('int8wo', 'fp6'); 'int8wo': no such thing; nothing was com"),
        ((0,), "the baseline, 'none' failed: no such thing; nothing was compared: "),
    ],
)
def test_an_arm_that_fails_is_the_exit_code_and_the_last_line(monkeypatch, bad, said):
    """What was measured is printed before."""
    world = World.of(*(Behaviour(fails_to_load=number in bad) for number in range(3)))
    world.install(monkeypatch)
    arms = (*NONE, *INT8, "--arm", "--quantization fp6")
    result = run(*arms, *QUICK, "--write_result", "none")
    assert result.exit_code == 1
    assert all(re.search(rf"^{name} ", result.stdout, re.M) for name in ("none", "int8wo", "fp6"))
    assert result.stderr.splitlines()[-1].startswith(f"error: {said}")


@pytest.mark.gpu
def test_on_cuda(tmp_path):
    """Turns wait for the device; decoding steps are timed by events."""
    arms = ["--arm", "", "--arm", "--kv_cache int8"]
    short = ["--max_new_tokens", "20", "--processes", "1", "--max_minutes", "3", "--compile"]
    code, stdout, stderr = finish(start(tmp_path, *arms, *short, "--output", "out"))
    assert code == 0, stderr
    results = stores.load(tmp_path / "out")
    assert list(results.bandwidth) == ["cuda"]
    assert results.bandwidth["cuda"][0].bytes_per_s > 1e11
    for arm in results.arms:
        for sample in arm.samples:
            assert sum(sample.token_seconds) == pytest.approx(sample.decode_seconds, rel=0.1)
            step = statistics.median(sample.token_seconds)
            turns = [t.seconds / t.tokens for t in arm.turns if t.kind == "decode"]
            assert statistics.median(turns) == pytest.approx(step, rel=0.5)
        assert set(arm.samples[0].peak_memory_bytes) == {"reserved", "allocated"}
