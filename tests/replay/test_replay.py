"""quantbench replay: the old log's lines, next to the new figures, and what is refused."""

import contextlib
import dataclasses
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest

from quantbench.log.log import config_of
from quantbench.log.log import read as read_log
from quantbench.log.options import parse
from quantbench.replay.answer import checkpoint, mapped
from tests.programs import OLD_LOG, command, worked

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
    assert "quantbench ab compares speeds" in result.stderr
    assert "1 of 1: line 1: None, tiny" in result.stderr


def test_lines_that_a_condition_chooses_are_counted_with_the_time_left(monkeypatch):
    chosen = [(number, record) for number, record in RECORDS if record.quant == "int8wo"]
    left = iter([record for _, record in chosen])
    monkeypatch.setattr("quantbench.replay.plan.measured", lambda *_: next(left))
    result = worked("replay", OLD_LOG, "--where", "quant=int8wo", "--dummy")
    names = [f"line {number}: int8wo, {record.mod}" for number, record in chosen]
    assert len(names) == 2
    first, second = [line for line in result.stderr.splitlines() if " of 2: " in line]
    assert first == f"1 of 2: {names[0]}"
    assert second.startswith(f"2 of 2: {names[1]}; about ") and second.endswith(" left")


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
    assert "does not start with python generate.py" in refused[1]
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
    (tmp_path / "model.pth").touch()  # of which model is not known
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


def test_a_log_of_others_chooses_no_place_to_write_to(in_tmp):
    """Every option whose value is a place to write to, and the caller's --expert_folder."""
    record = RECORDS[0][1]
    places = {
        name: str(in_tmp / name)
        for name in ("expert_folder", "output_json_path", "profile", "memory_profile", "save")
    }
    words = " ".join(f"--{name} {path}" for name, path in places.items())
    record = dataclasses.replace(record, repro=f"{record.repro} --write_result x {words}")
    config = mapped(record, {}, None, True)
    assert not [name for name in (*places, "write_result") if config.differs(name)]
    assert mapped(record, {"expert_folder": "mine"}, None, True).expert_folder == "mine"


def test_experts_of_a_replayed_line_are_kept_in_the_cache_folder(in_tmp):
    short = "--checkpoint_path tiny_moe --num_samples 1 --max_new_tokens 2 --device cpu"
    tiers = "--expert_memory 12 --expert_policy cache --expert_folder elsewhere"
    worked("generate", *shlex.split(short), *shlex.split(tiers))
    shutil.rmtree("elsewhere", ignore_errors=True)
    worked("replay", "benchmarks.txt", "--all")
    assert [path.name for path in in_tmp.iterdir()] == ["benchmarks.txt"]
