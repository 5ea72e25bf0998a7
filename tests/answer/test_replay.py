"""quantbench replay: the old log's lines, next to the new figures, and what is refused."""

import contextlib
import json
import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from quantbench.answer.replayed import Replayed, checkpoint, mapped
from quantbench.log.log import config_of
from quantbench.log.log import read as read_log
from quantbench.log.options import parse
from quantbench.typed_json import to_json
from tests.bench.facts import arm_facts
from tests.programs import OLD_LOG, command, git, worked
from tests.refusals import one_line

RECORDS = read_log(OLD_LOG).records


run = partial(command, "replay")


def test_every_line_of_the_old_log_can_be_built():
    small = ("--dummy", "--num_layers", "1", "--device", "cpu", "--dry_run")
    shown = worked("replay", OLD_LOG, "--all", *small).stdout.splitlines()
    assert len(shown) == len(RECORDS) == 29
    for line, (number, record) in zip(shown, RECORDS, strict=True):
        assert line.startswith(f"line {number}: {record.quant}, {record.mod}: model size then")
        assert record.quant.startswith("autoquant") or "(1 layer), kernel " in line


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """The log line of a short run on the embedded model."""
    folder = tmp_path_factory.mktemp("run")
    short = "--num_samples 2 --max_new_tokens 5 --device cpu --output_json_path old.jsonl"
    with contextlib.chdir(folder):
        worked("generate", *shlex.split(short))
    return (folder / "benchmarks.txt").read_text()


@pytest.fixture
def short_log(short_run, in_tmp):
    (in_tmp / "benchmarks.txt").write_text(short_run)
    return in_tmp / "benchmarks.txt"


def test_then_and_now(short_log):
    (_, record), before = read_log(short_log).records[0], short_log.read_text()
    result = worked("replay", "benchmarks.txt", "--all", "--write_result", "again.txt")
    assert short_log.read_text() == before and not Path("old.jsonl").exists()
    (_, again), *others = read_log("again.txt").records
    assert not others
    asked, repeated = config_of(record), config_of(again)
    assert repeated.max_new_tokens == 5 and repeated.num_samples == 2
    assert repeated.output_json_path is None and asked.output_json_path == "old.jsonl"
    for heading, name in (("tok/s", "tok_s"), ("peak memory", "peak_mem")):
        then, now, ratio = re.search(
            rf"{heading} +then +([\d.]+).* now +([\d.]+).*?([\d.]+) ×", result.stdout
        ).groups()
        assert (then, now) == (f"{getattr(record, name):.2f}", f"{getattr(again, name):.2f}")
        assert float(ratio) == pytest.approx(getattr(again, name) / getattr(record, name), rel=0.01)


@pytest.mark.parametrize("peak, code", [("0.01", 1), ("99.00", 0)])
def test_the_gate_without_a_reading_is_of_memory_alone(short_log, peak, code):
    """Against a line that claims to have been faster than anything is, and to have taken little
    memory, or much. Speeds of different days are not compared, and it says what would."""
    text = re.sub(r"tok/s= *[\d.]+", "tok/s=9999999.00", short_log.read_text())
    short_log.write_text(re.sub(r"peak_mem= *[\d.]+", f"peak_mem={peak}", text))
    result = run("benchmarks.txt", "--line", "1", "--tolerance", "5%")
    assert result.exit_code == code, result.stderr
    assert ("worse: line 1: None, tiny: peak" in result.stdout) == bool(code)
    assert "worse: line 1: None, tiny: tok/s" not in result.stdout
    assert "--against COMMIT runs the old commit beside the new" in result.stderr
    assert "1 of 1: line 1: None, tiny" in result.stderr


def test_lines_that_a_condition_chooses_are_counted_with_the_time_left(monkeypatch):
    chosen = [(number, record) for number, record in RECORDS if record.quant == "int8wo"]
    left = iter([record for _, record in chosen])
    monkeypatch.setattr(
        "quantbench.plans.replaying.measured", lambda *_: Replayed(next(left), [], None)
    )
    result = worked("replay", OLD_LOG, "--where", "quant=int8wo", "--dummy")
    names = [f"line {number}: int8wo, {record.mod}" for number, record in chosen]
    assert len(names) == 2
    first, second = [line for line in result.stderr.splitlines() if " of 2: " in line]
    assert first == f"1 of 2: {names[0]}"
    assert second.startswith(f"2 of 2: {names[1]}; about ") and second.endswith(" left")


# ------------------------------------------------------------------------- against an old commit

WORKER = """
import json, random, sys
from quantbench import speed          # the commit's own, whatever the current folder has

ready = json.loads(READY)
draw = random.Random()
for line in sys.stdin:
    request = json.loads(line)
    seconds = speed.SECONDS * draw.lognormvariate(0, 0.002)
    tokens = request.get("tokens", 1)
    sample = {
        "prefill_seconds": seconds, "decode_seconds": 199 * seconds, "tok_s": 1 / seconds,
        "prefill_tok_s": 1 / seconds, "decode_tok_s": 1 / seconds,
        "token_seconds": [seconds] * 199, "peak_memory_bytes": {"resident": 3},
    }
    did = {
        "load": {}, "get_ready": ready, "sample": sample,
        "turn": {"tokens": tokens, "seconds": tokens * seconds} if speed.TURNS else None,
        "bandwidth": {"bytes_per_s": 1e9, "round": None, "probe": "fake", "caveat": None},
    }.get(request["do"])
    answer = {"did": did} if did is not None else {"failed": "no such thing", "kind": "other"}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository of six commits: empty, broken, unbuilt (its C++ does not compile, and it runs
    all the same), old (a token takes 1 s), turning (the first whose worker lies where the present
    one does and takes turns) and slow (1.2 s)."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "--quiet")
    git(folder, "commit", "--allow-empty", "-m", "empty")
    git(folder, "tag", "empty")
    package = folder / "quantbench"
    rooms = [package / room for room in ("compare/sampling", "bench", "run", "ops/cpu")]
    for room in rooms:
        room.mkdir(parents=True)
    for inside in {package, *rooms, *(room.parent for room in rooms)}:
        (inside / "__init__.py").touch()
    sampling, bench, run, built = rooms
    ready = f"READY = {json.dumps(to_json(arm_facts()))!r}\n"
    (folder / "log.txt").write_text(RECORDS[0][1].render() + "\n")
    for tag, seconds, worker in (
        ("broken", 1.0, "raise SystemExit('no kernels: g++ says no')"),
        ("unbuilt", 40.0, ready + WORKER),
        ("old", 1.0, ready + WORKER),
        ("turning", 1.0, ready + WORKER),
        ("slow", 1.2, ready + WORKER),
    ):
        reason = "step.cpp:7: error: g++ says no" if tag == "unbuilt" else None
        (built / "build.py").write_text(f"def refusal():\n    return {reason!r}\n")
        turns = tag in ("turning", "slow")
        (sampling / "worker.py").unlink(missing_ok=True)
        ((bench if turns else sampling) / "worker.py").write_text(worker)
        if turns:
            (run / "turns.py").touch()
        (package / "speed.py").write_text(f"SECONDS, TURNS = {seconds}, {turns}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-m", tag)
        git(folder, "tag", tag)
    return folder


@pytest.fixture
def inside(repository, monkeypatch):
    """The current folder is the repository, whose newest files are those of `slow`."""
    monkeypatch.setattr("quantbench.bench.process.ROOT", repository)
    monkeypatch.chdir(repository)
    yield repository
    assert len(git(repository, "worktree", "list").splitlines()) == 1  # nothing is left behind


@pytest.mark.parametrize(
    "commit, tolerance, code",
    [("old", "5%", 1), ("turning", "5%", 1), ("old", "25%", 0), ("slow", "5%", 0)],
)
def test_a_slowdown_is_shown_beside_the_old_commit(inside, commit, tolerance, code):
    result = run("log.txt", "--all", "--dummy", "--against", commit, "--tolerance", tolerance)
    assert result.exit_code == code, (result.stdout, result.stderr)
    name = git(inside, "rev-parse", "--short", commit)
    words = rf"speed now ÷ commit {name}: ([\d.]+) × \(95% interval ([\d.]+) to ([\d.]+)\)"
    ratio, low, high = re.search(words, result.stdout).groups()
    right = 1.0 if commit == "slow" else 1 / 1.2
    assert float(low) <= float(ratio) <= float(high)
    assert float(ratio) == pytest.approx(right, rel=0.02)
    assert ("worse: line 1: " in result.stdout) == bool(code)


@pytest.mark.parametrize(
    "commit, reason",
    [
        ("nowhere", "--against 'nowhere': there is no such commit"),
        ("empty", "--against empty: that commit has no quantbench.bench.worker"),
    ],
)
def test_a_commit_that_cannot_be_taken_is_one_line(inside, commit, reason):
    assert reason in one_line(run("log.txt", "--all", "--dummy", "--against", commit))


UNBUILT = "that commit's C++ kernels do not build here, as the present ones do: "


@pytest.mark.parametrize(
    "commit, reason",
    [
        ("broken", "that commit does not run it: "),
        ("unbuilt", f"{UNBUILT}step.cpp:7: error: "),
    ],
)
def test_a_commit_that_does_not_run_or_build_is_not_measured(inside, commit, reason):
    """Without its kernels it would run on torch's, and anything would be faster than that."""
    result = run("log.txt", "--all", "--dummy", "--device", "cpu", "--against", commit)
    assert result.exit_code == 1 and "speed now" not in result.stdout
    name = git(inside, "rev-parse", "--short", commit)
    (failed,) = [line for line in result.stderr.splitlines() if line.startswith("failed: ")]
    assert f"--against {name}: " in failed and reason in failed
    assert failed.endswith("g++ says no")


def test_where_nothing_builds_both_are_measured_without_kernels(inside, monkeypatch):
    monkeypatch.setattr("quantbench.bench.old_commit._refusal", lambda *_: "no compiler")
    result = run("log.txt", "--all", "--dummy", "--device", "cpu", "--against", "old")
    assert result.exit_code == 0 and "speed now" in result.stdout


def test_outside_of_a_repository(tmp_path, monkeypatch):
    monkeypatch.setattr("quantbench.bench.process.ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    result = run(OLD_LOG, "--all", "--dummy", "--against", "HEAD")
    assert "is no git repository" in one_line(result)


def test_an_installed_copy_looks_for_no_commits_in_somebody_s_repository(inside, monkeypatch):
    monkeypatch.setattr("quantbench.bench.process.INSTALLED", True)
    result = run("log.txt", "--all", "--dummy", "--against", "HEAD")
    assert "this is an installed copy; run it in a checkout" in one_line(result)


# ------------------------------------------------------------------------- against earlier days


@pytest.fixture
def days(tmp_path, monkeypatch):
    """A function that replays a line whose processes take these seconds at a reading of 1e9."""
    record = RECORDS[0][1]

    def replayed(*seconds, caveat=None, tolerance="5%"):
        values = [one * 1e9 for one in seconds]
        monkeypatch.setattr(
            "quantbench.plans.replaying.measured",
            lambda config, processes, read: Replayed(record, values, caveat),
        )
        line = ("--line", str(RECORDS[0][0]), "--dummy", "--tolerance", tolerance)
        return run(OLD_LOG, *line, "--history", tmp_path / "days.jsonl")

    return replayed


def test_days_are_compared_through_the_limit_of_each(days, tmp_path):
    first = days(1.00, 1.01, 0.99, 1.00)
    assert first.exit_code == 0 and "today's is the first" in first.stdout
    same = days(1.01, 1.00, 1.02, 1.00)
    assert same.exit_code == 0 and "now ÷ the last day: 0.99" in same.stdout
    slow = days(1.21, 1.20, 1.19, 1.20)
    assert slow.exit_code == 1 and "worse: line 3" in slow.stdout
    assert "speed ÷ memory's speed, now ÷ the last day 0.8" in slow.stdout.splitlines()[-1]
    few = days(9.0)  # one process says nothing of its scatter
    assert few.exit_code == 0 and "(no interval: at least 4" in few.stdout
    assert len((tmp_path / "days.jsonl").read_text().splitlines()) == 4


def test_a_reading_that_is_not_the_memorys_is_not_compared(days, tmp_path):
    result = days(1.0, 1.0, 1.0, 1.0, caveat="it is slow")
    assert result.exit_code == 0 and not (tmp_path / "days.jsonl").exists()
    assert "no limit to compare with earlier days: it is slow" in result.stdout


OTHER_PROGRAM = RECORDS[0][1].render().replace("python generate.py", "python rm.py; true")
UNKNOWN = RECORDS[0][1].render() + " --frobnicate 3"
CUT = "20240831225155, tok/s=107.38, mem/s=what"


def test_lines_that_are_refused(tmp_path):
    good = RECORDS[1][1].render()
    (tmp_path / "log.txt").write_text("\n".join(["title", OTHER_PROGRAM, good, UNKNOWN, CUT, ""]))
    small = ("--dummy", "--num_layers", "1", "--device", "cpu", "--dry_run")
    result = run(tmp_path / "log.txt", "--all", *small)
    assert result.exit_code == 1
    refused = result.stderr.splitlines()
    assert [line.split(":")[1].strip() for line in refused] == ["line 5", "line 2", "line 4"]
    assert "does not begin with python generate.py" in refused[1]
    assert "no such option: '--frobnicate'" in refused[2]
    assert len(result.stdout.splitlines()) == 1 and "line 3: " in result.stdout


def test_a_checkpoint_that_is_missing(tmp_path):
    path = "../../../checkpoints/meta-llama/Llama-2-7b-chat-hf/model.pth"
    name = "Llama-2-7b-chat-hf"
    assert checkpoint(path, name, None, False) == path
    assert checkpoint(path, name, None, True) == f"dummy:{name}"
    assert checkpoint("tiny", "tiny", None, True) == "tiny"
    for folder in ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7b-chat-hf"):
        root = tmp_path / folder.replace("/", "-")
        place = root / folder / "model.pth"
        place.parent.mkdir(parents=True)
        place.touch()
        assert checkpoint(path, name, str(root), False) == str(place)
        assert checkpoint(path, name, str(root), True) == str(place)
    (tmp_path / "model.pth").touch()  # whose it is nobody can tell
    assert checkpoint(path, name, str(tmp_path), True) == f"dummy:{name}"
    with pytest.raises(Exception, match="does not hold .*model.pth"):
        checkpoint(path, name, str(tmp_path), False)


def test_options_given_take_the_place_of_the_lines():
    record = dict(RECORDS)[RECORDS[0][0]]
    config = mapped(record, {"num_layers": "2", "compile": True}, None, True)
    said = config_of(record)
    assert config.num_layers == 2 and config.temperature == said.temperature
    assert config == parse(
        ["--checkpoint_path", f"dummy:{record.mod}", "--device", said.device, "--compile",
         "--precision", said.precision, "--num_samples", str(said.num_samples), "--num_layers", "2",
         "--max_new_tokens", str(said.max_new_tokens), "--top_k", str(said.top_k),
         "--temperature", str(said.temperature)]
    )  # fmt: skip
