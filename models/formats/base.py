"""What every checkpoint format provides: Checkpoint, and Tensors, its weights."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.models.tokenizer import FILES, ByteTokenizer, Tokenizer, load_tokenizer
from quantbench.models.tokenizer_hints import BESIDE
from quantbench.text import shown

if TYPE_CHECKING:
    from quantbench.models.split import Cut


TOKENIZER_FILES = (*FILES, *BESIDE)


@dataclass(frozen=True)
class SavedScheme:
    """The scheme of weights that are quantized in the checkpoint itself."""

    scheme: str
    precision: str | None  # bfloat16, float16 or float32: dtype of what is not quantized; None: any
    # [scheme, kernel] by the layer's name, where layers differ; otherwise empty
    layers: Mapping[str, list[str]] = field(default_factory=dict)
    label: str | None = None  # of another program's file, in logs: gguf-Q4_K_M


class Tensors(Protocol):
    """A checkpoint's weights under the model's own parameter names."""

    def check(self, model: Transformer, depth: int) -> None:
        """Raise CheckpointError if `model`, on the meta device, lacks a tensor here, or ignores
        one. depth: layers in the checkpoint; the model may have fewer."""

    def read(self, name: str, like: Tensor, cut: Cut | None = None) -> Tensor:
        """The parameter `name`, or the part of it that `cut` says: in memory of its own.

        like: a tensor on the meta device of the whole parameter's shape. Where the checkpoint's
        scheme is set it is what quantizing gives: for a PackedWeight the loader reads each tensor
        inside it, as name.plane0, name.scale, and so on. So the numbers in a file reach the kernels
        as they are. Raises CheckpointError for a damaged tensor, or another shape or dtype.
        """


class Checkpoint(ABC):
    """A checkpoint that was found, in one format. Nothing but its description is read."""

    saved: SavedScheme | None = None  # the scheme in which the file's weights are quantized
    given_up: str | None = None  # the label of that scheme, once it is read in full precision
    in_memory: Tensors | None = None  # its weights, where a model in full precision has them
    notes: tuple[str, ...] = ()  # for who runs it, once its tensors are listed
    needs_tokenizer: ClassVar[bool] = True  # whether a folder without a tokenizer is refused
    files: tuple[Path, ...]  # of the weights, downloaded if need be

    def __init__(self, path: Path) -> None:
        """path: absolute; one that `sniff` accepts."""
        self.folder: Path | None = path if path.is_dir() else path.parent
        self.name = self.folder.name  # the model's name in the log

    @classmethod
    def sniff(cls, path: Path) -> bool:
        """Whether a path, that of a file or a folder, is in this format. Raises CheckpointError
        where it is, but is not whole."""
        return False

    @abstractmethod
    def config(self) -> ModelConfig:
        """The architecture. Raises CheckpointError if it is missing, damaged or not supported."""

    @abstractmethod
    def tensors(self, device: torch.device | str = "cpu") -> Tensors:
        """The weights, read to `device`. Here only lists of tensors are read.

        Raises CheckpointError for a damaged file."""

    def in_full_precision(self) -> Checkpoint | None:
        """This checkpoint with its quantized weights as floats; None where they stay quantized."""
        return self if self.saved is None else None

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder of the tokenizer; None for random weights or a saved model without one."""
        if self.folder and not self.needs_tokenizer:
            return self.folder if any((self.folder / name).exists() for name in FILES) else None
        return self.folder

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer as --save writes it: the content of each of its files."""
        folder = self.tokenizer_folder
        return {
            name: files.read_bytes("cannot read", folder / name, CheckpointError)
            for name in TOKENIZER_FILES
            if folder and (folder / name).is_file()
        }

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """The tokenizer; a ByteTokenizer if the checkpoint needs none and has none."""
        folder = self.tokenizer_folder
        return load_tokenizer(folder, vocab_size) if folder else ByteTokenizer(vocab_size)


# ---------------------------------------------------------------------------------- JSON files


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if there is none."""
    content = files.read_json("cannot read", file, CheckpointError)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return content


def require_inside(index: Path, name: str) -> None:
    """Raise CheckpointError unless `name`, which the file `index` contains, is a file in the folder
    of `index`. A downloaded checkpoint must not make us read files elsewhere."""
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise CheckpointError(f"{index} names {shown(name)}, which is not inside its folder")
    with files.named(f"{index} names", name, CheckpointError):
        try:
            files.require_regular(index.parent / name)
        except FileNotFoundError as error:
            if not os.path.islink(index.parent / name):
                raise CheckpointError(f"{index} names {name}, which is not there") from None
            raise CheckpointError(
                f"{index} names {name}: {files.reason(index.parent / name, error)}"
            ) from None


class NotSaved(CheckpointError):
    """The folder of --save cannot be written."""

    code = "not-saved"
