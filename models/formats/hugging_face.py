"""Hugging Face folders (config.json with *.safetensors or pytorch_model*.bin)."""

import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quantbench.errors import CheckpointError
from quantbench.models.config import ModelConfig
from quantbench.models.config_checks import OBJECT
from quantbench.models.formats import names
from quantbench.models.formats.base import read_json, require_inside
from quantbench.models.formats.stacked import MaybeQuantized, StackedTensors
from quantbench.models.formats.tensor_files import StoredTensor, pickle_file, safetensors_file
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.registry import ARCHITECTURES
from quantbench.text import shown

_INDEX = "model.safetensors.index.json"
METHODS = {  # of quantizing: files here, each of which has a METHOD
    "compressed-tensors": "compressed_tensors",
    **{name: name for name in ("gptq", "awq", "fp8", "bitsandbytes", "torchao", "mxfp4")},
    "auto-round": "auto_round",
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), "modelopt"),
}
_PART = re.compile(r"[\w-]{1,100}\.safetensors")
_CACHE_SCALES = (".k_scale", ".v_scale")
# Mistral's copy of the same weights under other names, and adapters to the model.
_OTHERS = ("consolidated.safe", "adapter_")
_PATTERNS = ("*.safetensors", "pytorch_model*.bin")  # the first with a match


class HuggingFace(MaybeQuantized):
    """A folder as transformers writes it, its weights in floating point or quantized."""

    @classmethod
    def sniff(cls, path: Path) -> bool:
        return os.path.lexists(path / _INDEX) or bool(_weight_files(path))

    @property
    def files(self) -> tuple[Path, ...]:
        index = self.folder / _INDEX
        whole = _weight_files(self.folder)
        if any(self.folder.glob("adapter_model*")):
            self._note("the adapter in the model's folder is not applied; merge it to run with it")
        if not os.path.lexists(index):
            return tuple(whole)
        shards = sorted(set(_index(index).values()))
        if whole and self._are_gone(shards):
            self._note(f"{index.name} names files that are gone; read: {whole[0].name}")
            return tuple(whole)
        for shard in shards:
            require_inside(index, shard)
        return tuple(self.folder / shard for shard in shards)

    def _text_of(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of a picture model's text model, which is run without pictures."""
        from quantbench.models import picture

        self._note(picture.note_of(config))
        return picture.config_of(config)

    def _are_gone(self, shards: Sequence[str]) -> bool:
        """Whether an index names parts, all of which are gone."""
        are_parts = all(_PART.fullmatch(shard) for shard in shards)
        return are_parts and not any(os.path.lexists(self.folder / shard) for shard in shards)

    def config(self) -> ModelConfig:
        file = self.folder / "config.json"
        if not os.path.lexists(file):
            raise CheckpointError(f"{file} is missing")
        return read_config(file, self.name)

    @functools.cached_property
    def _quantization(self) -> dict[str, Any]:
        """How the file is quantized, as config.json says it; {} where nothing does."""
        file = self.folder / "config.json"
        return (_quantization(file)[0] or {}) if os.path.lexists(file) else {}

    def _note(self, note: str) -> None:
        self.notes = tuple(dict.fromkeys((*self.notes, note)))

    def _label(self) -> str | None:
        if not self._quantization:
            return None
        self.config()  # which checks the method
        return method(self._quantization["quant_method"]).label(self._quantization)

    def _stacked(self, device: torch.device | str = "cpu") -> StackedTensors:
        files, folder = self.files, self.folder
        is_safetensors = files[0].suffix == ".safetensors"
        tensors = _joined(files, safetensors_file if is_safetensors else pickle_file)
        index = folder / _INDEX
        if is_safetensors and os.path.lexists(index):
            if not self._are_gone([*_index(index).values()]):
                _check_index(index, tensors)
        config, outer = self.config(), read_json(folder / "config.json")
        known = str(outer.get("model_type")) in ARCHITECTURES
        described = outer if known else self._text_of(outer)
        row = ARCHITECTURES.get(str(described.get("model_type")))
        weights = row.weights if row else {}
        if row is not None and row.stacked_experts:
            tensors = method("mxfp4").separated(tensors, row.stacked_experts)
        if quantization := self._quantization:
            from quantbench.models.formats import quantized

            before = tensors.keys()
            name = quantization["quant_method"]
            tensors = quantized.weights(tensors, method(name).layouts(quantization))
            if tensors.keys() == before:
                self._note("config.json says that weights are quantized, and they are floats")
            if any(name.endswith(_CACHE_SCALES) for name in tensors):
                self._note("the file's scales of a KV cache are not used; --kv_cache chooses one")
                kept = (name for name in tensors if not name.endswith(_CACHE_SCALES))
                tensors = {name: tensors[name] for name in kept}
        if described is not outer:
            from quantbench.models import picture

            tensors = {text: tensors[name] for name in tensors if (text := picture.name_of(name))}
        name_map = names.of_architecture(weights, tensors)
        interleaved = row is not None and row.interleaved
        return StackedTensors(folder, tensors, name_map, config, interleaved, device)


def read_config(file: Path, name: str) -> ModelConfig:
    """The architecture in a config.json. Raises CheckpointError."""
    config = read_json(file)
    described, where = _quantization(file)
    if described is not None:
        _check_quantization(described, where, config.get("model_type"))
    return from_hugging_face(config, name, file)


def _quantization(file: Path) -> tuple[Any, str]:
    """quantization_config of this config.json, or what a file beside it has in its place; None
    where neither has any. And where it stands."""
    described, where = read_json(file).get("quantization_config"), f"{file}: quantization_config"
    is_whole = not isinstance(described, dict) or described.get("quant_method") != "modelopt"
    is_whole = is_whole or "quant_algo" in described
    if described is not None and is_whole:
        return described, where
    for name, words in _BESIDE.items():
        beside = file.with_name(name)
        if os.path.lexists(beside) and (found := words(read_json(beside))):
            return found, str(beside)
    return described, where


def _of_modelopt(content: dict[str, Any]) -> dict[str, Any]:
    described = content.get("quantization")
    known = isinstance(described, dict) and described.get("quant_algo") is not None
    return {"quant_method": "modelopt", **described} if known else {}  # type: ignore[dict-item]


def _of_awq(content: dict[str, Any]) -> dict[str, Any]:
    words = {"w_bit": "bits", "q_group_size": "group_size"}
    return {"quant_method": "awq"} | {words.get(key, key): content[key] for key in content}


# Files that say how a folder is quantized where config.json does not, and their words in its own:
# ModelOpt's, and those of GPTQ and AWQ before transformers knew them.
_BESIDE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "hf_quant_config.json": _of_modelopt,
    "quantize_config.json": lambda content: {"quant_method": "gptq", **content},
    "quant_config.json": _of_awq,
}


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
        files = sorted(f for f in folder.glob(pattern) if not f.name.startswith(_OTHERS))
        if files:
            return files
    return []


def _joined(
    files: tuple[Path, ...], open_file: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """The tensors of all files. Raises CheckpointError for two that hold the same tensor."""
    tensors: dict[str, StoredTensor] = {}
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


def _check_index(index: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError unless every tensor is in the file that the index names for it."""
    for name, shard in _index(index).items():
        if name not in tensors or tensors[name].file != index.parent / shard:
            raise CheckpointError(
                f"{index} says that {shown(shard)} holds tensor {shown(name)}, which it does not"
            )
