"""What a careless or unlucky person gives: the one line expected, the exit code, the log untouched.

A row is a command line, its exit code and a part of its one error line. Commands run inside this
process where they can; those about closed streams, signals and full disks in one of their own.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from generate import main as generate

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"
LINE = (ROOT / "tests" / "data" / "torchao_llama_log.txt").read_text().splitlines()[1]
SHORT = ("--num_samples", "1", "--max_new_tokens", "2", "--device", "cpu")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a log, texts, and files of other kinds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("benchmarks.txt").write_text(f"{LINE}\n")
    Path("runs.jsonl").write_text('{"line": "x"}\n')
    Path("trace.json").write_text('{\n  "schemaVersion": 1, "traceEvents": []}\n')
    Path("prose.txt").write_text("Once upon a time\n" * 40)
    Path("binary").write_bytes(bytes(range(256)) * 4)
    Path("hard").hardlink_to("benchmarks.txt")
    Path("soft").symlink_to("benchmarks.txt")
    os.mkfifo("pipe")
    Path("dangling").symlink_to("nowhere/at/all")
    Path("loop").symlink_to("loop")
    return tmp_path


def only_error(result):
    """The command's one error line; nothing else on stderr is more than progress."""
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], result.stderr
    assert "Traceback" not in result.output and "report it" not in errors[0]
    assert len(errors[0]) < 1000
    return errors[0]


BAD = [
    # outputs that coincide, or hold something else
    ("--profile benchmarks.txt", 2, "--write_result and --profile name the same file"),
    ("--profile hard", 2, "--write_result and --profile name the same file"),
    ("--profile ./soft", 2, "--write_result and --profile name the same file"),
    ("--write_result new --output_json_path ./new", 2, "name the same file"),
    ("--write_result none --profile a --memory_profile a", 2, "name the same file"),
    ("--write_result none --profile benchmarks.txt", 2, "--profile benchmarks.txt holds something"),
    ("--write_result none --memory_profile runs.jsonl", 2, "holds something that is no trace"),
    ("--profile prose.txt", 2, "holds something that is no trace"),
    ("--write_result runs.jsonl", 2, "'runs.jsonl' holds something that is no log"),
    ("--write_result trace.json", 2, "'trace.json' holds something that is no log"),
    ("--write_result binary", 2, "'binary' holds something that is no log"),
    ("--write_result prose.txt", 2, "'prose.txt' holds something that is no log"),
    ("--output_json_path benchmarks.txt --write_result none", 2, "no JSON lines"),
    ("--output_json_path trace.json", 2, "no JSON lines"),
    ("--output_json_path binary", 2, "no JSON lines"),
    ("--write_result empty/log --save empty", 2, "lies in the folder of --save"),
    ("--write_result pipe", 1, "not a regular file"),
    ("--write_result loop", 1, "loop"),
    # ignored combinations
    ("--interactive --prompt hi", 2, "leave out --prompt"),
    ("--interactive --profile t", 2, "leave out --profile"),
    ("--interactive --prefill_size 3", 2, "leave out --prefill_size"),
    ("--interactive --output_json_path r", 2, "leave out --output_json_path"),
    ("--dry_run --save new", 2, "--dry_run goes without it: leave out --save"),
    ("--dry_run --profile t", 2, "leave out --profile"),
    ("--prefill_size 3 --prompt hi", 2, "--prefill_size is a random prompt"),
    ("--quantization int8wo --calibration_text /nope", 2, "int8wo is not calibrated"),
    ("--quantization int8wo --min_sqnr 20", 2, "--min_sqnr is for --quantization autoquant"),
    ("--write_result NONE", 2, "none is written small"),
    ("--write_result None", 2, "./None"),
    # inputs that are no regular file, or never end
    ("--quantization autoquant --calibration_text /dev/zero", 2, "not a regular file"),
    ("--quantization autoquant --calibration_text pipe", 2, "not a regular file"),
    ("--quantization autoquant --calibration_text .", 2, "Is a directory"),
    ("--quantization autoquant --calibration_text dangling", 2, "link to 'nowhere/at/all', which"),
    ("--quantization autoquant --calibration_text loop", 2, "leads back to itself"),
    # before anything is made or loaded
    ("--prefill_size 200000000", 2, "200000000 prompt tokens and --max_new_tokens 2 need"),
    # --debug as a value is a value
    ("--prompt --debug --checkpoint_path /nope", 2, "the option '--debug' follows it"),
    ("--prompt=--debug --checkpoint_path /nope", 1, "/nope does not exist"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, code, message", BAD)
def test_one_line_and_the_log_untouched(place, arguments, code, message):
    Path("empty").mkdir()
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    result = CliRunner().invoke(generate, [*SHORT, *arguments.split()])
    assert message in only_error(result)
    assert result.exit_code == code
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", ["x, kv_quant: True", "new\nline", "tab\there", "\u2028"])
def test_a_name_that_no_log_line_holds_is_refused_before_loading(place, name):
    shutil.copytree(TINY, name, ignore=lambda *_: ["__pycache__"])
    (Path(name) / "model.safetensors").write_bytes(b"never read")
    result = CliRunner().invoke(generate, [*SHORT, "--checkpoint_path", name])
    assert result.exit_code == 2 and "which no log line can hold" in only_error(result)


def test_full_precision_that_was_asked_for_is_not_what_a_folder_was_saved_as(place):
    done = CliRunner().invoke(generate, [*SHORT, "--quantization", "int8wo", "--save", "mine"])
    assert done.exit_code == 0, done.stderr
    given = [*SHORT, "--checkpoint_path", "mine", "--dry_run"]
    result = CliRunner().invoke(generate, [*given, "--quantization", "none"])
    assert result.exit_code == 2 and "mine was saved as int8wo" in only_error(result)
    unsaid = CliRunner().invoke(generate, given)
    assert unsaid.exit_code == 0 and "as int8wo" in unsaid.stdout
    said = CliRunner().invoke(generate, [*given, "--quantization", "int8wo"])
    assert said.stdout == unsaid.stdout


def test_a_value_of_ten_megabytes_is_shortened(place):
    shutil.copytree(TINY, "mine", ignore=lambda *_: ["__pycache__"])
    config = json.loads(Path("mine/config.json").read_text())
    Path("mine/config.json").write_text(json.dumps(config | {"model_type": "x" * 10_000_000}))
    result = CliRunner().invoke(generate, [*SHORT, "--checkpoint_path", "mine"])
    assert result.exit_code == 1 and "model_type" in only_error(result)
