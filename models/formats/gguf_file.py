"""What a GGUF file says of itself: its metadata, and where each of its tensors lies.

    file = GgufFile(Path("model-Q4_K_M.gguf"))
    file.metadata["general.architecture"]       # "llama"
    file.tensors["blk.0.attn_q.weight"].read()  # float32, (N, K)

The layout is llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The header is
read here, not by the gguf package: its reader takes 2.5 s for 49,152 tokens, and believes offsets
and counts. What the blocks of a quantized type mean is the package's.
"""

import contextlib
import functools
import math
import mmap
import re
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.models.config_checks import NAME, NAMES, POSITIVE, TRUTH, Accepts, list_of, whole
from quantbench.models.formats.gguf_blocks import PACKED
from quantbench.ops.formats import Packed
from quantbench.text import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # struct's letter by type
_STRING, _ARRAY = 8, 9
STACKED = "_exps"  # in names of tensors: all experts' matrices
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)")
_LEAST_TENSOR = 24  # bytes that the description of a tensor takes at least
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.int16}


_ID = whole(0)
_IDS = list_of(_ID, "a list of whole numbers")
_REALS = list_of(Accepts("", lambda value: type(value) in (int, float)), "a list of numbers")
_TYPES = {  # what else would fail far from here, or mean something else
    **dict.fromkeys(("general.architecture", "tokenizer.chat_template"), NAME),
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre"), NAME),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), NAMES),
    "tokenizer.ggml.scores": _REALS,
    "tokenizer.ggml.token_type": _IDS,
    **{f"tokenizer.ggml.{name}_token_id": _ID for name in ("bos", "eos", "eot", "eom", "unknown")},
    **{f"tokenizer.ggml.add_{name}": TRUTH for name in ("bos_token", "space_prefix")},
    "split.count": _ID,
}
_MODEL_TYPES = {  # behind "ARCHITECTURE."
    **dict.fromkeys(("block_count", "context_length", "embedding_length"), _ID),
    **dict.fromkeys(("attention.head_count", "attention.key_length", "rope.dimension_count"), _ID),
    **dict.fromkeys(("expert_count", "attention.sliding_window"), _ID),
    "rope.freq_base": POSITIVE,
    "rope.scaling.type": NAME,
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file, not read yet."""

    file: Path
    type: str  # of ggml: F32, Q4_K, …
    shape: tuple[int, ...]  # as torch has it: the last dimension is that of a row
    data: NDArray[np.uint8]  # its bytes, mapped: (…, bytes of a row)
    mapped: mmap.mmap  # of the whole file
    start: int  # of the data in the file

    def expert(self, number: int) -> "GgufTensor":
        """One of the matrices (E, N, K)."""
        start = self.start + number * self.data[0].nbytes
        return replace(self, shape=self.shape[1:], data=self.data[number], start=start)

    def read(self) -> Tensor:
        """The tensor in the file's own precision where that is a float, else in float32."""
        numbers = self._numbers()
        self._give_up()
        return numbers

    def packed(self) -> Packed:
        """The matrix (N, K) with the file's own codes and scales; of a type in PACKED."""
        with warnings.catch_warnings():  # torch's: the file is mapped to be read alone, as it is
            warnings.simplefilter("ignore", UserWarning)
            data = torch.from_numpy(self.data)
        weight = PACKED[self.type].read(data)
        self._give_up()
        return weight

    def _give_up(self) -> None:
        # Pages of a mapped file count as this process's memory until they are given up.
        page = self.start // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError, AttributeError):
            self.mapped.madvise(mmap.MADV_DONTNEED, page, self.start + self.data.nbytes - page)

    def _numbers(self) -> Tensor:
        if kind := _PLAIN.get(self.type):
            values = torch.from_numpy(self.data.view(kind).reshape(self.shape).copy())
            return values.view(torch.bfloat16) if self.type == "BF16" else values
        with np.errstate(over="ignore"):  # NVFP4's and MXFP4's scales may be infinite
            numbers = gguf.dequantize(self.data, gguf.GGMLQuantizationType[self.type])
        return torch.from_numpy(numbers.reshape(self.shape))


class GgufFile:
    """An opened file. Raises CheckpointError, one line, for one that is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.named("cannot read", path, CheckpointError):
            files.require_regular(path)
            with open(path, "rb") as opened:
                if opened.read(4) != MAGIC:
                    raise CheckpointError(f"{path} is no GGUF file; fetch it again")
                self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        try:
            version = self._scalar("I")
            if version not in VERSIONS:
                raise self._damaged(f"version {version} is not read; 2 and 3 are")
            tensors, keys = self._count(_LEAST_TENSOR), self._count(13)
            self.metadata: dict[str, Any] = {}
            for _ in range(keys):
                key = self._text()
                self.metadata[key] = self._value(self._scalar("I"))
            self._check_types()
            self.tensors = self._placed([self._described() for _ in range(tensors)])
        except struct.error:
            raise self._damaged("it ends within its header: fetch it again") from None

    def _check_types(self) -> None:
        prefix = f"{self.metadata.get('general.architecture')}."
        for key, value in self.metadata.items():
            accepts = _TYPES.get(key) or _MODEL_TYPES.get(key.removeprefix(prefix))
            if accepts:
                accepts.check(self.path, key, value)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why}")

    def _scalar(self, letter: str) -> Any:
        (value,) = struct.unpack_from(f"<{letter}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{letter}")
        return value

    def _count(self, least: int) -> int:
        """A number of things that take `least` bytes each, of which the file has room for all."""
        count: int = self._scalar("Q")
        if count * least > len(self._bytes) - self._at:
            raise self._damaged(
                f"it counts {count} entries, more than it has bytes for: fetch it again"
            )
        return count

    def _text(self) -> str:
        length = self._count(1)
        self._at += length
        return self._bytes[self._at - length : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            inner = self._scalar("I")
            if inner == _STRING:
                return [self._text() for _ in range(self._count(8))]
            letter = self._letter(inner)
            count = self._count(struct.calcsize(letter))
            values = struct.unpack_from(f"<{count}{letter}", self._bytes, self._at)
            self._at += struct.calcsize(f"<{count}{letter}")
            return list(values)
        return self._scalar(self._letter(kind))

    def _letter(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"metadata of type {kind} is not understood")
        return _SCALARS[kind]

    def _described(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of the next tensor."""
        name, dimensions = self._text(), self._scalar("I")
        if not 1 <= dimensions <= 4:
            raise self._damaged(f"tensor {shown(name)} has {dimensions} dimensions; 1 to 4 do")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _placed(self, listed: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise self._damaged(f"general.alignment {shown(alignment)} is no multiple of 8")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = 0  # of the tensor before
        for name, shape, number, offset in sorted(listed, key=lambda entry: entry[3]):
            which = f"tensor {shown(name)}"
            try:
                kind = gguf.GGMLQuantizationType(number)
            except ValueError:
                raise self._damaged(f"{which} is of type {number}, which is not known") from None
            values, size = gguf.GGML_QUANT_SIZES[kind]
            if not _is_read(kind.name):
                raise self._damaged(f"{which} is of type {kind.name}, which is not read")
            if name in tensors:
                raise self._damaged(f"{which} is there twice")
            if min(shape) < 1 or shape[-1] % values:
                raise self._damaged(f"{which}, {kind.name}, cannot have the shape {shape}")
            row, rows = shape[-1] // values * size, math.prod(shape[:-1])
            if offset % alignment or offset < end:
                raise self._damaged(f"{which} overlaps another, or lies between places")
            end = offset + row * rows
            if start + end > len(self._bytes):
                raise self._damaged(f"{which} lies past its end: fetch it again")
            data = np.frombuffer(self._bytes, np.uint8, row * rows, start + offset)
            data = data.reshape(*shape[:-1], row)
            tensors[name] = GgufTensor(
                self.path, kind.name, shape, data, self._bytes, start + offset
            )
        return tensors


@functools.cache
def _is_read(kind: str) -> bool:
    """Whether the gguf package knows what a type's blocks mean."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        gguf.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[number][1], np.uint8), number)
    except NotImplementedError:
        return kind in _PLAIN
    return True


def shards(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The files of a model of which `path` is one: model-00001-of-00003.gguf and so on.

    Raises CheckpointError where one of them is missing.
    """
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return [path]
    stem, dash, total = path.stem.rpartition("-of-")
    if type(count) is not int or not dash or not total.isdigit() or int(total) != count:
        raise CheckpointError(
            f"{path} is one of {shown(count)} parts, or these in one file: keep parts apart, as "
            f"name-00001-of-{count:05}.gguf"
            if type(count) is int
            else f"{path}: split.count {shown(count)} is no number"
        )
    names = [f"{stem[:-5]}{number:05}-of-{count:05}{path.suffix}" for number in range(1, count + 1)]
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise CheckpointError(f"{path.parent} lacks {missing[0]}, a part of {path.name}")
    return [path.parent / name for name in names]


def name_in_file(table: Any, name: str) -> str:
    """The file's name of a tensor that Hugging Face calls `name`; `name` where it has none. Expert
    3's part of a tensor that holds all experts is NAME[3].

    table: the gguf package's, of an architecture.
    """
    expert = _EXPERT.search(name)
    known = table.get_name(_EXPERT.sub("", name), try_suffixes=(".weight", ".bias")) or name
    return f"{known}[{expert[1]}]" if expert else known
