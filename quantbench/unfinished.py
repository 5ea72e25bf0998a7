"""The marker of a save that has not finished: quantbench.json.unfinished.

    marker = Unfinished(folder)             # removes what an earlier save left there, and no more
    marker.create("tokenizer.json", write)  # a file of this save
    marker.last("quantbench.json", write)   # the folder is whole

The marker's first line names the process and a scratch folder, in which files are written; each
further line a file that was moved out of it: name, inode and bytes. A later save removes these. A
folder that holds anything else is refused, and left as it is. The process holds a lock on the
marker, so that no second one saves there.
"""

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.models import SAVED
from quantbench.text import shown
from quantbench.typed_json import parsed

NAME = f"{SAVED}.unfinished"
SCRATCH = re.compile(r"\.[0-9a-f]{16}\.unfinished")
SUBFOLDER = "original"  # of a tokenizer
FACTS = "model.json"  # with a model for an arm's next process (run/saved_model.py)
KEPT = re.compile(rf"{FACTS}|{SAVED}|quantized-\d{{5}}\.safetensors")
Write = Callable[[Path], object]


class Unfinished:
    def __init__(self, folder: Path) -> None:
        """The folder exists. Raises CheckpointError where it holds anything but an unfinished save,
        or another process saves there; OSError where it cannot be written."""
        self.folder = folder
        flags = os.O_RDWR | os.O_APPEND
        if not any(folder.iterdir()):
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.close(files.opened(folder / NAME, flags | os.O_CREAT | os.O_EXCL))
        self.descriptor = _locked(folder, flags)
        self.made = []
        try:
            self.made = _left_over(folder, self.descriptor)  # files, and then their folders
            self._remove()
            os.ftruncate(self.descriptor, 0)
            self.scratch = folder / f".{secrets.token_hex(8)}.unfinished"
            self._append({"process": os.getpid(), "scratch": self.scratch.name})
            self.scratch.mkdir()
        except BaseException:
            self.finish()
            raise

    def create(self, name: str, write: Write) -> None:
        """Call `write` with a path, where it makes the file of this name. Raises OSError."""
        scratch, path = self._written(name, write), self.folder / name
        if path.parent != self.folder:
            path.parent.mkdir(exist_ok=True)
        self.note(name, scratch, scratch.lstat().st_size)
        scratch.rename(path)

    def last(self, name: str, write: Write) -> None:
        """Make the file that makes the folder a checkpoint, and remove the marker."""
        self._written(name, write).rename(self.folder / name)
        self.scratch.rmdir()
        (self.folder / NAME).unlink()
        self.finish()

    def note(self, name: str, path: Path, size: int | None = None) -> None:
        """Note a file of this save. size: None where it is still being written."""
        self._append({"name": name, "inode": path.lstat().st_ino, "bytes": size})
        self.made.append(self.folder / name)

    def clear(self) -> None:
        """Remove all that this save made, unless it has finished."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                self.made += [*self.scratch.iterdir(), self.scratch, self.folder / SUBFOLDER]
            self._remove()
            with contextlib.suppress(OSError):
                (self.folder / NAME).unlink()
        self.finish()

    def finish(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _written(self, name: str, write: Write) -> Path:
        scratch = self.scratch / Path(name).name
        write(scratch)
        return scratch

    def _remove(self) -> None:
        for path in self.made:
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        self.made = []

    def _append(self, value: dict[str, Any]) -> None:
        os.write(self.descriptor, json.dumps(value).encode() + b"\n")


def check(folder: Path) -> None:
    """Raise CheckpointError unless the folder is empty, or holds an unfinished save and nothing
    else. Nothing is changed."""
    if any(folder.iterdir()):
        descriptor = _locked(folder, os.O_RDWR)
        try:
            _left_over(folder, descriptor)
        finally:
            os.close(descriptor)


def _locked(folder: Path, flags: int) -> int:
    """The marker, opened and locked."""
    try:
        descriptor = files.opened(folder / NAME, flags)
    except FileNotFoundError:
        raise CheckpointError(f"--save {folder}: the folder is not empty; give a new one") from None
    except OSError as error:
        why = files.reason(folder / NAME, error)
        raise CheckpointError(f"--save {folder}: its {NAME}: {why}; give a new folder") from None
    if files.take(descriptor):
        return descriptor
    holder = next((f"process {line['process']}" for line in _lines(descriptor)), "another process")
    os.close(descriptor)
    raise CheckpointError(f"--save {folder}: {holder} saves there now; give another folder")


def _lines(descriptor: int) -> list[dict[str, Any]]:
    """The marker's lines; none where it is not ours. The last may have been cut short by a kill."""
    data = os.pread(descriptor, files.MAX_BYTES, 0)
    try:
        lines = [parsed(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        head, *rest = lines or [{"process": 0, "scratch": ""}]
        is_ours = type(head["process"]) is int and isinstance(head["scratch"], str)
        is_ours = is_ours and all(isinstance(line["name"], str) for line in rest)
        return lines if is_ours else []
    except (ValueError, TypeError, LookupError):
        return []


def _left_over(folder: Path, descriptor: int) -> list[Path]:
    """What the save that this marker is of has left: files, and then their folders. Raises
    CheckpointError where the folder holds anything else."""
    head, *rest = _lines(descriptor) or [{"scratch": ""}]
    made = {line["name"]: (line.get("inode"), line.get("bytes")) for line in rest}
    scratch = head["scratch"] if SCRATCH.fullmatch(head["scratch"]) else None
    found, folders = [], []
    entries = [path for path in folder.iterdir() if path.name != NAME]
    for path in entries:  # which grow
        name, status = path.relative_to(folder).as_posix(), path.lstat()
        is_file = stat.S_ISREG(status.st_mode)
        if stat.S_ISDIR(status.st_mode) and name in (SUBFOLDER, scratch):
            folders.append(path)
            entries += path.iterdir()
        elif is_file and path.parent.name == scratch and path.parent.parent == folder:
            found.append(path)
        elif is_file and made.get(name) in ((status.st_ino, status.st_size), (status.st_ino, None)):
            found.append(path)
        else:
            raise CheckpointError(
                f"--save {folder}: it has {shown(name)}, which no unfinished save left there; give "
                "a new folder"
            )
    return [*found, *folders]


def remove(folder: Path) -> None:
    """Remove the model that an arm kept here, or what is left of one. Raises CheckpointError, and
    removes nothing, where the folder holds anything else or is reached by a link."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or folder.parent.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder} is a link, or no folder")
    if os.path.lexists(folder / NAME):
        Unfinished(folder).clear()
    entries = [*folder.iterdir()]
    for path in entries:
        if not KEPT.fullmatch(path.name) or not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"{folder} holds {shown(path.name)}, which is none of ours")
    for path in entries:
        path.unlink()
    folder.rmdir()
