"""What a careless or unlucky person gives: the one line expected, the exit code, the log untouched.

A row is a command line, its exit code and a part of its one error line. Commands run inside this
process where they can; those about closed streams, signals and full disks in one of their own.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantbench import files
from quantbench.compare.commands.generate import generate
from quantbench.compare.sampling.latency_worker import LatencyWorker
from quantbench.compare.sampling.worker import Worker
from quantbench.errors import LogError, QuantbenchError

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"
REFERENCE = (ROOT / "tests" / "data" / "torchao_llama_log.txt").read_text().splitlines()
LINE = next(line for line in REFERENCE if line.startswith("2024"))
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
    ("--save new/model --write_result new", 2, "--write_result new: --save new/model makes that"),
    ("--save new --profile ./new", 2, "--profile ./new: --save new makes that a folder"),
    ("--checkpoint_path tiny_moe --expert_memory 4 --expert_folder new --write_result new", 2,
     "--write_result new: --expert_folder new makes that a folder"),
    ("--checkpoint_path tiny_moe --expert_memory 4 --expert_folder new/er --memory_profile new",
     2, "--memory_profile new: --expert_folder new/er makes that a folder"),
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
    # a path that no file can have: a NUL character, and more than 255 bytes
    *((f"--{option}=a\0b", 2, f"--{option} takes a value that is not empty and has no NUL")
      for option in ("checkpoint_path", "write_result", "output_json_path", "profile", "save")),
    *((f"--{option} {'x' * 300}", 1, "File name too long") for option in (
        "checkpoint_path", "write_result", "output_json_path", "profile", "memory_profile", "save"
    )),
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


OUTPUTS = ("write_result", "output_json_path", "profile", "memory_profile", "save")


@pytest.mark.parametrize("option", OUTPUTS)
@pytest.mark.parametrize("path", ["/proc/x", "/sys/x"])
def test_a_folder_that_takes_no_files_is_refused_before_the_run(place, option, path):
    """Also of root, to whom the system says that these folders can be written."""
    result = CliRunner().invoke(generate, [*SHORT, f"--{option}", path])
    assert path in only_error(result) and len(result.stderr.splitlines()) == 1
    assert result.exit_code == 1


@pytest.fixture
def damaged(place):
    """A folder with the embedded model, whose weights are finite, and overflow when multiplied."""
    shutil.copytree(TINY, "damaged", ignore=lambda *_: ["__pycache__"])
    weights = load_file("damaged/model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][:] = 3e38
    save_file(weights, "damaged/model.safetensors")
    return "damaged"


NONSENSE = "as none in bfloat16 gives logits that are not finite: try another --precision or"


@pytest.mark.parametrize("more", ["", "--decoder modules --prefill_size 1", "--kv_cache int8"])
def test_the_speed_of_nonsense_is_not_logged(place, damaged, more):
    given = ["--checkpoint_path", damaged, *SHORT, "--write_result", "benchmarks.txt"]
    result = CliRunner().invoke(generate, [*given, *more.split()])
    assert NONSENSE in only_error(result) and result.exit_code == 1
    assert Path("benchmarks.txt").read_text() == f"{LINE}\n"


def test_nor_is_it_compared(damaged):
    options = ["--checkpoint_path", damaged, "--device", "cpu"]
    arm = Worker()
    arm.load([*options, *SHORT[:4]])
    with pytest.raises(QuantbenchError, match=NONSENSE):
        arm.get_ready()
    cells = LatencyWorker()
    cells.describe(options, [(10, 2)], 4)
    with pytest.raises(QuantbenchError, match=NONSENSE):
        cells.load()


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
    free = re.compile(r"[\d.]+ GB of cpu are free")  # other processes allocate meanwhile
    assert free.sub("", said.stdout) == free.sub("", unsaid.stdout)


def test_a_value_of_ten_megabytes_is_shortened(place):
    shutil.copytree(TINY, "mine", ignore=lambda *_: ["__pycache__"])
    config = json.loads(Path("mine/config.json").read_text())
    Path("mine/config.json").write_text(json.dumps(config | {"model_type": "x" * 10_000_000}))
    result = CliRunner().invoke(generate, [*SHORT, "--checkpoint_path", "mine"])
    assert result.exit_code == 1 and "model_type" in only_error(result)


# ---------------------------------------------------------------------------------- other commands


def shell(command, cwd, timeout=300):
    """The command line as a shell runs it, from the repository's root with `cwd` in $HERE."""
    log = f"{sys.executable} -m quantbench log"
    environment = {**os.environ, "LOG": log, "HERE": str(cwd), "ROOT": str(ROOT)}
    environment |= {"PY": sys.executable, "QB": f"{sys.executable} -m quantbench"}
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


CHECK = "$LOG check $HERE/benchmarks.txt"
RUN = "cd $HERE; $PY $ROOT/generate.py --num_samples 1 --max_new_tokens 2 --device cpu"


@pytest.mark.parametrize(
    "command, code, error",
    [
        (f"{CHECK} >/dev/full", 1, "error: cannot write to stdout: No space left on device\n"),
        (f"{CHECK} >&-", 1, "error: stdout is closed; redirect it to a file or to /dev/null\n"),
        (f"{CHECK} 2>&-", 0, ""),
        (f"{CHECK}", 0, ""),
        ("set -o pipefail; $LOG check --help | (exec <&-; sleep 1)", 1,
         "error: cannot write to stdout: Broken pipe\n"),
        ("$LOG check /nope 2>&-", 1, ""),
        ("$LOG check /nope 2>/dev/full", 1, ""),
        ("$LOG check /nope <&- >&- 2>&-", 1, ""),
        ("$PY generate.py --help >/dev/full", 1,
         "error: cannot write to stdout: No space left on device\n"),
        ("$PY -m quantbench --help >/dev/full", 1,
         "error: cannot write to stdout: No space left on device\n"),
        ("$QB schemes --help >/dev/full", 1,
         "error: cannot write to stdout: No space left on device\n"),
        ("$QB schemes int8wo >/dev/full", 1,
         "error: cannot write to stdout: No space left on device\n"),
        (f"{RUN} >&-", 1, "error: stdout is closed; redirect it to a file or to /dev/null\n"),
        ("$QB caches --no-such", 2, "error: no such option: '--no-such'; --help lists"),
        ("$QB schemes --jsom x", 2, "error: no such option: '--jsom'; did you mean --json?"),
        ("$QB schemes fp6x", 2, "error: --quantization 'fp6x' is no scheme; nearest: fp6"),
        ("$QB quality --limit 3", 2, "error: --limit is of the documents"),
        ("$QB quality --json /nope/x", 1, "error: --json /nope/x: No such file"),
        ("$QB quality --json $HERE/benchmarks.txt", 2, "holds something that is no"),
        ("$QB quality --text=", 2, "error: --text takes a value; given: ''"),
        ("$QB roofline --json /nope/x", 1, "error: --json /nope/x: No such file"),
        ("$QB growth --over none --chart /nope/x.svg", 1, "error: --chart /nope/x.svg:"),
        ("$QB replay $HERE/benchmarks.txt --all --tolerance=", 2,
         "error: --tolerance takes a value; given: ''"),
        ("$QB replay $HERE/benchmarks.txt --all --write_result /nope/x", 1,
         "error: cannot append to '/nope/x': there is no folder '/nope'"),
        ("$QB replay $HERE/benchmarks.txt --all --write_result $HERE/binary", 2,
         "holds something that is no log of runs"),
        ("$QB ab --arm --nope --arm ''", 2, "error: arm 1, the baseline, '--nope'"),
        ("$QB ab --arm '' --arm --nope", 2, "error: arm 2, '--nope': no such option"),
        ("$QB ab --text /dev/zero --arm '' --arm '--quantization int8wo'", 2,
         "error: --text /dev/zero: not a regular file"),
        ("$QB caches --json=$HERE/benchmarks.txt", 2, "holds something that is no JSON"),
        ("$LOG check $HERE/binary", 1, "is no log: byte 1 is zero"),
        ("$LOG check $HERE/utf16", 1, "is zero, as in binary data"),
        ("$LOG check $HERE/prose.txt", 1, "holds no line of a run"),
        ("$LOG table $HERE/deep", 1, "/deep:1 is not what generate.py"),
        ("$LOG table $HERE/empty_peak", 1, "/empty_peak:1 is not what generate.py"),
        ("$LOG table /dev/zero", 1, "error: cannot read /dev/zero: not a regular file"),
    ],
)  # fmt: skip
def test_every_command_has_one_policy(place, command, code, error):
    Path("utf16").write_bytes(f"{LINE}\n".encode("utf-16"))
    Path("deep").write_text("[" * 100_000)
    Path("empty_peak").write_text('{"peak_memory_bytes": {"generate": {}}}\n')
    done = shell(command, place)
    assert done.returncode == code, done.stderr
    if not error:
        assert done.stderr == ""
    else:
        assert error in done.stderr and done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: ")
    assert Path("benchmarks.txt").read_text() == f"{LINE}\n"


def test_a_line_of_fifty_megabytes_is_no_record(place):
    Path("long.txt").write_text(f"{LINE}\n" + "x" * 50_000_000 + "\n")
    done = shell("$LOG check $HERE/long.txt", place)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[0].endswith(
        "long.txt:2: 50000000 characters, which no run writes"
    )
    assert len(done.stdout) < 1000


@pytest.mark.parametrize(
    "redirected, code, last",
    [
        (">/dev/full", 1, "error: cannot write to stdout: No space left on device"),
        ("| true", 1, "error: cannot write to stdout: Broken pipe"),
        ("2>&-", 0, ""),
    ],
)
def test_a_run_is_logged_whatever_becomes_of_its_output(place, redirected, code, last):
    done = shell(f"set -o pipefail; {RUN} {redirected}", place)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert (done.stderr.splitlines() or [""])[-1] == last
    first, second = Path("benchmarks.txt").read_text().splitlines()
    assert first == LINE and "mod: tiny" in second


@pytest.mark.parametrize("option", ["--profile", "--memory_profile"])
def test_a_trace_that_the_disk_is_too_small_for_is_an_error(place, option):
    Path("trace.json").unlink()
    done = shell(f"ulimit -f 64; trap '' XFSZ; {RUN} {option} trace.json", place)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {option} trace.json: ") and "Wrote" not in done.stderr
    assert not list(place.glob("*trace*")) and not list(place.glob(".*trace*"))


def test_documents_are_not_begun_where_their_picture_cannot_be_written(place):
    Path("growth.json").write_text('{"points": [{"axis": "layers", "value": 4, "scheme": "none"}]}')
    for picture, reason in (("nope/c.svg", "No such file"), ("prose.txt", "is no SVG"),
                            ("README.md", "is no SVG")):  # fmt: skip
        paths = f"{place}/growth.json {place}/{picture}"
        marks = f"# title\n<!-- readme: growth {paths} title -->\n<!-- end -->\n"
        Path("README.md").write_text(marks)
        done = shell("$PY -m quantbench readme $HERE/README.md", place)
        assert done.returncode != 0 and reason in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1 and Path("README.md").read_text() == marks


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("before")

    def fails(file):
        file.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(LogError, match="--json .*report.json: No space left on device"):
        files.replace("--json", path, fails)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    (tmp_path / "link").symlink_to("report.json")
    files.write_text("--json", tmp_path / "link", "after")
    assert path.read_text() == "after" and (tmp_path / "link").is_symlink()
    longest = tmp_path / ("é" * 125 + ".json")  # 255 bytes, the most that a name has
    files.write_text("--json", longest, "x")
    assert longest.read_text() == "x"
    with pytest.raises(LogError, match="--json a.b: a path cannot hold a NUL character"):
        files.write_text("--json", "a\0b", "x")
