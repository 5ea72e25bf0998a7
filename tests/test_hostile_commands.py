"""What a careless or unlucky person gives to commands other than generate: one line, and no file
changed.

A row is a command line as a shell has it, its exit code, and a part of the one error line. All of
them run inside this process, and are refused before anything is measured: nothing else is said.
"""

import contextlib
import dataclasses
import json
import math
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantbench import files
from quantbench.__main__ import commands
from quantbench.errors import LogError, UsageError
from quantbench.typed_json import from_json, parsed, require
from tests.compare import latency_folders
from tests.compare.example_results import example_results
from tests.experts import counted
from tests.test_hostile import LINE, ROOT, only_error

BAD_JSON = {
    "empty": b"",
    "torn": b'{"arms": [',
    "deep": b"[" * 100_000,
    "utf16": "{}".encode("utf-16"),
    "binary": bytes(range(256)),
    "digits": b"[" + b"9" * 5000 + b"]",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A file or folder of every kind that a command reads, and of many kinds that none does."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "benchmarks.txt").write_text(f"{LINE}\n")
    (folder / "prose.txt").write_text("Once upon a time\n" * 40)
    (folder / "prose.md").write_text("Once upon a time\n")
    (folder / "other.json").write_text('{"name": "of another program"}\n')
    (folder / "page.svg").write_text("<html></html>")
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("nowhere/at/all")
    (folder / "loop").symlink_to("loop")
    for name, data in BAD_JSON.items():
        (folder / f"{name}.json").write_bytes(data)
        (folder / f"of_{name}").mkdir()
        (folder / f"of_{name}" / "results.json").write_bytes(data)
    (folder / "bare").mkdir()
    (folder / "of_pipe").mkdir()
    os.mkfifo(folder / "of_pipe" / "results.json")
    compared = example_results()
    compared.arms = compared.arms[:3]
    for arm in compared.arms:
        arm.samples = [sample for sample in arm.samples if sample.round % 6 < 2]
    (folder / "ab").mkdir()
    compared.save(folder / "ab")
    (folder / "sweep").mkdir()
    latency_folders.results({"none": 1.0, "int8wo": 0.6}).save(folder / "sweep")
    counts = counted.counts_of(counted.ROUTERS, 40, 1)
    counted.popularity_of(counts).save("--output", folder / "popularity.json")
    shutil.copy(ROOT / "docs" / "data" / "growth.json", folder)
    return folder


@pytest.fixture
def place(made, monkeypatch):
    monkeypatch.chdir(made)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return made


def contents(folder):
    regular = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in regular}


def refused(place, command, code, message):
    before = contents(place)
    result = CliRunner().invoke(commands, shlex.split(command))
    error = only_error(result)
    assert message in error and len(result.stderr.splitlines()) == 1, result.stderr
    assert result.exit_code == code
    assert contents(place) == before


ARMS = "--arm '' --arm '--quantization int8wo'"
AB, TUNE = f"ab {ARMS}", "tune --over threads=1,2"
SIDES = "--baseline sweep:none --target sweep:int8wo"
ESTIMATE = "estimate --checkpoint_path tiny --device L4"
TIERED = "generate --device cpu --checkpoint_path tiny_moe --expert_memory 16"

NO_FILES = [  # inputs that are no regular file: reading them would never end
    ("log check pipe", 1, "not a regular file"),
    ("log table /dev/zero", 1, "/dev/zero: not a regular file"),
    ("replay pipe --all", 1, "not a regular file"),
    ("replay benchmarks.txt --all --history pipe", 2, "--history pipe: not a regular file"),
    ("replay benchmarks.txt --all --checkpoint_root pipe", 2, "pipe: it is no folder"),
    ("replay benchmarks.txt --all --checkpoint_root /nope", 2, "/nope: No such file"),
    ("latency tables of_pipe", 2, "of_pipe: results.json: not a regular file"),
    ("latency --resume of_pipe", 2, "of_pipe: results.json: not a regular file"),
    ("metrics --baseline of_pipe --target sweep:none", 2, "results.json: not a regular file"),
    ("ab --resume of_pipe", 2, "of_pipe: results.json: not a regular file"),
    ("recommend --from of_pipe", 2, "of_pipe: results.json: not a regular file"),
    ("tune --resume of_pipe", 2, "of_pipe: results.json: not a regular file"),
    ("readme pipe", 1, "cannot read pipe: not a regular file"),
    ("growth --over none --json pipe --chart c.svg", 1, "--json pipe: not a regular file"),
    (f"{ESTIMATE} --checkpoint_path pipe", 1, "pipe: not a regular file"),
    ("estimate --validate /dev/zero", 1, "/dev/zero: not a regular file"),
    ("experts show pipe", 2, "pipe: not a regular file"),
    ("experts show popularity.json --against loop", 2, "leads back to itself"),
    ("experts profile --text /dev/zero", 2, "--text /dev/zero: not a regular file"),
    (f"{TIERED} --expert_placement pipe", 2, "--expert_placement pipe: not a regular file"),
    (f"{TIERED} --expert_folder pipe", 1, "--expert_folder pipe: Not a directory"),
    (f"{TIERED} --expert_folder benchmarks.txt/x", 1, "--expert_folder benchmarks.txt/x: Not a d"),
    ("peers --runtimes llama.cpp --gguf benchmarks.txt", 1, "--gguf benchmarks.txt: Not a d"),
    (f"{AB} --text pipe", 2, "--text pipe: not a regular file"),
    ("recommend --text pipe", 2, "--text pipe: not a regular file"),
    ("recommend --calibration_text pipe", 2, "--calibration_text pipe: not a regular file"),
    (f"{TUNE} --text dangling", 2, "link to 'nowhere/at/all', which does not exist"),
    ("quality --text pipe", 2, "--text pipe: not a regular file"),
    ("quality --quantization sparse-marlin-wanda --calibration_text /dev/zero", 2,
     "--calibration_text /dev/zero: not a regular file"),
    ("ab --arm '' --arm '--quantization autoquant --calibration_text pipe'", 2,
     "arm 2, '--quantization autoquant --calibration_text pipe': --calibration_text pipe: not"),
    ("tune --over quantization=int8wo,autoquant --calibration_text pipe", 2, "not a regular file"),
    ("schemes --measure --text /dev/zero", 2, "--text /dev/zero: not a regular file"),
]  # fmt: skip

OUTPUTS = [  # that cannot be written, hold something else, or are the file of another option
    ("caches --json other.json", 2, "other.json holds something that is no JSON of such a command"),
    ("schemes int8wo --json popularity.json", 2, "holds something that is no JSON of such a"),
    ("quality --json popularity.json", 2, "holds something that is no JSON of such a command"),
    ("roofline --json /nope/x", 1, "--json /nope/x: No such file or directory: /nope"),
    ("peers --runtimes llama.cpp --json other.json", 2, "holds something that is no JSON of such"),
    (f"{ESTIMATE} --json sweep/results.json", 2, "holds something that is no JSON of such a"),
    (
        "estimate --validate ab/results.json --json ./ab/results.json",
        2,
        "--json and --validate name",
    ),
    ("experts profile --output growth.json", 2, "growth.json holds something that is no JSON of"),
    ("experts profile --text prose.txt --output ./prose.txt", 2, "--output and --text name the"),
    ("experts show popularity.json --json ./popularity.json", 2, "--json and POPULARITY name the"),
    ("experts show popularity.json --output x.svg --json x.svg", 2, "--output and --json name the"),
    ("experts show popularity.json --output page.svg", 2, "page.svg holds something that is no S"),
    ("growth --over none --json growth.json --chart page.svg", 2, "page.svg holds something that"),
    ("growth --over none --json growth.json --chart growth.json", 2, "end its name in .svg"),
    ("latency tables sweep --csv x --picture ./x", 2, "--csv and --picture name the same file"),
    ("latency tables sweep --csv sweep/results.json", 2, "is no table of samples"),
    (f"metrics {SIDES} --narrative x.md --json x.md", 2, "--narrative and --json name the same"),
    (f"metrics {SIDES} --json sweep/results.json", 2, "is no JSON of such a command"),
    (f"metrics {SIDES} --narrative prose.md", 2, "is no report in prose"),
    (
        "replay benchmarks.txt --all --history ./benchmarks.txt",
        2,
        "--history ./benchmarks.txt",
    ),
    ("replay benchmarks.txt --all --write_result None", 2, "none is written small"),
    (f"{AB} --write_result None", 2, "--write_result None: none is written small"),
    (f"{AB} --write_result other.json", 2, "holds something that is no log of runs"),
    (f"{AB} --output benchmarks.txt", 1, "--output benchmarks.txt: Not a directory"),
    (f"{AB} --output pipe/x", 1, "--output pipe/x: Not a directory"),
    (f"{AB} --output new --write_result new", 2, "new: --output new makes that a folder"),
    (f"{AB} --output new/er --write_result ./new", 2, "./new: --output new/er makes"),
    (f"{AB} --output bare --write_result bare/report.md", 2, "file that --output bare writes"),
    (f"{AB} --text benchmarks.txt", 2, "--write_result and --text name the same file"),
    ("recommend --output new --write_result new", 2, "--write_result new: --output new makes"),
    ("recommend --text benchmarks.txt", 2, "--write_result and --text name the same file"),
    (f"{TUNE} --output bare --write_result bare/results.csv", 2, "file that --output bare writes"),
    ("recommend --write_result pipe", 1, "not a regular file"),
    ("recommend --output sweep", 2, "--output sweep holds a comparison"),
    (f"{TUNE} --write_result other.json", 2, "holds something that is no log of runs"),
    (f"{TUNE} --output loop", 1, "--output loop: "),
    ("latency --output dangling/x", 1, "--output dangling/x: "),
]

IGNORED = [  # options without an effect in what they are given with
    ("schemes int8wo --text prose.txt", 2, "--text: --measure reads it"),
    ("schemes --tokens 5", 2, "--tokens: --measure reads it"),
    ("schemes --list --device cpu", 2, "--device: --list measures and writes"),
    (
        "estimate --validate ab/results.json --quantization fp6",
        2,
        "--quantization: --validate reads",
    ),
    ("estimate --validate ab/results.json --device L4", 2, "--device: --validate reads"),
    (f"{ESTIMATE} --all_schemes --quantization fp6", 2, "--quantization: the table has them all"),
    (f"{ESTIMATE} --what_fits 3GB --kv_cache int8", 2, "--kv_cache: the table has them all"),
    (f"{ESTIMATE} --what_fits 3GB --all_schemes", 2, "two tables: leave one of them out"),
    ("growth --over none --json growth.json --schemes fp6", 2, "--schemes: --over none measures"),
    ("replay benchmarks.txt --all --dry_run --tolerance 5%", 2, "--tolerance: --dry_run runs"),
    ("replay benchmarks.txt --all --profile x", 2, "--profile: a replay prints figures"),
    ("replay benchmarks.txt --all --save x", 2, "--save: a replay prints figures"),
    ("replay benchmarks.txt --all --dummy --checkpoint_path tiny", 2, "--dummy: --checkpoint_path"),
    ("quality --expert_memory 4", 2, "no such option: '--expert_memory'"),
    ("quality --batch_size 4", 2, "no such option: '--batch_size'"),
    ("quality --tp 2", 2, "no such option: '--tp'"),
    ("quality --min_sqnr 20", 2, "--min_sqnr is for --quantization autoquant; given: none"),
    ("quality --calibration_text prose.txt", 2, "--calibration_text: none is not calibrated"),
    (f"{AB} --min_sqnr 20", 2, "--min_sqnr is for --quantization autoquant; given: none and int8"),
    (f"{AB} --calibration_text prose.txt", 2, "none and int8wo is not calibrated"),
    (f"latency {ARMS} --min_sqnr 20", 2, "--min_sqnr is for --quantization autoquant"),
    (f"{TUNE} --min_sqnr 20", 2, "--min_sqnr is for --quantization autoquant; given: none"),
    ("ab --arm '--quantization int8w'", 2, "arm 1, the baseline, '--quantization int8w': "),
    ("ab --arm '--quantization int8wo'", 2, "is nothing to compare: give another --arm"),
    (f"{AB} --text prose.txt --tokens 0", 2, "with --tokens 0 no quality is measured"),
    ("ab --resume ab --order_seed 3", 2, "--order_seed: --resume goes on with the arms"),
    ("ab --resume ab --in_turn", 2, "--in_turn: --resume goes on with the arms"),
    ("ab --resume ab --tokens 512", 2, "--tokens: --resume goes on with the arms"),
    ("roofline --parts layers --processes 2", 2, "--processes: single layers are measured"),
    ("peers --runtimes transformers --gguf x", 2, "--gguf keeps llama.cpp's files"),
    ("readme --check --redraw", 2, "--check changes nothing, and --redraw draws anew"),
]

NUMBERS = [
    ("quality --tokens 1", 2, "--tokens 1: a prompt and a decoding step behind it take 2"),
    ("caches --rounds 1e400", 2, "--rounds takes a whole number"),
    ("caches --context_depth ''", 2, "--context_depth takes a value; given: ''"),
    ("roofline --max_minutes nan", 2, "--max_minutes takes a finite number of at least 0"),
    (f"peers --threads {10**30}", 2, "--threads takes a whole number from 1 to 2**63-1"),
    (f"{AB} --max_minutes=-1", 2, "--max_minutes takes a finite number of at least 0; given: '-1'"),
    (f"{AB} --precision nan", 2, "--precision takes"),
    (f"{AB} --precision 1e400", 2, "--precision takes a share such as 2% or 0.02"),
    ("recommend --max_memory 1e400GB", 2, "--max_memory takes a size such as 8GB"),
    (
        "recommend --min_tok_s nan",
        2,
        "--min_tok_s takes tokens per second, above 0 and below 1e9; given: 'nan'",
    ),
    (f"{ESTIMATE} --what_fits {'9' * 400}GB", 2, "--what_fits takes a size such as 24GB"),
    ("latency --timeout nan", 2, "--timeout takes a finite number"),
    (f"latency --batch_sizes {'9' * 5000}", 2, "--batch_sizes"),
    (f"metrics {SIDES} --baseline_tp {10**30}", 2, "--baseline_tp takes a whole number"),
    ("replay benchmarks.txt --all --line 0", 2, "--line takes a whole number from 1"),
]


# Commands that read or write the file or folder @, which is a name that none can have.
NAMES = {"a\0b": "NUL character", "x" * 300: "File name too long"}
NAMED = [
    *("log check @", "log table @", "readme @", "replay @ --all", "estimate --validate @"),
    *(f"replay benchmarks.txt --all --{name} @" for name in ("history", "checkpoint_root")),
    *("latency tables @", "latency --resume @", "latency --output @"),
    *("metrics --baseline @ --target sweep:none", f"metrics {SIDES} --json @"),
    *("ab --resume @", f"{AB} --output @", f"{AB} --write_result @", f"{AB} --text @"),
    *("recommend --from @", "recommend --output @", f"{TUNE} --output @"),
    *("growth --over none --json @ --chart c.svg", "quality --text @"),
    *("experts show @", f"{TIERED} --expert_folder @"),
    *("experts profile --output @", "peers --runtimes llama.cpp --gguf @"),
    *(f"{name} --json @" for name in ("quality", "caches", "schemes", "roofline", ESTIMATE)),
]


@pytest.mark.parametrize("name", NAMES, ids=["NUL", "long"])
@pytest.mark.parametrize("command", NAMED)
def test_a_name_that_no_file_has_is_refused(place, command, name):
    before = contents(place)
    result = CliRunner().invoke(commands, shlex.split(command.replace("@", name)))
    assert NAMES[name] in only_error(result) and len(result.stderr.splitlines()) == 1
    assert result.exit_code in (1, 2) and contents(place) == before


@pytest.mark.parametrize("command, code, message", [*NO_FILES, *OUTPUTS, *IGNORED, *NUMBERS])
def test_one_line_and_no_file_is_changed(place, command, code, message):
    refused(place, command, code, message)


READERS = {  # the option and the command that reads the JSON file or folder @
    "latency tables of_@": "tables of_@",
    "metrics --baseline of_@ --target sweep:none": "--baseline of_@",
    "ab --resume of_@": "--resume of_@",
    "recommend --from of_@": "--from of_@",
    "tune --resume of_@": "--resume of_@",
    "growth --over none --chart c.svg --json @.json": "--json @.json",
    "experts show @.json": "@.json",
    "experts show popularity.json --against @.json": "--against @.json",
    "estimate --checkpoint_path @.json --device L4": "@.json",
    "estimate --validate @.json": "@.json",
    f"{TIERED} --expert_placement @.json": "--expert_placement @.json",
}


@pytest.mark.parametrize("name", BAD_JSON)
@pytest.mark.parametrize("command", READERS)
def test_what_is_no_json_is_named(place, command, name):
    before = contents(place)
    result = CliRunner().invoke(commands, shlex.split(command.replace("@", name)))
    assert READERS[command].replace("@", name) in only_error(result)
    assert result.exit_code in (1, 2) and contents(place) == before


def test_a_damaged_value_is_named(place, tmp_path):
    """Somewhere in each kind of file a value is of the wrong type, or one that nothing measures."""
    damages = [
        ("ab/results.json", ("arms", 0, "samples", 0, "prefill_seconds"), -1.0, "given: -1"),
        ("ab/results.json", ("arms", 1, "quality", "perplexity_ratio"), -1.0, "given: -1"),
        ("ab/results.json", ("arms", 0, "facts", "step_weight_bytes"), "much", "given: 'much'"),
        ("ab/results.json", ("arms", 0, "facts", "environment", "variables"), ["x"], "variables"),
        ("ab/results.json", ("arms", 0, "facts", "config", "top_k"), "x", "config.top_k takes int"),
        ("sweep/results.json", ("tables", 0, "cells", 0, "samples", 0, "prefill_seconds"), 1e308,
         "given: 1e+308"),
        ("growth.json", ("points", 0, "axis"), "width", "given: 'width'"),
        ("growth.json", ("points", 0, "decode_tok_s"), float("nan"), "given: nan"),
    ]  # fmt: skip
    command = {
        "ab/results.json": "recommend --from ab",
        "sweep/results.json": "latency tables sweep",
        "growth.json": "growth --over none --json growth.json --chart c.svg",
    }
    for file, keys, value, message in damages:
        whole = (place / file).read_text()
        document = json.loads(whole)
        inner = document
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        (place / file).write_text(json.dumps(document))
        try:
            refused(place, command[file], 2, message)
        finally:
            (place / file).write_text(whole)


WRITERS = {  # commands that print, and the files that they write as well
    "schemes --list": (),
    "metrics --baseline sweep:none --target sweep:int8wo --json new.json": ("new.json",),
    "latency tables sweep --csv new.csv": ("new.csv",),
    "experts show popularity.json --json new.json": ("new.json",),
    "recommend --from ab": (),
    "growth --over none --json growth.json --chart new.svg": ("new.svg",),
    f"{ESTIMATE} --json new.json": ("new.json",),
}


@pytest.mark.parametrize("command", WRITERS)
def test_files_are_written_before_a_full_stdout_is(place, monkeypatch, capsys, command):
    before = contents(place)
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            commands.main(shlex.split(command), prog_name="quantbench")
        with contextlib.suppress(OSError):
            full.close()
    error = capsys.readouterr().err.splitlines()[-1]
    new = contents(place).keys() - before.keys()
    for name in new:
        (place / name).unlink()
    assert end.value.code == 1 and new == set(WRITERS[command])
    assert error == "error: cannot write to stdout: No space left on device"


def test_a_document_of_data_that_nothing_can_be_made_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    growth = {"points": [{"axis": "width", "value": 4, "scheme": "none"}]}
    Path("growth.json").write_text(json.dumps(growth))
    marks = "<!-- readme: growth growth.json c.svg title -->\n<!-- end -->\n"
    Path("README.md").write_text(marks)
    result = CliRunner().invoke(commands, ["readme", "README.md"])
    assert "picture c.svg cannot be made of its data: " in only_error(result)
    assert result.exit_code == 2 and Path("README.md").read_text() == marks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "growth.json"]


def test_options_of_some_schemes_stay_with_those_that_take_them(tmp_path, monkeypatch):
    """One arm of the comparison is calibrated, and another has a least SQNR."""
    from quantbench.compare.sampling.arm import make_arms
    from quantbench.log.config import RunConfig

    monkeypatch.chdir(tmp_path)
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
    with pytest.raises(UsageError, match="--min_sqnr is for --quantization autoquant"):
        make_arms(common, [f"--quantization {scheme}" for scheme in schemes[:2]])
    with pytest.raises(UsageError, match="arm 3, .*--min_sqnr is for --quantization autoquant; gi"):
        make_arms(RunConfig(), ["", "--quantization fp6", "--quantization int8wo --min_sqnr 20"])


# ---------------------------------------------------------------------------------- the mechanisms


NO_JSON = {name: data for name, data in BAD_JSON.items() if name != "digits"}


@pytest.mark.parametrize("data", NO_JSON.values(), ids=NO_JSON)
def test_no_json_is_one_value_error(data):
    with pytest.raises(ValueError, match="^it is no JSON [(].+[)]$"):
        parsed(data)


def test_a_number_of_thousands_of_digits_is_infinite():
    """As 1e400 is: the reader of the value refuses it by its key."""
    assert parsed(BAD_JSON["digits"]) == [math.inf] and parsed(b"-" + b"9" * 400) == -math.inf


def test_measured_values_are_finite_and_above_a_limit():
    require("seconds", 1.0, None, 1e9)
    for value in (0.0, -1.0, float("nan"), float("inf"), 10**200):
        with pytest.raises(ValueError, match="seconds takes numbers above 0; given: "):
            require("seconds", 1.0, value)


def test_a_class_that_cannot_take_a_value_names_it():
    @dataclasses.dataclass
    class Even:
        number: int

        def __post_init__(self):
            if self.number % 2:
                raise UsageError(f"{self.number} is odd")

    assert from_json(Even, {"number": 2}) == Even(2)
    with pytest.raises(ValueError, match="^Even: 3 is odd$"):
        from_json(Even, {"number": 3})


def test_outputs_and_inputs_are_told_apart_by_file(tmp_path):
    (tmp_path / "a").write_text("")
    (tmp_path / "link").symlink_to("a")
    os.link(tmp_path / "a", tmp_path / "hard")
    for name in ("a", "link", "hard", "../" + tmp_path.name + "/a"):
        with pytest.raises(UsageError, match="--json and --text name the same file"):
            files.refuse_coinciding({"--json": tmp_path / "a"}, {"--text": tmp_path / name})
    files.refuse_coinciding({}, {"--text": tmp_path / "a", "--calibration": tmp_path / "a"})
    files.refuse_coinciding({"--json": tmp_path / "b", "--csv": None}, {"--text": tmp_path / "a"})


def test_a_folder_that_can_be_made(tmp_path):
    files.check_folder("--output", tmp_path / "new" / "er")
    files.check_folder("--output", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="--output .*file/x: Not a directory"):
        files.check_folder("--output", tmp_path / "file" / "x")
    with pytest.raises(LogError, match="--output /proc/new: "):
        files.check_folder("--output", "/proc/new")
