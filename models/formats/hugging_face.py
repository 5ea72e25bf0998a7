"""Hugging Face folders (config.json with *.safetensors or pytorch_model*.bin)."""

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from quantbench.errors import CheckpointError
from quantbench.models.config import ModelConfig
from quantbench.models.config_checks import OBJECT
from quantbench.models.formats import names
from quantbench.models.formats.base import read_json, require_inside
from quantbench.models.formats.stacked import MaybeQuantized, StackedTensors
from quantbench.models.formats.tensor_files import Stored, pickle_file, safetensors_file
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.registry import ARCHITECTURES
from quantbench.text import shown

_INDEX = "model.safetensors.index.json"
METHODS = {  # of quantizing: files here, each of which has a METHOD
    "compressed-tensors": "compressed_tensors",
    **{name: name for name in ("gptq", "awq", "fp8", "bitsandbytes", "torchao", "mxfp4")},
}
_PATTERNS = ("*.safetensors", "pytorch_model*.bin")  # the first with a match


class HuggingFace(MaybeQuantized):
    """A folder as transformers writes it, its weights in floating point or quantized."""

    @classmethod
    def sniff(cls, path: Path) -> bool:
        return os.path.lexists(path / _INDEX) or bool(_weight_files(path))

    @property
    def files(self) -> tuple[Path, ...]:
        index = self.folder / _INDEX
        if not os.path.lexists(index):
            return tuple(_weight_files(self.folder))
        shards = sorted(set(_index(index).values()))
        for shard in shards:
            require_inside(index, shard)
        return tuple(self.folder / shard for shard in shards)

    def config(self) -> ModelConfig:
        file = self.folder / "config.json"
        if not os.path.lexists(file):
            raise CheckpointError(f"{file} is missing")
        return read_config(file, self.name)

    @functools.cached_property
    def _quantization(self) -> dict[str, Any]:
        """config.json's quantization_config; {} if it is missing."""
        file = self.folder / "config.json"
        return (read_json(file) if os.path.lexists(file) else {}).get("quantization_config") or {}

    def _label(self) -> str | None:
        if not self._quantization:
            return None
        self.config()  # which checks the method
        return method(self._quantization["quant_method"]).label(self._quantization)

    def _stacked(self, device: torch.device | str = "cpu") -> StackedTensors:
        files, folder = self.files, self.folder
        is_safetensors = files[0].suffix == ".safetensors"
        tensors = _joined(files, safetensors_file if is_safetensors else pickle_file)
        if is_safetensors and os.path.lexists(folder / _INDEX):
            _check_index(folder / _INDEX, tensors)
        described = read_json(folder / "config.json")
        config = self.config()
        row = ARCHITECTURES.get(str(described.get("model_type")))
        if row is not None and row.stacked_experts:
            tensors = method("mxfp4").separated(tensors)
        if how := self._quantization:
            from quantbench.models.formats import quantized

            tensors = quantized.weights(tensors, method(how["quant_method"]).layouts(how))
        name_map = names.of_architecture(row.weights if row else {}, tensors)
        interleaved = row is not None and row.interleaved
        return StackedTensors(folder, tensors, name_map, config, interleaved, device)


def read_config(file: Path, name: str) -> ModelConfig:
    """The architecture in a config.json. Raises CheckpointError."""
    config = read_json(file)
    if config.get("quantization_config") is not None:
        where = f"{file}: quantization_config"
        _check_quantization(config["quantization_config"], where, config.get("model_type"))
    return from_hugging_face(config, name, file)


def method(name: str) -> Any:
    """The file that reads what the method of quantizing has written."""
    return importlib.import_module(f"quantbench.models.formats.{METHODS[name]}")


def _check_quantization(config: Any, where: str, kind: object) -> None:
    """kind: the model_type."""
    from quantbench.models.formats.quantized import HINT

    OBJECT.check(where, "its value", config)
    name = config.get("quant_method")
    if str(name) not in METHODS:
        *others, last = METHODS
        raise CheckpointError(
            f"{where}: quant_method {shown(name)} is not read; {', '.join(others)} and {last} are, "
            f"{HINT}"
        )
    method(name).check(config, where)
    if name == "mxfp4" and kind != "gpt_oss":
        raise CheckpointError(
            f"{where}: quant_method {name!r} is read with model_type 'gpt_oss' alone, {HINT}"
        )


def _weight_files(folder: Path) -> list[Path]:
    for pattern in _PATTERNS:
        # consolidated.safetensors is Mistral's copy of the same weights, under other names.
        files = sorted(f for f in folder.glob(pattern) if "consolidated.safe" not in f.name)
        if files:
            return files
    return []


def _joined(
    files: tuple[Path, ...], open_file: Callable[[Path], dict[str, Stored]]
) -> dict[str, Stored]:
    """The tensors of all files. Raises CheckpointError for two that hold the same tensor."""
    tensors: dict[str, Stored] = {}
    for file in files:
        stored = open_file(file)
        for name in stored.keys() & tensors.keys():
            raise CheckpointError(
                f"{tensors[name].file} and {file.name} both hold tensor {name}; remove the "
                "file that does not belong to this checkpoint"
            )
        tensors |= stored
    return tensors


def _index(file: Path) -> dict[str, str]:
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{file} has no weight_map")
    if not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointError(f"{file}: its weight_map must give a file's name for every tensor")
    return shards


def _check_index(index: Path, tensors: Mapping[str, Stored]) -> None:
    """Raise CheckpointError unless every tensor is in the file that the index names for it."""
    for name, shard in _index(index).items():
        if name not in tensors or tensors[name].file != index.parent / shard:
            raise CheckpointError(
                f"{index} says that {shown(shard)} holds tensor {shown(name)}, which it does not"
            )
