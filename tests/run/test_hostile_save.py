"""--save removes what an unfinished save of ours has left in its folder, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantbench import unfinished
from quantbench.errors import CheckpointError
from quantbench.run.checks import check_save
from quantbench.unfinished import NAME, Unfinished
from tests.programs import ROOT, command

SAVE = "--quantization int8wo --num_samples 1 --device cpu --max_new_tokens 1 --write_result none"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(folder: Path) -> None:
    """What a killed save leaves."""
    folder.mkdir(exist_ok=True)
    marker = Unfinished(folder)
    marker.create("tokenizer.json", lambda path: path.write_text("{}"))
    marker.create("original/tokenizer.model", lambda path: path.write_text("x"))
    (folder / "experts.safetensors").write_text("half")
    marker.note("experts.safetensors", folder / "experts.safetensors")
    (folder / "experts.safetensors").write_text("whole")
    (marker.scratch / "quantized-00001.safetensors").write_text("half")
    (marker.scratch / ".tmp1234").write_text("half")
    marker.finish()  # the process has ended, and its lock with it


def test_what_a_killed_save_left_is_removed(tmp_path):
    folder = tmp_path / "mine"
    killed(folder)
    before = contents(folder)
    check_save(str(folder))
    assert contents(folder) == before and len(before) == 6
    marker = Unfinished(folder)
    assert sorted(folder.iterdir()) == sorted([folder / NAME, marker.scratch])
    marker.last("quantbench.json", lambda path: path.write_text("{}"))
    assert [path.name for path in folder.iterdir()] == ["quantbench.json"]
    marker.clear()
    assert contents(folder)


THEIRS = (
    *("model-00001-of-00002.safetensors", "generation_config.json", "chat_template.jinja"),
    *("quantized-00001.safetensors", "quantized-mine.safetensors", "original/tokenizer.model"),
    *("tokenizer.json", "quantbench.json", "original/notes", ".0123456789abcdef.unfinished/x"),
)
MARKERS = {
    "empty": "",
    "text": "mine\n",
    "json": "{}\n",
    "null": '{"process": 1, "scratch": null}\n',
    "list": '{"process": 1, "scratch": "x"}\n[]\n',
    "names": json.dumps({"process": 1, "scratch": ".."})
    + "\n"
    + "".join(json.dumps({"name": name}) + "\n" for name in THEIRS),
}


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("name", THEIRS)
def test_a_marker_is_no_leave_to_delete(tmp_path, marker, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    (tmp_path / NAME).write_text(MARKERS[marker])
    before = contents(tmp_path)
    for check in (check_save, Unfinished):
        with pytest.raises(CheckpointError, match="give a new folder"):
            check(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("change", ["added", "replaced", "grown", "linked", "copied"])
def test_a_file_that_came_later_is_kept(tmp_path, change):
    folder = tmp_path / "mine"
    killed(folder)
    path = folder / "tokenizer.json"
    match change:
        case "added":
            path = folder / "notes.txt"
            path.write_text("mine")
        case "replaced":
            (tmp_path / "other").write_text("ab")
            (tmp_path / "other").rename(path)
        case "grown":
            path.write_text("longer")
        case "linked":
            path.unlink()
            path.symlink_to(folder / NAME)
        case "copied":
            path.rename(tmp_path / "original")
            path.write_bytes((tmp_path / "original").read_bytes())
    before = contents(folder)
    for check in (check_save, Unfinished):
        with pytest.raises(CheckpointError, match=path.name):
            check(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("kind", ["link", "hard link", "dangling", "fifo", "folder"])
def test_a_marker_that_is_no_file_is_refused(tmp_path, kind):
    folder, mine = tmp_path / "folder", tmp_path / "mine"
    folder.mkdir()
    mine.write_text('{"process": 1, "scratch": ""}\n')
    match kind:
        case "link":
            (folder / NAME).symlink_to(mine)
        case "hard link":
            (folder / NAME).hardlink_to(mine)
        case "dangling":
            (folder / NAME).symlink_to(tmp_path / "nowhere")
        case "fifo":
            os.mkfifo(folder / NAME)
        case "folder":
            (folder / NAME).mkdir()
    before = mine.read_text()
    for check in (check_save, Unfinished):
        with pytest.raises((CheckpointError, OSError)):
            check(folder)
    assert mine.read_text() == before and not (tmp_path / "nowhere").exists()


def test_two_processes_do_not_save_into_one_folder(tmp_path):
    marker = Unfinished(tmp_path)
    for check in (check_save, unfinished.check, Unfinished):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} saves there now"):
            check(tmp_path)
    marker.clear()
    assert not any(tmp_path.iterdir())


def test_a_save_is_killed_and_repeated(tmp_path):
    given = ["generate", *SAVE.split(), "--save", str(tmp_path / "mine")]
    run = subprocess.Popen(
        [sys.executable, "-m", "quantbench", *given], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    while not (tmp_path / "mine" / NAME).exists() and run.poll() is None:
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert (tmp_path / "mine" / NAME).exists()
    assert command(*given).exit_code == 0
    assert not [path for path in (tmp_path / "mine").iterdir() if "unfinished" in path.name]
