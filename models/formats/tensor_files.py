"""The tensors of one file: safetensors, or a PyTorch pickle."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.ops.formats import Packed

if TYPE_CHECKING:
    from quantbench.models.formats.packed import PackedForm

_MAPPED_BYTES = 256 << 20  # bytes of a pickle that are read before it is mapped anew
_OPENED_BYTES = 1 << 20  # of a safetensors file
_SMALL = 1024  # bytes of a tensor that is read at once
_DTYPES = {  # of weights that are quantized, by safetensors' names
    **{"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8},
}
# What torch says of a pickle that would run code.
_WANTS_CODE = re.compile(r"\bGLOBAL\b|allowed global|Trying to ")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet."""

    file: Path  # the file that holds it
    read: Callable[[], Tensor]  # reads it; the result may be a view of the mapped file
    # How the file holds it quantized, and what reads that; None: it is a plain tensor.
    form: PackedForm | None = None
    packed: Callable[[], Packed] | None = None
    # Its shape and dtype, on the meta device; the tensor itself, if it is small. None: not known.
    like: Tensor | None = None


def safetensors_file(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, not read yet. Raises CheckpointError if it is damaged."""
    _require_readable(file, "safetensors opens")
    try:
        with safe_open(file, framework="pt") as opened:
            likes = {key: _like(opened, key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is damaged or no safetensors file ({error}); an unfinished download or a Git "
            "LFS pointer looks like this: fetch it again"
        ) from None

    opened = _Safetensors(file)
    return {
        key: StoredTensor(file, functools.partial(opened.read, key), like=like)
        for key, like in likes.items()
    }


@dataclass
class _Safetensors:
    """A file that is mapped anew after every _OPENED_BYTES that were read: pages of a mapped file
    count as this process's memory. Opening it for every tensor would parse the names of all."""

    file: Path
    mapped: safe_open | None = None
    bytes_read: int = 0  # since the file was mapped

    def read(self, name: str) -> Tensor:
        mapped = self.mapped or safe_open(self.file, framework="pt")
        tensor = mapped.get_tensor(name)
        read = self.bytes_read + tensor.nbytes
        self.mapped, self.bytes_read = (None, 0) if read > _OPENED_BYTES else (mapped, read)
        return tensor


def metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file; {} for a file of another kind."""
    if file.suffix != ".safetensors":
        return {}
    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {}


def _like(opened: safe_open, name: str) -> Tensor | None:
    tensor = opened.get_slice(name)
    dtype, shape = _DTYPES.get(tensor.get_dtype()), tensor.get_shape()
    if dtype is None:
        return None
    if dtype.itemsize * math.prod(shape) <= _SMALL:
        return opened.get_tensor(name).clone()  # which is no view of the mapped file
    return torch.empty(shape, dtype=dtype, device="meta")


def drop_pages(paths: Sequence[Path]) -> None:
    """Take files that were read out of the system's page cache, as far as nobody maps them."""
    for path in paths:
        with contextlib.suppress(OSError, AttributeError):
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(opened)


def pickle_file(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a PyTorch pickle, not read yet.

    Raises CheckpointError if it is damaged, or holds anything but tensors.
    """
    opened = _Pickle(file, _state_dict(file))
    return {
        name: StoredTensor(file, functools.partial(opened.read, name)) for name in opened.tensors
    }


@dataclass
class _Pickle:
    """A state_dict mapped from a file, and mapped anew after every _MAPPED_BYTES that were read.

    Pages of a mapped file count as this process's memory until the file is unmapped. Opening a
    pickle takes some milliseconds, too many for every tensor. Files older than PyTorch 1.6 cannot
    be mapped and are read as a whole.
    """

    file: Path
    tensors: dict[str, Tensor]
    bytes_read: int = 0  # since the file was mapped

    def read(self, name: str) -> Tensor:
        if self.bytes_read > _MAPPED_BYTES and _is_zip(self.file):
            self.tensors, self.bytes_read = _state_dict(self.file), 0
        tensor = self.tensors[name]
        self.bytes_read += tensor.numel() * tensor.itemsize  # sparse tensors have no nbytes
        return tensor


def _state_dict(file: Path) -> dict[str, Tensor]:
    """The tensors in a pickle, mapped. Raises CheckpointError if it is damaged or holds anything
    but tensors."""
    _require_readable(file, "torch maps")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        if isinstance(error, pickle.UnpicklingError) and _WANTS_CODE.search(str(error)):
            raise CheckpointError(
                f"{file} holds more than weights, and loading it could run code: refused; save its "
                "state_dict alone, or as safetensors"
            ) from None
        raise CheckpointError(
            f"{file} is damaged or no PyTorch checkpoint; fetch it again"
        ) from None
    # Exactly these types: a subclass is a tensor that another tool quantized.
    plain = (Tensor, torch.nn.Parameter)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and type(tensor) in plain for name, tensor in content.items()
    ):
        raise CheckpointError(f"{file} holds no state_dict of plain tensors")
    return content


def _require_readable(file: Path, opens: str) -> None:
    """Raise CheckpointError for what is no regular file, or has a path that `opens`, the library
    and its verb, does not take: what they say of either is that the content is damaged."""
    if why := files.problem(file):
        raise CheckpointError(f"cannot read {file}: {why}")
    try:
        str(file).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"cannot read {file}: {opens} no path that is not UTF-8; rename its folder"
        ) from None


def _is_zip(file: Path) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except OSError:
        return False
