"""The slow tier: all experts of a model, each a run of bytes, on disk or in RAM.

    slow = new_file(folder)                     # RAM over disk, in a file of this run
    slow = saved_file(folder, keys, n)          # RAM over disk, in the file that --save has left
    slow = Memory(pinned=True)                  # a card over RAM
    slow.put((layer, expert), block)            # while the model is loaded
    slow.read((layer, expert), buffer)          # afterwards; raises TierError
    slow.in_place((layer, expert))              # the bytes themselves, to compute with them there

On disk the experts are the tensors `layers.L.experts.E` of a safetensors file. Each starts at a
multiple of a page and is read past the page cache (O_DIRECT), so that no page of it is in memory
twice. If the file system does not support O_DIRECT, its pages are dropped after each read.
"""

import contextlib
import errno
import itertools
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantbench import files
from quantbench.errors import TierError
from quantbench.experts.layout import whole_pages
from quantbench.models.formats.saved import EXPERTS
from quantbench.text import size

Key = tuple[int, int]  # the number of a layer and of an expert in it


def pages(nbytes: int) -> Tensor:
    """A buffer (nbytes,) uint8 that starts at a page, as O_DIRECT needs; the system allocates its
    memory when it is first written."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def numbers_of(tensor: Tensor) -> memoryview:
    """The integers of a tensor (N,) where they lie; faster to read than through the tensor."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


class File:
    """A safetensors file of experts on a disk."""

    name = "disk"

    def __init__(self, path: Path, flags: int, place: Path, where: str, kept: bool = False) -> None:
        """flags: of os.open. place: shown to the user. where: starts the messages of errors. kept:
        whether --save leaves it. Raises OSError."""
        self.where, self.kept = where, kept
        self.buffered = os.open(path, flags | os.O_CLOEXEC, 0o666)  # through the page cache
        self.direct: int | None = None  # past it
        with contextlib.suppress(OSError, AttributeError):  # not every file system allows that
            self.direct = os.open(path, flags & os.O_ACCMODE | os.O_DIRECT | os.O_CLOEXEC)
        self.file = self.buffered if self.direct is None else self.direct
        weakref.finalize(
            self, lambda opened: list(map(os.close, opened)), {self.buffered, self.file}
        )
        reading = "pages dropped after each read" if self.direct is None else "past the page cache"
        self.place = f"{place}, {reading}"
        self.starts: dict[Key, int] = {}
        self.nbytes = self.end = 0
        self._mapping: mmap.mmap | None = None

    # ------------------------------------------------------------------------------ writing

    def lay_out(self, keys: Sequence[Key], nbytes: int) -> bytes:
        """Note where each expert of nbytes is. Returns the file's start, whole pages: the length of
        a JSON object, and the object.

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
        start = whole_pages(8 + len(text))
        self.nbytes, self.end = nbytes, start + nbytes * len(keys)
        self.starts = {key: start + i * nbytes for i, key in enumerate(keys)}
        return (start - 8).to_bytes(8, "little") + text.ljust(start - 8)

    def reserve(self, keys: Sequence[Key], nbytes: int) -> None:
        """Make room for these experts of nbytes each. Raises TierError."""
        header = self.lay_out(keys, nbytes)
        with _writing(self.where, self.end):
            try:
                os.posix_fallocate(self.buffered, 0, self.end)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        block = pages(len(header))
        block.numpy()[:] = bytearray(header)
        self._write(numbers_of(block), 0)

    def put(self, key: Key, block: Tensor) -> None:
        """Store an expert's bytes, in a buffer of `pages`. Raises TierError."""
        self._write(numbers_of(block), self.starts[key])

    def _write(self, data: memoryview, start: int) -> None:
        done = 0
        with _writing(self.where, self.end):
            while done < len(data):
                done += os.pwrite(self.file, data[done:], start + done)
            if self.direct is None:
                os.fdatasync(self.file)  # only pages that are on the disk can be dropped
                os.posix_fadvise(self.file, start, len(data), os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Wait until all experts are on the disk. Raises TierError."""
        with _writing(self.where, self.end):
            os.fsync(self.buffered)

    # ------------------------------------------------------------------------------ reading

    def read(self, key: Key, buffer: Tensor) -> None:
        """Copy an expert's bytes into a buffer of the fast tier. Raises TierError."""
        start, data, done = self.starts[key], numbers_of(buffer), 0
        while done < self.nbytes:
            try:
                count = os.preadv(self.file, [data[done:]], start + done)
            except OSError as error:
                raise self.read_error(error) from None
            if count == 0:
                raise self.read_error()
            done += count
        if self.direct is None:
            os.posix_fadvise(self.file, start, self.nbytes, os.POSIX_FADV_DONTNEED)

    def read_error(self, error: OSError | None = None) -> TierError:
        """The error for a read that failed; None: it returned too few bytes."""
        truncated = os.fstat(self.buffered).st_size < self.end
        if error is None or truncated:  # past the end O_DIRECT fails with other errors
            why = "was truncated while the run used it; run again, and leave the file alone"
        else:
            why = f"cannot be read: {error.strerror}; give --expert_folder on another disk"
        return TierError(f"{self.where}: the experts' file {why}")

    def in_place(self, key: Key) -> Tensor:
        """The bytes in a mapping of the file: the system reads its pages when they are used, and
        caches them while memory is free."""
        self.check()
        if self._mapping is None:  # private, so that torch may consider it writable
            self._mapping = mmap.mmap(self.buffered, self.end, mmap.MAP_PRIVATE)
        return torch.frombuffer(
            self._mapping, dtype=torch.uint8, count=self.nbytes, offset=self.starts[key]
        )

    def drop(self) -> None:
        """Drop all experts from the page cache, so that computing in place reads the disk."""
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.buffered, 0, self.end, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """Raise TierError if the file was truncated: reading its mapping would end the process
        with a signal."""
        if os.fstat(self.buffered).st_size < self.end:
            raise self.read_error()


def new_file(folder: Path, kept: bool = False) -> File:
    """A file without a name, which the system removes when this process ends; with `kept`, the
    file of experts in the folder of --save. Raises TierError."""
    where = f"{'--save' if kept else '--expert_folder'} {folder}"
    with _writing(where):
        folder.mkdir(parents=True, exist_ok=True)
        if kept:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            return File(folder / EXPERTS, flags, folder, where, kept)
        with tempfile.NamedTemporaryFile(dir=folder) as named:  # whose name ends here
            return File(Path(named.name), os.O_RDWR, folder, where)


class Unusable(Exception):
    """A saved file holds no experts that this run can use; the reason, without a full stop."""


def saved_file(folder: Path, keys: Sequence[Key], nbytes: int) -> File:
    """The file of experts that a run with --save wrote into the model folder; it is only read.

    keys: of all experts of the saved model. nbytes: of each in the form of this run's kernels.
    Raises Unusable for a file that is not what was saved, or has another form.
    """
    path = folder / EXPERTS
    if reason := files.problem(path):
        raise Unusable(f"{path}: {reason}")
    file = File(path, os.O_RDONLY, path, str(path))
    header = file.lay_out(keys, nbytes)
    try:
        status = os.fstat(file.buffered)
        if os.pread(file.buffered, len(header), 0) != header or status.st_size > file.end:
            raise Unusable(f"{path} has another form than this run's kernels read")
        if status.st_size < file.end:
            raise Unusable(f"{path} was truncated: {status.st_size} of {file.end} bytes")
    except (OSError, TierError) as error:
        raise Unusable(f"{path}: {files.reason(path, error)}") from None
    return file


@contextlib.contextmanager
def _writing(where: str, nbytes: int = 0) -> Iterator[None]:
    """Raise TierError for a failure to write. nbytes: of all experts; 0: not known yet."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = f"the experts take {size(nbytes)}; " if full and nbytes else ""
        raise TierError(
            f"{where}: the experts' file cannot be written: {error.strerror}; {advice}"
            "name a folder on a disk with room for them"
        ) from None


class Ram:
    """RAM, under the memory of a card, or of the CPU in its place."""

    name = "RAM"

    def __init__(self, pinned: bool) -> None:
        """pinned: whether to lock the pages, so that the card itself copies from them."""
        self.pinned = pinned
        self.place = "locked pages" if pinned else "ordinary memory"
        self.blocks: dict[Key, Tensor] = {}

    def reserve(self, keys: Sequence[Key], nbytes: int) -> None:
        """One allocation for each layer. Raises TierError if its pages cannot be locked."""
        for _, group in itertools.groupby(keys, key=lambda key: key[0]):
            of_layer = list(group)
            block = pages(nbytes * len(of_layer))
            if self.pinned:
                self._lock(block)
            self.blocks |= dict(zip(of_layer, block.view(-1, nbytes), strict=True))

    def _lock(self, block: Tensor) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if code := int(runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0)):
            raise TierError(
                f"cannot lock {size(block.numel())} of RAM for the card (CUDA error {code}); a "
                "smaller --quantization takes less"
            )
        weakref.finalize(self, lambda: runtime.cudaHostUnregister(block.data_ptr()))

    def put(self, key: Key, block: Tensor) -> None:
        self.blocks[key].copy_(block)

    def read(self, key: Key, buffer: Tensor) -> None:
        buffer.copy_(self.blocks[key], non_blocking=self.pinned)

    def in_place(self, key: Key) -> Tensor:
        return self.blocks[key]

    def drop(self) -> None:
        """Nothing: RAM has no page cache."""

    def check(self) -> None:
        """Nothing: RAM is never truncated."""


SlowTier = File | Ram  # which holds all experts
