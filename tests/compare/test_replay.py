"""python -m compare replay: the old log's lines, then beside now, and what is refused."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchlog import log
from benchlog.config import parse
from compare.commands.replay import checkpoint, mapped, replay
from generate import main as generate

REFERENCE = Path(__file__).parents[1] / "data" / "torchao_llama_log.txt"
RECORDS = log.read(REFERENCE).records


def run(*arguments):
    return CliRunner().invoke(replay, list(arguments))


def one_line(result):
    """The message of the one error a command ended with."""
    message = str(getattr(result.exception, "message", result.exception))
    assert not isinstance(result.exception, SystemExit) and "\n" not in message
    return message


def test_every_line_of_the_old_log_can_be_built():
    small = ("--dummy", "--num_layers", "1", "--device", "cpu", "--dry_run")
    result = run(str(REFERENCE), "--all", *small)
    assert result.exit_code == 0, result.stderr
    shown = result.stdout.splitlines()
    assert len(shown) == len(RECORDS) == 29
    for line, (number, record) in zip(shown, RECORDS, strict=True):
        assert line.startswith(f"line {number}: {record.quant}, {record.mod}: model size then")
        assert record.quant.startswith("autoquant") or "(1 layer), kernel " in line


def test_full_sizes_are_those_of_the_log():
    """Built whole, on the meta device: within the 1.5 % that the design promises, and rounding."""
    result = run(
        str(REFERENCE), "--where", "quant=int8wo", "--dummy", "--device", "cpu", "--dry_run"
    )
    sizes = re.findall(r"then ([\d.]+) GB, now ([\d.]+) GB", result.stdout)
    assert len(sizes) == 2
    for then, now in sizes:
        assert float(now) == pytest.approx(float(then), rel=0.015)


@pytest.fixture
def short_log(tmp_path, monkeypatch):
    """A log with one line, of a short run on the embedded model."""
    monkeypatch.chdir(tmp_path)
    short = "--num_samples 2 --max_new_tokens 5 --device cpu --output_json_path old.jsonl"
    result = CliRunner().invoke(generate, shlex.split(short))
    assert result.exit_code == 0, result.stderr
    return tmp_path / "benchmarks.txt"


def test_then_and_now(short_log):
    (_, record), before = log.read(short_log).records[0], short_log.read_text()
    (short_log.parent / "old.jsonl").unlink()
    result = run("benchmarks.txt", "--all", "--write_result", "again.txt")
    assert result.exit_code == 0, result.stderr
    assert short_log.read_text() == before and not Path("old.jsonl").exists()
    (_, again), *others = log.read("again.txt").records
    assert not others
    asked, repeated = record.config(), again.config()
    assert repeated.max_new_tokens == 5 and repeated.num_samples == 2
    assert repeated.output_json_path is None and asked.output_json_path == "old.jsonl"
    for heading, name in (("tok/s", "tok_s"), ("peak memory", "peak_mem")):
        then, now, ratio = re.search(
            rf"{heading} +then +([\d.]+).* now +([\d.]+).*?([\d.]+) ×", result.stdout
        ).groups()
        assert (then, now) == (f"{getattr(record, name):.2f}", f"{getattr(again, name):.2f}")
        assert float(ratio) == pytest.approx(getattr(again, name) / getattr(record, name), rel=0.01)


@pytest.mark.parametrize("tok_s, code", [("9999999.00", 1), ("  0.01", 0)])
def test_the_gate(short_log, tok_s, code):
    """Against a line that claims to have been faster, or slower, than anything is."""
    text = re.sub(r"tok/s= *[\d.]+", f"tok/s={tok_s}", short_log.read_text())
    short_log.write_text(re.sub(r"peak_mem= *[\d.]+", "peak_mem=99.00", text))
    result = run("benchmarks.txt", "--line", "1", "--tolerance", "5%")
    assert result.exit_code == code, result.stderr
    assert ("worse: line 1: None, tiny: tok/s" in result.stdout) == bool(code)
    assert "worse: line 1: None, tiny: peak" not in result.stdout


OTHER_PROGRAM = RECORDS[0][1].render().replace("python generate.py", "python rm.py; true")
UNKNOWN = RECORDS[0][1].render() + " --frobnicate 3"
CUT = "20240831225155, tok/s=107.38, mem/s=what"


def test_lines_that_are_refused(tmp_path):
    good = RECORDS[1][1].render()
    (tmp_path / "log.txt").write_text("\n".join(["title", OTHER_PROGRAM, good, UNKNOWN, CUT, ""]))
    small = ("--dummy", "--num_layers", "1", "--device", "cpu", "--dry_run")
    result = run(str(tmp_path / "log.txt"), "--all", *small)
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
    said = record.config()
    assert config.num_layers == 2 and config.temperature == said.temperature
    assert config == parse(
        ["--checkpoint_path", f"dummy:{record.mod}", "--device", said.device, "--compile",
         "--precision", said.precision, "--num_samples", str(said.num_samples), "--num_layers", "2",
         "--max_new_tokens", str(said.max_new_tokens), "--top_k", str(said.top_k),
         "--temperature", str(said.temperature)]
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ((), "which log?"),
        (("nowhere.txt", "--all"), "cannot read 'nowhere.txt': no such file"),
        (("empty.txt", "--all"), "empty.txt holds no line of a run"),
        (("empty.txt", "--line", "1"), "empty.txt holds no line of a run"),
        ((REFERENCE,), "which lines?"),
        ((REFERENCE, "--line", "1"), "there is no run in line 1"),
        ((REFERENCE, "--line", "9999"), "there is no run in line 9999"),
        ((REFERENCE, "--where", "quant"), "--where takes FIELD=VALUE"),
        ((REFERENCE, "--where", "color=red"), "--where takes FIELD=VALUE"),
        ((REFERENCE, "--where", "quant=int3"), "has quant=int3"),
        ((REFERENCE, "--all", "--tolerance", "lots"), "--tolerance takes a share"),
        ((REFERENCE, "--all", "--num_layers", "0"), "--num_layers takes a whole number"),
        ((REFERENCE, "--all", "--bogus"), "no such option"),
        ((REFERENCE, "--line", "4", "--checkpoint_root", "."), "none of the lines asked for"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("a title\n")
    assert reason in one_line(run(*map(str, arguments)))
