"""--save: a quantized model's layers written as they are quantized (formats/saved.py)."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from quantbench import files
from quantbench.devices import stored_bytes
from quantbench.errors import CheckpointError
from quantbench.models import SAVED
from quantbench.models.config import ModelConfig
from quantbench.models.formats.base import Checkpoint, NotSaved, SavedScheme
from quantbench.models.formats.saved import VERSION, inner_tensors
from quantbench.unfinished import Unfinished

INDEX = "model.safetensors.index.json"  # which file has which tensor, for transformers
SHARD_BYTES = 1 << 29  # least size of a file, except the last
Layers = dict[str, list[str]] | None  # as in SavedScheme


class Saver:
    """Writes a model's layers as they are quantized, so that the model is never in memory twice.

        saver = Saver(folder, SavedScheme("int4wo-64", "bfloat16"), checkpoint)
        model = load_model(…, transform=quantizer, saver=saver)
        saver.finish(model.config)

    Raises NotSaved if the folder is not empty or cannot be written. A subclass writes another form.
    """

    last = SAVED  # the file that is written last, and without which the folder is no checkpoint
    stem = "quantized"  # of the names of the files of tensors

    @staticmethod
    def refuses(checkpoint: Checkpoint) -> str | None:
        """Why a checkpoint's model cannot be written, or None. No weights are read."""
        return None

    def __init__(
        self,
        folder: Path,
        scheme: SavedScheme,
        checkpoint: Checkpoint | None,
        shard_bytes: int | None = None,
    ) -> None:
        """checkpoint: that of the model; its tokenizer is copied. shard_bytes: bytes of waiting
        tensors that make a file; until then they stay in memory."""
        self.folder, self.scheme = folder, scheme
        self.shard_bytes = SHARD_BYTES if shard_bytes is None else shard_bytes
        self.files: list[str] = []
        self.pending: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}  # more of it, in each file
        self.aliases: dict[str, str] = {}
        self.embedding: dict[str, Tensor] = {}
        self.is_new = not os.path.lexists(folder)
        with files.named("--save", folder, NotSaved):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self.unfinished = Unfinished(folder)
            except CheckpointError as error:
                raise NotSaved(str(error)) from None
        for name, content in checkpoint.tokenizer_files().items() if checkpoint else ():
            self._create(name, lambda file, content=content: file.write_bytes(content))

    def add(self, name: str, module: nn.Module) -> None:
        """Save a quantized layer, in the form that does not depend on a kernel."""
        for kind, parameter in module.named_parameters(recurse=False):
            for key, tensor in inner_tensors(f"{name}.{kind}", parameter.data).items():
                self._add_tensor(key, tensor)
        self._flush_if_large()

    def _flush_if_large(self) -> None:
        if sum(map(stored_bytes, self.pending.values())) >= self.shard_bytes:
            self._flush()

    def _add_tensor(self, key: str, tensor: Tensor) -> None:
        """Add a tensor; for an output tied to the embedding, only an alias."""
        twin = key.replace("output.", "tok_embeddings.", 1)
        first = self.embedding.get(twin) if key.startswith("output.") else None
        if first is not None and _same(first, tensor):
            self.aliases[key] = twin
            return
        if key.startswith("tok_embeddings."):
            self.embedding[key] = tensor
        self.pending[key] = tensor.contiguous().cpu()

    def _flush(self) -> None:
        name = f"{self.stem}-{len(self.files) + 1:05d}.safetensors"
        scheme = self.scheme
        metadata = {"format": "pt", "scheme": scheme.scheme, "precision": scheme.precision}
        metadata |= self.metadata
        self._create(name, lambda file: save_file(self.pending, file, metadata))
        self.files.append(name)
        self.pending = {}

    def finish(
        self, architecture: ModelConfig, layers: Layers = None, experts: bool = False
    ) -> None:
        """Write the remaining tensors and the file `last`.

        layers: as in SavedScheme, where they are known only now. experts: whether the folder has
        their file. Raises NotSaved.
        """
        if self.pending:
            self._flush()
        content = self._described(architecture, layers, experts)
        text = json.dumps(content, indent=1) + "\n"
        self._finish(lambda file: file.write_text(text, encoding="utf-8"))

    def _described(
        self, architecture: ModelConfig, layers: Layers, experts: bool
    ) -> dict[str, Any]:
        """What quantbench.json says; arguments as for `finish`."""
        scheme = dataclasses.replace(self.scheme, layers=layers or self.scheme.layers)
        return {
            "version": VERSION,
            "how": {k: v for k, v in dataclasses.asdict(scheme).items() if v is not None},
            "architecture": dataclasses.asdict(architecture),
            "files": self.files,
            "aliases": self.aliases,
            **({"experts": True} if experts else {}),
        }

    def _create(self, name: str, write: Callable[[Path], object]) -> None:
        """Call `write` with the path of a new file; errors as for `_write`."""
        self._write(self.folder / name, lambda _: self.unfinished.create(name, write))

    def _finish(self, write: Callable[[Path], object]) -> None:
        """Write the file `last`, which appears as a whole."""
        self._write(self.folder / self.last, lambda _: self.unfinished.last(self.last, write))

    def _write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Call `write` with the path. If that fails, remove the whole save and raise
        NotSaved."""
        try:
            with files.named("--save", path, NotSaved):
                write(path)
        except SafetensorError as error:  # raised for a full disk, for example
            self.clear()
            raise NotSaved(f"--save {path}: {error}") from None
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Remove all that was written, and the folder if the save created it."""
        self.unfinished.clear()
        if self.is_new:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same numbers; those at one address are not read."""
    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and (first.data_ptr() == second.data_ptr() or torch.equal(first, second))
