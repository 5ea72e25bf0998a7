"""Quantized models on disk: what --save writes, and how it is read back.

The folder contains

    quantbench.json                what the model is and how it was quantized
    the tokenizer's files          copied
    quantized-00001.safetensors …  every parameter by its name in the model
    experts.safetensors            with --expert_memory: a mixture's experts as kernels read them

A parameter that is a tensor subclass is stored as its inner tensors, such as
`layers.0.attention.wo.weight.plane0`. The format does not depend on a kernel: the layout that a
kernel needs is made when the model is loaded. The experts' file depends on one, and holds nothing
that the others lack: a run whose kernels have another layout, or that finds it damaged, reads the
others.

`quantbench.json` is written last, so that an interrupted save is no checkpoint. Until then the file
`quantbench.json.unfinished` marks the folder as one that a later save may overwrite.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from quantbench import files
from quantbench.devices import stored_bytes
from quantbench.errors import CheckpointError
from quantbench.models.accepted import NAME, NAMES, OBJECT, Accepts, whole
from quantbench.models.checkpoints.names import EXPERTS, SAVED
from quantbench.models.checkpoints.sources import (
    Checkpoint,
    read_json,
    require_inside,
)
from quantbench.models.checkpoints.tensor_files import Stored, safetensors_file
from quantbench.models.config import ModelConfig
from quantbench.models.tokenizer import FILES
from quantbench.text import shown

VERSION = 1  # of the format of quantbench.json
SHARD_BYTES = 1 << 29  # of a file, at least, but for the last
_TOKENIZER_FILES = (
    *FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


@runtime_checkable
class Stages(Protocol):
    """The two halves of quantizing a layer (quantize/registry.py): the numbers, then the kernel."""

    def __call__(self, name: str, module: nn.Module) -> nn.Module: ...

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        """The layer with its weights quantized; works on the meta device, too."""

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        """The quantized layer in the form that its kernel takes."""


@runtime_checkable
class Holding(Stages, Protocol):
    """Stages that have some of a model's layers already."""

    def held(self, name: str) -> nn.Module | None:
        """The layer of that name, whose weights need not be read; None: it is to be read."""


@dataclass(frozen=True)
class SavedExperts:
    """What is noted of the file of experts beside a saved mixture (experts/slow.py)."""

    sums: list[int]  # CRC-32 of each expert's bytes, in the file's order
    modified: int  # when it was written, in nanoseconds; another date: the sums are compared


@dataclass(frozen=True)
class How:
    """How a saved model was quantized."""

    scheme: str
    precision: str  # bfloat16, float16 or float32: dtype of what is not quantized
    # [scheme, kernel] by the layer's name, where layers differ; otherwise empty
    layers: dict[str, list[str]] = dataclasses.field(default_factory=dict)


class NotSaved(CheckpointError):
    """The folder of --save cannot be written."""


class Saver:
    """Writes a model's layers as they are quantized, so that the model is never in memory twice.

        saver = Saver(folder, How("int4wo-64", "bfloat16"), tokenizer_folder)
        model = load_model(…, transform=saver.after(quantizer))
        saver.finish(model.config)

    Raises NotSaved if the folder is not empty or cannot be written.
    """

    def __init__(
        self, folder: Path, how: How, tokenizer: Path | None, shard_bytes: int | None = None
    ) -> None:
        """tokenizer: the folder whose tokenizer is copied. shard_bytes: a file is written as soon
        as so many bytes are waiting; until then they stay in memory."""
        self.folder, self.how = folder, how
        self.shard_bytes = SHARD_BYTES if shard_bytes is None else shard_bytes
        self.files: list[str] = []
        self.pending: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.embedding: dict[str, Tensor] = {}
        self.unfinished = folder / f"{SAVED}.unfinished"
        self.is_new = not os.path.lexists(folder)
        with files.named("--save", folder, NotSaved):
            folder.mkdir(parents=True, exist_ok=True)
            if self.unfinished.is_file():
                self._clear()  # left by a save that was killed
            if any(folder.iterdir()):
                raise NotSaved(f"--save {folder}: the folder is not empty; give a new one")
        self._write(self.unfinished, lambda file: file.touch())
        for name in _TOKENIZER_FILES if tokenizer else ():
            if tokenizer and (tokenizer / name).is_file():
                source = tokenizer / name
                self._write(folder / name, lambda file, source=source: _copy(source, file))

    def after(self, stages: Stages) -> Callable[[str, nn.Module], nn.Module]:
        """A transform that quantizes a layer, saves it, and then gives it its kernel's form."""

        def transform(name: str, module: nn.Module) -> nn.Module:
            layer = stages.quantized(name, module)
            self._add(name, layer)
            return stages.built(name, layer)

        return transform

    def _add(self, name: str, module: nn.Module) -> None:
        for kind, parameter in module.named_parameters(recurse=False):
            for key, tensor in inner_tensors(f"{name}.{kind}", parameter.data).items():
                self._add_tensor(key, tensor)
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
        name = f"quantized-{len(self.files) + 1:05d}.safetensors"
        metadata = {"format": "pt", "scheme": self.how.scheme, "precision": self.how.precision}
        self._write(self.folder / name, lambda file: save_file(self.pending, file, metadata))
        self.files.append(name)
        self.pending = {}

    def finish(
        self,
        architecture: ModelConfig,
        layers: dict[str, list[str]] | None = None,
        experts: SavedExperts | None = None,
    ) -> None:
        """Write the remaining tensors and quantbench.json.

        layers: as in How, where it is known only now. experts: their file, which lies there.
        Raises NotSaved.
        """
        if self.pending:
            self._flush()
        how = dataclasses.replace(self.how, layers=layers or self.how.layers)
        content = {
            "version": VERSION,
            "how": dataclasses.asdict(how),
            "architecture": dataclasses.asdict(architecture),
            "files": self.files,
            "aliases": self.aliases,
            **({"experts": dataclasses.asdict(experts)} if experts else {}),
        }
        text = json.dumps(content, indent=1) + "\n"
        self._write(self.unfinished, lambda file: file.write_text(text))
        os.replace(self.unfinished, self.folder / SAVED)

    def _write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Call `write` with the path. If that fails, remove the whole save and raise
        NotSaved."""
        try:
            with files.named("--save", path, NotSaved):
                write(path)
        except SafetensorError as error:  # raised for a full disk, for example
            self._clear()
            raise NotSaved(f"--save {path}: {error}") from None
        except BaseException:
            self._clear()
            raise

    def give_up(self) -> None:
        """Remove what was written: the model cannot be loaded as a whole."""
        self._clear()

    def _clear(self) -> None:
        """Remove what a save writes, and the folder if the save created it."""
        written = [
            file.name
            for pattern in ("quantized-*.safetensors", "experts-*.safetensors", EXPERTS)
            for file in self.folder.glob(pattern)
        ]
        with contextlib.suppress(OSError):
            for name in (*_TOKENIZER_FILES, *written):
                (self.folder / name).unlink(missing_ok=True)
            for name in _TOKENIZER_FILES:
                if (self.folder / name).parent != self.folder:
                    with contextlib.suppress(OSError):
                        (self.folder / name).parent.rmdir()
            self.unfinished.unlink(missing_ok=True)
            if self.is_new:
                self.folder.rmdir()


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same numbers; those at one address are not read."""
    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and (first.data_ptr() == second.data_ptr() or torch.equal(first, second))


def _copy(source: Path, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    shutil.copyfile(source, file)


def how_saved(checkpoint: Checkpoint) -> How | None:
    """How a located checkpoint was quantized; None if it is in full precision.

    Raises CheckpointError if its quantbench.json is damaged.
    """
    if checkpoint.layout != "quantbench":
        return None
    assert checkpoint.folder is not None
    return _content(checkpoint.folder).how


def saved_experts(checkpoint: Checkpoint) -> SavedExperts | None:
    """The file of experts beside a saved model; None if there is none. Raises CheckpointError."""
    if checkpoint.layout != "quantbench" or checkpoint.folder is None:
        return None
    return _content(checkpoint.folder).experts


def files_of(checkpoint: Checkpoint) -> list[Path]:
    """The files of a located checkpoint's weights, without those of experts alone."""
    if checkpoint.layout != "quantbench" or checkpoint.folder is None:
        return list(checkpoint.files)
    return [checkpoint.folder / name for name in _content(checkpoint.folder).files]


@dataclass(frozen=True)
class Content:
    """What quantbench.json holds, apart from the architecture."""

    how: How
    files: list[str]  # the safetensors files' names
    aliases: dict[str, str]  # tensor that is stored under another's name → that name
    experts: SavedExperts | None  # the file of experts, if there is one


def _content(folder: Path) -> Content:
    """What quantbench.json holds. Raises CheckpointError, with the key, if it is damaged."""
    file = folder / SAVED
    content = read_json(file)
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{file} is of version {shown(content.get('version'))}; this program reads "
            f"{VERSION}: save the model again"
        )
    _check(file, content, {"how": OBJECT, "files": NAMES, "aliases": TEXTS})
    how = content["how"]
    _check(file, how, {"scheme": NAME, "precision": PRECISION, "layers": CHOICES}, "how.")
    extra = sorted(how.keys() - {"scheme", "precision", "layers"})
    if extra:
        raise CheckpointError(f"{file}: how.{extra[0]} is not understood")
    for name in content["files"]:
        require_inside(file, name)
    return Content(How(**how), content["files"], content["aliases"], _experts(file, content))


def _experts(file: Path, content: dict[str, Any]) -> SavedExperts | None:
    if "experts" not in content:
        return None
    _check(file, content, {"experts": OBJECT})
    given = content["experts"]
    _check(file, given, {"sums": SUMS, "modified": whole(0, 1 << 63)}, "experts.")
    return SavedExperts(given["sums"], given["modified"])


PRECISION = Accepts("bfloat16, float16 or float32", ("bfloat16", "float16", "float32").__contains__)
TEXTS = Accepts(
    "an object of texts",
    lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
)
SUMS = Accepts(
    "a list of whole numbers",
    lambda value: isinstance(value, list) and all(type(number) is int for number in value),
)
CHOICES = Accepts(
    "an object with a scheme and a kernel for each layer",
    lambda value: (
        isinstance(value, dict) and all(NAMES.test(v) and len(v) == 2 for v in value.values())
    ),
)


def _check(
    file: Path, given: dict[str, Any], accepted: dict[str, Accepts], prefix: str = ""
) -> None:
    for key, accepts in accepted.items():
        if key not in given:
            raise CheckpointError(f"{file} has no {prefix}{key}; save the model again")
        accepts.check(file, f"{prefix}{key}", given[key])


class SavedWeights:
    """Reads a saved model's layers. Their shapes come from quantizing on the meta device."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str) -> None:
        assert checkpoint.folder is not None
        content = _content(checkpoint.folder)
        self.folder, self.device, self.aliases = checkpoint.folder, device, content.aliases
        self.tensors: dict[str, Stored] = {}
        self.shared: dict[str, Tensor] = {}  # the embedding's tensors, for an output tied to it
        self.mapped: set[int] = set()  # addresses of the current layer's tensors in mapped files
        for name in content.files:
            self.tensors |= safetensors_file(self.folder / name)

    def fill(self, name: str, layer: nn.Module) -> None:
        """Give a layer on the meta device the weights that were saved for it.

        They may lie in a mapped file; `settle` copies those that the layer still uses.
        Raises CheckpointError for a tensor that is missing or has another shape or dtype.
        """
        self.mapped.clear()
        for kind, parameter in list(layer.named_parameters(recurse=False)):
            weight = self._filled(f"{name}.{kind}", parameter.data)
            layer.register_parameter(kind, nn.Parameter(weight, requires_grad=False))

    def _filled(self, key: str, like: Tensor) -> Tensor:
        if not hasattr(like, "__tensor_flatten__"):
            return self._read(key, like)
        names, attributes = like.__tensor_flatten__()
        inner = {name: self._filled(f"{key}.{name}", getattr(like, name)) for name in names}
        return type(like).__tensor_unflatten__(inner, attributes, like.shape, like.stride())

    def _read(self, key: str, like: Tensor) -> Tensor:
        if key in self.aliases:
            if self.aliases[key] not in self.shared:
                raise CheckpointError(
                    f"{self.folder / SAVED}: aliases says that {key} is "
                    f"{shown(self.aliases[key])}, which is no embedding; save the model again"
                )
            return self.shared[self.aliases[key]]
        if key not in self.tensors:
            raise CheckpointError(f"{self.folder} lacks tensor {key}; save the model again")
        tensor = self.tensors[key].read()
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise CheckpointError(
                f"{self.tensors[key].file}: tensor {key} is {tensor.dtype} {tuple(tensor.shape)}; "
                f"its scheme says {like.dtype} {tuple(like.shape)}: save the model again"
            )
        if key in self.aliases.values():
            self.shared[key] = tensor = tensor.to(self.device, copy=True)
        elif torch.device(self.device).type == "cpu":
            self.mapped.add(tensor.untyped_storage().data_ptr())
        return tensor.to(self.device)

    def settle(self, layer: nn.Module) -> None:
        """Copy the parameters of a layer in its kernel's form that still lie in a mapped file.

        A kernel with its own weight layout has copied them already.
        """
        for module in layer.modules():
            for kind, parameter in list(module.named_parameters(recurse=False)):
                copied = self._copied(parameter.data)
                if copied is None:
                    continue
                subclass = hasattr(parameter, "__tensor_flatten__")
                if subclass or type(parameter) is nn.Parameter:
                    module.register_parameter(kind, nn.Parameter(copied, requires_grad=False))
                else:
                    parameter.data = copied  # keeps a kernel's own subclass of Parameter

    def _copied(self, tensor: Tensor) -> Tensor | None:
        """A copy of the tensor if any part of it lies in a mapped file, else None."""
        if not hasattr(tensor, "__tensor_flatten__"):
            mapped = tensor.untyped_storage().data_ptr() in self.mapped
            return tensor.clone() if mapped else None
        names, attributes = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        copies = {name: copy for name in names if (copy := self._copied(inner[name])) is not None}
        if not copies:
            return None
        shape = tensor.shape, tensor.stride()
        return type(tensor).__tensor_unflatten__(inner | copies, attributes, *shape)


def inner_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """{name: tensor}; for a tensor subclass, the tensors inside it as name.part."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {name: tensor}
    tensors: dict[str, Tensor] = {}
    for part in tensor.__tensor_flatten__()[0]:
        tensors |= inner_tensors(f"{name}.{part}", getattr(tensor, part))
    return tensors
