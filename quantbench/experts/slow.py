"""The slow tier: all experts of a model, each a run of bytes, on disk or in RAM.

    slow = Disk(folder)                     # RAM over disk, in a file of the run's own
    slow = Saved(folder, saved, keys, n)    # RAM over disk, in the file that --save has left
    slow = Memory(pinned=True)              # a card over RAM
    slow.put((layer, expert), block)        # while the model is loaded
    slow.read((layer, expert), buffer)      # afterwards; raises TierError
    slow.in_place((layer, expert))          # the bytes where they lie, to compute with them there

On disk the experts are the tensors `layers.L.experts.E` of a safetensors file. Each begins at a
multiple of a page and is read past the page cache (O_DIRECT), so that no page of it is in memory
twice. Where the file system knows no O_DIRECT, its pages are dropped after each read.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantbench import files
from quantbench.errors import TierError
from quantbench.experts.layout import PAGE
from quantbench.models.formats.saved import EXPERTS, SavedExperts
from quantbench.text import size

Key = tuple[int, int]  # the number of a layer and of an expert in it
PREFIX = "experts-"  # of the file's name


def pages(nbytes: int) -> Tensor:
    """A buffer (nbytes,) uint8 that begins at a page, as O_DIRECT needs; its memory is taken when
    it is first written."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor (N,) uint8, not copied."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def cut(whole: Tensor, nbytes: int) -> list[Tensor]:
    """Views of nbytes each."""
    return [whole[start : start + nbytes] for start in range(0, len(whole), nbytes)]


class File:
    """A safetensors file of experts on a disk, and how they are read."""

    name = "disk"

    def __init__(self, path: Path, opened: int, where: str) -> None:
        """opened: the file, through the page cache. where: what names its place in messages."""
        self.path = path.absolute()  # whatever folder the process is in at its end
        self.where = where
        self.buffered, self.direct = opened, _direct(self.path, fcntl.fcntl(opened, fcntl.F_GETFL))
        self.opened = [opened] if self.direct is None else [opened, self.direct]
        self.starts: dict[Key, int] = {}
        self.nbytes = self.end = 0
        self._mapping: mmap.mmap | None = None

    @property
    def place(self) -> str:
        how = "past the page cache" if self.direct is not None else "pages dropped after each read"
        return f"{self._shown_place()}, {how}"

    def _shown_place(self) -> str:
        return str(self.path)

    def reserve(self, keys: Sequence[Key], nbytes: int) -> None:
        """Make room for these experts of nbytes each. Raises TierError."""
        raise NotImplementedError

    def put(self, key: Key, block: Tensor) -> None:
        """Keep an expert's bytes. Raises TierError."""
        raise NotImplementedError

    def _lay_out(self, keys: Sequence[Key], nbytes: int) -> bytes:
        """Note where each expert of nbytes is; returns the file's beginning."""
        header = _header(keys, nbytes)
        self.nbytes, self.end = nbytes, len(header) + nbytes * len(keys)
        self.starts = {key: len(header) + i * nbytes for i, key in enumerate(keys)}
        return header

    def read(self, key: Key, buffer: Tensor) -> None:
        """Copy an expert's bytes into a buffer of the fast tier. Raises TierError."""
        start, data = self.starts[key], as_bytes(buffer)
        file = self.buffered if self.direct is None else self.direct
        done = 0
        while done < self.nbytes:
            try:
                count = os.preadv(file, [data[done:]], start + done)
            except OSError as error:
                raise self.read_error(error) from None
            if count == 0:
                raise self._truncated()
            done += count
        if self.direct is None:
            os.posix_fadvise(file, start, self.nbytes, os.POSIX_FADV_DONTNEED)

    def read_error(self, error: OSError | None) -> TierError:
        """What to say of a read that failed, or that gave too few bytes (None)."""
        try:
            self.check()  # behind a new end of the file, O_DIRECT fails with other errors
        except TierError as truncated:
            return truncated
        if error is None:
            return self._truncated()
        return TierError(
            f"{self.where}: the experts' file cannot be read: {error.strerror}; give "
            "--expert_folder on another disk"
        )

    def in_place(self, key: Key) -> Tensor:
        """The bytes in a mapping of the file: the system reads its pages when they are used, and
        keeps them in its page cache as long as it likes."""
        self.check()
        if self._mapping is None:  # private, so that torch may take it to be writable
            self._mapping = mmap.mmap(self.buffered, self.end, mmap.MAP_PRIVATE)
        return torch.frombuffer(
            self._mapping, dtype=torch.uint8, count=self.nbytes, offset=self.starts[key]
        )

    def drop(self, key: Key) -> None:
        """Let the next computing in place find nothing in a cache of the system."""
        start = self.starts[key]
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, self.nbytes)
        os.posix_fadvise(self.buffered, start, self.nbytes, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """Raise TierError where the file is cut short: mapped, it would end the process with a
        signal."""
        if os.fstat(self.buffered).st_size < self.end:
            raise self._truncated()

    def _truncated(self) -> TierError:
        return TierError(
            f"{self.where}: {self.path.name} was truncated while the run used it; "
            "run again, and leave the file alone"
        )


class Disk(File):
    """A file that this process writes in a folder and no other uses. It is removed at the end,
    unless it is kept."""

    def __init__(self, folder: Path, kept: bool = False) -> None:
        """kept: whether `keep` will be called, for the folder of --save.

        Raises TierError if no file can be made there.
        """
        self.folder, self.kept = folder, kept
        where = f"{'--save' if kept else '--expert_folder'} {folder}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            file, path = tempfile.mkstemp(".safetensors", PREFIX, folder)
        except OSError as error:
            raise not_written(where, error, 0) from None
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says that the file is in use
        super().__init__(Path(path), file, where)
        self.close = weakref.finalize(self, _close, self.opened, self.path)
        self.sums: dict[Key, int] = {}  # of what is written to be kept

    def _shown_place(self) -> str:
        return str(self.folder)

    def reserve(self, keys: Sequence[Key], nbytes: int) -> None:
        header = self._lay_out(keys, nbytes)
        try:
            os.posix_fallocate(self.buffered, 0, self.end)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise self._gives_up(error) from None
        header_block = pages(len(header))
        header_block.numpy()[:] = bytearray(header)
        self._write(as_bytes(header_block), 0)

    def put(self, key: Key, block: Tensor) -> None:
        data = as_bytes(block)
        if self.kept:
            self.sums[key] = zlib.crc32(data)
        self._write(data, self.starts[key])

    def _write(self, data: memoryview, start: int) -> None:
        """Write whole pages from a buffer of `pages`; those that went through the page cache are
        dropped from it."""
        file = self.buffered if self.direct is None else self.direct
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(file, data[done:], start + done)
            if self.direct is None:
                os.fdatasync(file)
                os.posix_fadvise(file, start, len(data), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._gives_up(error) from None

    def keep(self) -> SavedExperts:
        """Leave the file behind when the process ends; returns what a later run knows it by.

        Raises TierError.
        """
        try:
            os.fsync(self.buffered)
            path = self.path.with_name(EXPERTS)
            os.rename(self.path, path)
            modified = os.fstat(self.buffered).st_mtime_ns
        except OSError as error:
            raise self._gives_up(error) from None
        self.path = path
        self.close.detach()
        self.close = weakref.finalize(self, _close, self.opened, None)
        fcntl.flock(self.buffered, fcntl.LOCK_UN)
        return SavedExperts([self.sums[key] for key in self.starts], modified)

    def _gives_up(self, error: OSError) -> TierError:
        """What could not be written leaves nothing behind."""
        self.close()
        return not_written(self.where, error, self.end)


def not_written(where: str, error: OSError, nbytes: int) -> TierError:
    """What to say of a file that cannot be written. nbytes: of all experts; 0: not known yet."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = f"the experts take {size(nbytes)}; " if full and nbytes else ""
    return TierError(
        f"{where}: the experts' file cannot be written: {error.strerror}; {advice}"
        "name a folder on a disk with room for them"
    )


class Unusable(Exception):
    """A saved file holds no experts that this run can use; the reason, without a full stop."""


class Saved(File):
    """The file of experts that a run with --save wrote into the model folder. It is only read."""

    def __init__(self, folder: Path, saved: SavedExperts, keys: Sequence[Key], nbytes: int) -> None:
        """keys: of all experts of the saved model. nbytes: of each in the form of this run's
        kernels. Raises Unusable for a file that is not what was saved, or has another form."""
        path = folder / EXPERTS
        if reason := files.problem(path):
            raise Unusable(f"{path}: {reason}")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        super().__init__(path, opened, str(path))
        self.close = weakref.finalize(self, _close, self.opened, None)
        header = self._lay_out(keys, nbytes)
        try:
            self._require(saved, header)
        except Unusable:
            self.close()
            raise
        except (OSError, TierError) as error:
            self.close()
            raise Unusable(f"{path}: {files.reason(path, error)}") from None

    def _require(self, saved: SavedExperts, header: bytes) -> None:
        status, known = os.fstat(self.buffered), dict(zip(self.starts, saved.sums, strict=False))
        if status.st_size < self.end and os.pread(self.buffered, len(header), 0) == header:
            raise Unusable(f"{self.path} was truncated: {status.st_size} of {self.end} bytes")
        if os.pread(self.buffered, len(header), 0) != header or status.st_size != self.end:
            raise Unusable(f"{self.path} has another form than this run's kernels read")
        if status.st_mtime_ns == saved.modified:
            return
        buffer = pages(self.nbytes)  # a copy has another date; or somebody has changed the file
        for key in self.starts:
            self.read(key, buffer)
            if zlib.crc32(as_bytes(buffer)) != known.get(key):
                raise Unusable(f"{self.path} was changed: expert {key[1]} of layer {key[0]}")

    def reserve(self, keys: Sequence[Key], nbytes: int) -> None:
        """The experts are there already."""

    def put(self, key: Key, block: Tensor) -> None:
        """The experts are there already."""


def _header(keys: Sequence[Key], nbytes: int) -> bytes:
    """The beginning of a safetensors file: the length of a JSON object, and it; whole pages.

    https://github.com/huggingface/safetensors#format; JSON may end with spaces.
    """
    table = {
        f"layers.{layer}.experts.{expert}": {
            "dtype": "U8",
            "shape": [nbytes],
            "data_offsets": [i * nbytes, (i + 1) * nbytes],
        }
        for i, (layer, expert) in enumerate(keys)
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _direct(path: Path, flags: int) -> int | None:
    """The file opened past the page cache; None where the file system does not allow that.

    flags: as it is opened through the cache, to be read or to be written, too.
    """
    with contextlib.suppress(OSError, AttributeError):
        return os.open(path, flags & os.O_ACCMODE | os.O_DIRECT | os.O_CLOEXEC)
    return None


def _close(opened: Sequence[int], path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)
    for file in opened:
        os.close(file)


def _remove_abandoned(folder: Path) -> None:
    """Remove the files of processes that were killed: those that nobody holds a lock on."""
    for path in folder.glob(f"{PREFIX}*.safetensors"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


class Memory:
    """RAM, under the memory of a card, or of the CPU in its place."""

    name = "RAM"

    def __init__(self, pinned: bool) -> None:
        """pinned: whether to lock the pages, so that a card copies from them by itself."""
        self.pinned = pinned
        self.nbytes = 0
        self.blocks: dict[Key, Tensor] = {}
        self.locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self.locked)

    @property
    def place(self) -> str:
        return "locked pages" if self.pinned else "ordinary memory"

    def reserve(self, keys: Sequence[Key], nbytes: int) -> None:
        """One allocation for each layer. Locking pages that are not there is a TierError."""
        self.nbytes = nbytes
        layers: dict[int, list[Key]] = {}
        for key in keys:
            layers.setdefault(key[0], []).append(key)
        for of_layer in layers.values():
            whole = pages(nbytes * len(of_layer))
            if self.pinned:
                _lock(whole)
                self.locked.append(whole)
            self.blocks |= dict(zip(of_layer, cut(whole, nbytes), strict=True))

    def put(self, key: Key, block: Tensor) -> None:
        self.blocks[key].copy_(block)

    def read(self, key: Key, buffer: Tensor) -> None:
        buffer.copy_(self.blocks[key], non_blocking=self.pinned)

    def in_place(self, key: Key) -> Tensor:
        return self.blocks[key]

    def drop(self, key: Key) -> None:
        pass

    def check(self) -> None:
        pass


SlowTier = File | Memory  # where all experts lie


def _lock(memory: Tensor) -> None:
    """Lock a buffer's pages for a CUDA card. Raises TierError."""
    runtime: Any = torch.cuda
    code = runtime.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise TierError(
            f"cannot lock {size(memory.numel())} of RAM for the card (CUDA error {int(code)}); "
            "a smaller --quantization takes less"
        )


def _unlock(locked: Sequence[Tensor]) -> None:
    runtime: Any = torch.cuda
    for memory in locked:
        runtime.cudart().cudaHostUnregister(memory.data_ptr())
