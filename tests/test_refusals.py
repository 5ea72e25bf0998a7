"""Every refusal in messages.txt: one line on stderr, the exit code, and no file changed.

An entry of messages.txt is a command line ("$ …"), and then its exit code, its error's code where
that is not "usage", and its message. Each message has one entry; other commands that meet it have
its codes alone. A line "with FILE KEYS VALUE" before it damages a value of a JSON file first.
Commands run inside this process, in a folder with a file of every kind that a command reads, and of
many that none does; they are refused before anything is loaded.
`--update-messages` writes the messages anew, and never the codes.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import stat
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from quantbench.__main__ import commands
from quantbench.models.loading import load_config
from quantbench.quantize import recipe
from tests import programs
from tests.compare.example_results import ARMS, example_results
from tests.experts import counted
from tests.latency import latencies
from tests.programs import OLD_LOG, ROOT
from tests.refusals import one_line

MESSAGES = Path(__file__).with_name("messages.txt")
LINE = next(line for line in OLD_LOG.read_text().splitlines() if line.startswith("2024"))
ENTRY = re.compile(r"(?:^with (.+)\n)?^\$ ?(.*)\n(\d(?: [a-z-]+)?)(?: error: (.*))?$", re.MULTILINE)
SHORTENED = {  # what messages.txt writes for a part of a command
    "<NUL>": "\0",
    "<300 x>": "x" * 300,
    "<400 nines>": "9" * 400,
    "<5000 nines>": "9" * 5000,
    "<1 to 1001>": ",".join(map(str, range(1, 1002))),
}
BAD_JSON = {
    "empty": b"",
    "torn": b'{"arms": [',
    "deep": b"[" * 100_000,
    "utf16": "{}".encode("utf-16"),
    "binary": bytes(range(256)),
    "digits": b"[" + b"9" * 5000 + b"]",
    "list": b"[]",
}
# Documents with a block that cannot be written, by what is wrong with it.
BLOCKS = {
    "unclosed": "<!-- readme: kl_classes -->\n",
    "nested": "a\n<!-- readme: kl_classes -->\n<!-- readme: x -->\n<!-- end -->\n",
    "unknown": "<!-- readme: speed -->\n<!-- end -->\n",
    "nameless": "<!-- readme: quality -->\n<!-- end -->\n",
    "nowhere": "<!-- readme: quality no.json -->\n<!-- end -->\n",
    "list": "<!-- readme: quality list.json -->\n<!-- end -->\n",
    "torn": "<!-- readme: quality torn.json -->\n<!-- end -->\n",
    "empty": "<!-- readme: runs empty.json -->\n<!-- end -->\n",
    "fields": "<!-- readme: fields quantbench.no:Such -->\n<!-- end -->\n",
}


class Refusal(NamedTuple):
    damage: str  # FILE KEYS VALUE, or nothing
    command: str
    codes: str  # the exit code, and that of errors.py
    message: str  # nothing: another entry has it


def refusals() -> list[Refusal]:
    return [Refusal(*found) for found in ENTRY.findall(MESSAGES.read_text())]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with files of every kind."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "benchmarks.txt").write_text(f"{LINE}\n")
    (folder / "runs.jsonl").write_text('{"line": "x"}\n')
    (folder / "trace.json").write_text('{\n  "schemaVersion": 1, "traceEvents": []}\n')
    (folder / "prose.txt").write_text("Once upon a time\n" * 40)
    (folder / "prose.md").write_text("Once upon a time\n")
    (folder / "binary").write_bytes(bytes(range(256)) * 4)
    (folder / "utf16").write_bytes(f"{LINE}\n".encode("utf-16"))
    (folder / "other.json").write_text('{"name": "of another program"}\n')
    (folder / "page.svg").write_text("<html></html>")
    (folder / "hard").hardlink_to(folder / "benchmarks.txt")
    (folder / "soft").symlink_to("benchmarks.txt")
    (folder / "dangling").symlink_to("nowhere/at/all")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    for name in ("bare", "empty", "of_pipe"):
        (folder / name).mkdir()
    for name in ("results.json", "meta.json"):
        os.mkfifo(folder / "of_pipe" / name)
    for name, data in BAD_JSON.items():
        (folder / f"{name}.json").write_bytes(data)
        (folder / f"of_{name}").mkdir()
        for file in ("results.json", "meta.json"):
            (folder / f"of_{name}" / file).write_bytes(data)
    for name, text in BLOCKS.items():
        (folder / f"of_{name}.md").write_text(text)
    example_results(folder=folder / "ab", arms=ARMS[:3])
    latencies.measured({"none": 1.0, "int8wo": 0.6}, folder / "sweep")
    (folder / "sweep" / "results.json").write_text('{"plan": {}}\n')
    latencies.measured({"none": 1.0}, folder / "longer", sequence_lengths=[300])
    latencies.measured({"none": 1.0}, folder / "more", decode_length=5)
    counts = counted.counts_of(counted.ROUTERS, 40, 1)
    counted.popularity_of(counts).save("--output", folder / "popularity.json")
    shutil.copy(ROOT / "tests/estimate/opt-1.3b.json", folder)
    config = json.loads((ROOT / "models" / "tiny" / "config.json").read_text())
    narrow = config | {"hidden_size": 96, "head_dim": 24, "num_hidden_layers": 1}
    (folder / "narrow.json").write_text(json.dumps(narrow))
    shapes, schemes = load_config("tiny").linear_shapes(), {"layers.*": "fp6", "output": "int8wo"}
    recipe.write(str(folder / "recipe.json"), recipe.make("tiny", shapes, schemes, "int8"))
    return folder


@pytest.fixture
def place(made, monkeypatch):
    monkeypatch.chdir(made)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return made


def files_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """By its path each regular file, as it shows that it has not been written since."""
    found = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode):
                state = about.st_ino, about.st_size, about.st_mtime_ns
                found[path.relative_to(folder).as_posix()] = state
    return found


def damage(folder: Path, text: str) -> None:
    """Set a value of a JSON file: FILE KEYS VALUE, with slashes between the keys. The first key of
    JSON lines is a line's number, from 0."""
    file, keys, value = text.split(" ", 2)
    content, lines = (folder / file).read_text(), file.endswith(".jsonl")
    document = [json.loads(line) for line in content.splitlines()] if lines else json.loads(content)
    inner = document
    *path, last = [int(key) if key.isdigit() else key for key in keys.split("/")]
    for key in path:
        inner = inner[key]
    inner[last] = json.loads(value)
    parts = [json.dumps(part) + "\n" for part in (document if lines else [document])]
    (folder / file).write_text("".join(parts))


@pytest.mark.parametrize("refusal", refusals(), ids=lambda refusal: refusal.command[:80])
def test_one_line_and_no_file_is_changed(place, request, refusal):
    damaged = place / refusal.damage.partition(" ")[0]
    intact = damaged.read_bytes() if refusal.damage else None
    command = refusal.command
    for short, whole in SHORTENED.items():
        command = command.replace(short, whole)
    try:
        if refusal.damage:
            damage(place, refusal.damage)
        before = files_of(place)
        result = programs.command(*shlex.split(command))
        message = one_line(result)
        code = getattr(result.exception.__cause__, "code", "other")
        assert f"{result.exit_code} {code}".removesuffix(" usage") == refusal.codes
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert files_of(place) == before
    finally:
        if intact is not None:
            damaged.write_bytes(intact)
    message = message.replace("x" * 300, "<300 x>").replace(str(place), "HERE")
    if request.config.getoption("--update-messages") and refusal.message:
        old, new = ("\n".join([f"$ {refusal.command}".rstrip(), f"{refusal.codes} error: {words}"])
                    for words in (refusal.message, message))  # fmt: skip
        head = f"with {refusal.damage}\n" if refusal.damage else ""
        MESSAGES.write_text(MESSAGES.read_text().replace(head + old + "\n", head + new + "\n"))
    else:
        assert refusal.message in ("", message)


ESTIMATE = "estimate --checkpoint_path tiny --device L4"

WRITERS = {  # commands that print, and the files that they write as well
    "schemes --list": (),
    "metrics --baseline sweep:none --target sweep:int8wo --json new.json": ("new.json",),
    "latency tables sweep": (),
    "recommend --from ab": (),
    f"{ESTIMATE} --json new.json": ("new.json",),
}


@pytest.mark.parametrize("command", WRITERS)
def test_files_are_written_before_a_full_stdout_is(place, monkeypatch, capsys, command):
    before = files_of(place)
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            commands.main(shlex.split(command), prog_name="quantbench")
        with contextlib.suppress(OSError):
            full.close()
    error = capsys.readouterr().err.splitlines()[-1]
    new = files_of(place).keys() - before.keys()
    for name in new:
        (place / name).unlink()
    assert end.value.code == 1 and new == set(WRITERS[command])
    assert error == "error: cannot write to stdout: No space left on device"
