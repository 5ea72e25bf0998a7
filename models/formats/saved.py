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
`quantbench.json.unfinished` lists what a later save may remove (quantbench/unfinished.py).
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantbench.errors import CheckpointError
from quantbench.models import SAVED
from quantbench.models.config import Mixture, ModelConfig, RopeScaling
from quantbench.models.config_checks import NAME, NAMES, OBJECT, Accepts, list_of
from quantbench.models.formats.base import Checkpoint, SavedScheme, read_json, require_inside
from quantbench.models.formats.tensor_files import StoredTensor, safetensors_file
from quantbench.models.llama import Transformer
from quantbench.text import shown

if TYPE_CHECKING:
    from quantbench.models.split import Cut

EXPERTS = "experts.safetensors"  # experts in the form of their kernels
VERSION = 1  # of the format of quantbench.json


class SavedModel(Checkpoint):
    """A folder that --save wrote."""

    needs_tokenizer = False

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, with the key, if quantbench.json is damaged."""
        super().__init__(path)
        self.file = self.folder / SAVED
        content = read_json(self.file)
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"{self.file} is of version {shown(content.get('version'))}; this program reads "
                f"{VERSION}: save the model again"
            )
        self._check(content, {"how": OBJECT, "files": NAMES, "aliases": _TEXTS})
        scheme = content["how"]
        self._check(scheme, {"scheme": NAME, "precision": _PRECISION, "layers": _LAYERS}, "how.")
        self._check({"label": scheme.get("label", "as-is")}, {"label": NAME}, "how.")
        if extra := sorted(scheme.keys() - {"scheme", "precision", "layers", "label"}):
            raise CheckpointError(f"{self.file}: how.{extra[0]} is not understood")
        self.saved = SavedScheme(**scheme)
        self.aliases: Mapping[str, str] = content["aliases"]  # tensor → one with the same numbers
        self.has_experts = "experts" in content  # the file EXPERTS is in the folder
        for name in content["files"]:
            require_inside(self.file, name)
        self.files = tuple(self.folder / name for name in content["files"])  # no EXPERTS
        self._architecture = content.get("architecture")

    @classmethod
    def sniff(cls, path: Path) -> bool:
        if os.path.lexists(path / SAVED):
            return True
        unfinished = os.path.lexists(path / f"{SAVED}.unfinished")
        if unfinished or any(path.glob("quantized-*.safetensors*")):
            raise CheckpointError(
                f"{path} has no {SAVED}: its --save did not finish; save it again"
            )
        return False

    def config(self) -> ModelConfig:
        try:
            return architecture(self._architecture, self.name)
        except CheckpointError as error:
            raise CheckpointError(f"{self.file}: {error}") from None

    def tensors(self, device: torch.device | str = "cpu") -> "SavedTensors":
        tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            tensors |= safetensors_file(file)
        return SavedTensors(self.file, tensors, self.aliases, device)

    def _check(
        self, content: Mapping[str, Any], accepted: Mapping[str, Accepts], prefix: str = ""
    ) -> None:
        for key, accepts in accepted.items():
            if key not in content:
                raise CheckpointError(f"{self.file} has no {prefix}{key}; save the model again")
            accepts.check(self.file, f"{prefix}{key}", content[key])


_PRECISION = Accepts(
    "bfloat16, float16 or float32", ("bfloat16", "float16", "float32").__contains__
)
_TEXTS = Accepts("an object of texts", lambda value: _holds(value, NAME))
_LAYERS = Accepts(
    "an object with the names of a scheme and a kernel for each layer, by names as layers.0.x",
    lambda value: (
        _holds(value, list_of(NAME, "", 2))
        and all(re.fullmatch(r"\w+(\.\w+)*", name) for name in value)
        and all(re.fullmatch(r"[\w-]*", kernel) for _, kernel in value.values())
    ),
)


def _holds(value: Any, accepts: Accepts) -> bool:
    return isinstance(value, dict) and all(map(accepts.test, value.values()))


@dataclass
class SavedTensors:
    """Reads the numbers of a saved model as they are. What to expect follows from its scheme."""

    file: Path  # quantbench.json
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    device: torch.device | str
    # The embedding's tensors by name, for an output that shares them.
    shared: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def check(self, model: Transformer, depth: int) -> None:
        """A missing tensor is an error when it is read."""

    def read(self, name: str, like: Tensor, cut: "Cut | None" = None) -> Tensor:
        if name in self.aliases:
            if self.aliases[name] not in self.shared:
                raise CheckpointError(
                    f"{self.file}: aliases says that {name} is {shown(self.aliases[name])}, which "
                    "is no embedding; save the model again"
                )
            return self.shared[self.aliases[name]]
        if name not in self.tensors:
            raise CheckpointError(f"{self.file.parent} lacks tensor {name}; save the model again")
        tensor = self.tensors[name].read()
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise CheckpointError(
                f"{self.tensors[name].file}: tensor {name} is {tensor.dtype} "
                f"{tuple(tensor.shape)}; its scheme says {like.dtype} {tuple(like.shape)}: save "
                "the model again"
            )
        tensor = tensor.to(self.device, copy=True)
        if name in self.aliases.values():
            self.shared[name] = tensor
        return tensor if cut is None else cut.of([tensor])


def inner_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """{name: tensor}; for a tensor subclass, the tensors inside it as name.part."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {name: tensor}
    tensors: dict[str, Tensor] = {}
    for part in tensor.__tensor_flatten__()[0]:
        tensors |= inner_tensors(f"{name}.{part}", getattr(tensor, part))
    return tensors


def architecture(fields: Any, name: str) -> ModelConfig:
    """The config that `dataclasses.asdict` turned into these fields, with the name `name`.

    Raises CheckpointError for fields that are missing, unknown or impossible.
    """
    OBJECT.check(name, "architecture", fields)
    parsed: dict[str, Any] = {"name": name}
    try:
        parts: dict[str, Any] = {"rope_scaling": RopeScaling, "mixture": Mixture}
        if fields.get("recurrent") is not None:
            from quantbench.models.recurrent import Recurrent

            parts["recurrent"] = Recurrent
        for key, kind in parts.items():
            if fields.get(key) is not None:
                OBJECT.check(name, key, fields[key])
                parsed[key] = kind(**fields[key])
        return ModelConfig(**{**fields, **parsed})
    except (TypeError, KeyError):
        raise CheckpointError(
            f"{name}: its architecture is damaged; save the model again"
        ) from None
