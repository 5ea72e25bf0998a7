"""What a careless or unlucky person gives: the one line expected, the exit code, the log untouched.

A row is a command line, its exit code and a part of its one error line. Commands run inside this
process where they can; those about closed streams, signals and full disks in one of their own.
"""

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from quantbench import files
from quantbench.bench.arm import make_arms
from quantbench.bench.worker import Worker
from quantbench.errors import LogError, QuantbenchError
from quantbench.log.config import RunConfig
from tests.models.hugging_face import rewritten
from tests.programs import ROOT, command, ran
from tests.refusals import one_line
from tests.test_refusals import LINE

TINY = ROOT / "models" / "tiny"
SHORT = ("--num_samples", "1", "--max_new_tokens", "2", "--device", "cpu")


@pytest.fixture
def place(in_tmp, monkeypatch):
    """A folder with a log, texts, and files of other kinds."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("benchmarks.txt").write_text(f"{LINE}\n")
    Path("trace.json").write_text('{\n  "schemaVersion": 1, "traceEvents": []}\n')
    Path("prose.txt").write_text("Once upon a time\n" * 40)
    return in_tmp


OUTPUTS = ("write_result", "output_json_path", "profile", "memory_profile", "save")


@pytest.mark.parametrize("option", OUTPUTS)
@pytest.mark.parametrize("path", ["/proc/x", "/sys/x"])
def test_a_folder_that_takes_no_files_is_refused_before_the_run(place, option, path):
    """Also of root, to whom the system says that these folders can be written."""
    result = command("generate", *SHORT, f"--{option}", path)
    assert path in one_line(result) and len(result.stderr.splitlines()) == 1
    assert result.exit_code == 1


@pytest.fixture
def damaged(place):
    """A folder with the embedded model, whose weights are finite, and overflow when multiplied."""
    shutil.copytree(TINY, "damaged", ignore=lambda *_: ["__pycache__"])
    with rewritten(Path("damaged")) as weights:
        weights["model.layers.2.mlp.down_proj.weight"][:] = 3e38
    return "damaged"


NONSENSE = "as none in bfloat16 gives logits that are not finite: try another --precision or"


@pytest.mark.parametrize("more", ["", "--decoder modules --prefill_size 1", "--kv_cache int8"])
def test_the_speed_of_nonsense_is_not_logged(place, damaged, more):
    given = ("--checkpoint_path", damaged, *SHORT, "--write_result", "benchmarks.txt")
    result = command("generate", *given, *more.split())
    assert NONSENSE in one_line(result) and result.exit_code == 1
    assert Path("benchmarks.txt").read_text() == f"{LINE}\n"


def test_nor_is_it_compared(damaged):
    options = ["--checkpoint_path", damaged, "--device", "cpu"]
    arm = Worker()
    arm.load([*options, *SHORT[:4]])
    with pytest.raises(QuantbenchError, match=NONSENSE):
        arm.get_ready()
    with pytest.raises(QuantbenchError, match=NONSENSE):
        arm.cell(prompt=10, rows=2, new_tokens=4, most_rows=2)


@pytest.mark.parametrize("name", ["x, kv_quant: True", "new\nline", "tab\there", "\u2028"])
def test_a_name_that_no_log_line_holds_is_refused_before_loading(place, name):
    shutil.copytree(TINY, name, ignore=lambda *_: ["__pycache__"])
    (Path(name) / "model.safetensors").write_bytes(b"never read")
    result = command("generate", *SHORT, "--checkpoint_path", name)
    assert result.exit_code == 2 and "which no log line can hold" in one_line(result)


def shell(line, cwd):
    """The command line as a shell runs it, from the repository's root with `cwd` in $HERE."""
    log = f"{sys.executable} -m quantbench log"
    environment = {**os.environ, "LOG": log, "HERE": str(cwd), "ROOT": str(ROOT)}
    environment |= {"PY": sys.executable}
    return ran("bash", "-c", line, env=environment, timeout=300)


CHECK = "$LOG check $HERE/benchmarks.txt"
RUN = "cd $HERE; $PY $ROOT/generate.py --num_samples 1 --max_new_tokens 2 --device cpu"


@pytest.mark.parametrize(
    "line, code, error",
    [
        (f"{CHECK} >/dev/full", 1, "error: cannot write to stdout: No space left on device\n"),
        (f"{CHECK} >&-", 1, "error: stdout is closed; redirect it to a file or to /dev/null\n"),
        (f"{CHECK} 2>&-", 0, ""),
        (f"{CHECK}", 0, ""),
        ("set -o pipefail; $LOG check --help | (exec <&-; sleep 1)", 141, ""),
        ("$LOG check /nope 2>&-", 1, ""),
        ("$LOG check /nope 2>/dev/full", 1, ""),
        ("$LOG check /nope <&- >&- 2>&-", 1, ""),
        ("$PY -m quantbench --help >/dev/full", 1,
         "error: cannot write to stdout: No space left on device\n"),
        (f"{RUN} >&-", 1, "error: stdout is closed; redirect it to a file or to /dev/null\n"),
    ],
)  # fmt: skip
def test_every_command_has_one_policy(place, line, code, error):
    done = shell(line, place)
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
        ("| true", 141, None),
        ("2>&-", 0, None),
    ],
)
def test_a_run_is_logged_whatever_becomes_of_its_output(place, redirected, code, last):
    done = shell(f"set -o pipefail; {RUN} {redirected}", place)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert "error" not in done.stderr if last is None else done.stderr.splitlines()[-1:] == [last]
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


def test_options_of_some_schemes_stay_with_those_that_take_them(in_tmp):
    """One arm of the comparison is calibrated, and another has a least SQNR."""
    Path("text.txt").write_text("Once upon a time\n")
    common = RunConfig(calibration_text="text.txt", min_sqnr=20.0)
    schemes = ("int8wo", "sparse-marlin-wanda", "autoquant")
    arms = make_arms(common, [f"--quantization {scheme}" for scheme in schemes])
    given = [(arm.name, arm.config.calibration_text, arm.config.min_sqnr) for arm in arms]
    assert given == [
        ("int8wo", None, 35.0),
        ("sparse-marlin-wanda", "text.txt", 35.0),
        ("autoquant", "text.txt", 20.0),
    ]


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
