"""Finding a checkpoint's files, and reading its tensors by name.

A source reads one tensor at a time. How the model's parameters are named and stacked from these
tensors is in names.py and load.py.
"""

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from quantbench import files
from quantbench.errors import CheckpointError, UsageError
from quantbench.models.checkpoints import compressed, names
from quantbench.models.checkpoints.names import SAVED
from quantbench.models.checkpoints.tensor_files import Stored, pickle_file, safetensors_file
from quantbench.models.config import ModelConfig, from_fields
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.meta_params import from_params
from quantbench.models.presets import preset
from quantbench.models.registry import ARCHITECTURES
from quantbench.text import shown

EMBEDDED = Path(__file__).parent.parent / "tiny"
# Models in the tree, by the names that --checkpoint_path takes.
EMBEDDED_MODELS = {"tiny": EMBEDDED, "tiny_moe": EMBEDDED.parent / "tiny_moe"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LONGEST_HUB_ID = 200  # characters; the hub allows 96 for each half
_HUB_SMALL = ["*.json", "tokenizer.model", "original/tokenizer.model"]
_HUB_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # the first pattern with a match
NO_GGUF = (  # why not, and what to give instead
    "llama.cpp's format is not read, since its weights are quantized already; give the folder or "
    "hub id of the model that it was made from (*.safetensors), and a --quantization"
)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Checkpoint:
    """What --checkpoint_path names.

    Layouts: "hugging face", "gpt-fast" (one pickle), "meta" (a pickle for each model-parallel
    rank), "quantbench" (what --save writes) and "dummy" (an architecture without weights).
    """

    layout: str
    name: str  # the model's name in the log
    folder: Path | None  # None for a preset
    files: tuple[Path, ...] = ()  # the files with weights
    architecture: ModelConfig | None = None  # only for a dummy; otherwise see `architecture_of`


def locate(checkpoint_path: str, weights: bool = False) -> Checkpoint:
    """Find what --checkpoint_path names.

    weights: whether to download the weights of a hub entry; without them its `files` are empty.
    Raises CheckpointError or UsageError, one line, if there is nothing of that name.
    """
    if checkpoint_path.startswith("dummy:"):
        return _dummy(checkpoint_path.removeprefix("dummy:"))
    path = EMBEDDED_MODELS.get(checkpoint_path) or Path(checkpoint_path)
    if why := files.missing(path):
        if os.path.islink(path) or len(checkpoint_path) > _LONGEST_HUB_ID:
            raise CheckpointError(f"--checkpoint_path {shown(checkpoint_path, 300)}: {why}")
        if not _HUB_ID.fullmatch(checkpoint_path):
            raise CheckpointError(
                f"{checkpoint_path} does not exist; --checkpoint_path takes a folder, a model.pth, "
                "a hub id such as org/name, dummy:NAME, tiny, or tiny_moe"
            )
        folder, name = _download(checkpoint_path, weights), checkpoint_path.split("/")[1]
        return _folder(folder, name) if weights else Checkpoint("hugging face", name, folder)
    if not path.is_dir():
        with files.named("--checkpoint_path", path, CheckpointError):
            files.require_regular(path)
        if is_gguf(path):
            raise CheckpointError(f"--checkpoint_path {path} is a GGUF file: {NO_GGUF}")
    # A link to a file is not followed: the config lies in the link's folder, which names the model.
    folder = Path(os.path.abspath(path if path.is_dir() else path.parent))
    if path.is_file() and path.suffix in (".pth", ".pt") and "consolidated" not in path.name:
        return Checkpoint("gpt-fast", folder.name, folder, (path,))
    return _folder(folder, folder.name)


def _folder(folder: Path, name: str) -> Checkpoint:
    if os.path.lexists(folder / SAVED):
        return Checkpoint("quantbench", name, folder)
    if os.path.lexists(folder / f"{SAVED}.unfinished") or any(
        folder.glob("quantized-*.safetensors*")
    ):
        raise CheckpointError(f"{folder} has no {SAVED}: its --save did not finish; save it again")
    index = folder / "model.safetensors.index.json"
    if os.path.lexists(index):
        shards = sorted(set(_index(index).values()))
        for shard in shards:
            require_inside(index, shard)
        return Checkpoint("hugging face", name, folder, tuple(folder / s for s in shards))
    for pattern, layout in (
        ("*.safetensors", "hugging face"),
        ("pytorch_model*.bin", "hugging face"),
        ("model.pth", "gpt-fast"),
        ("consolidated.*.pth", "meta"),
    ):
        files = sorted(
            file for file in folder.glob(pattern) if "consolidated.safe" not in file.name
        )
        if files:
            return Checkpoint(layout, name, folder, tuple(files))
    if "gguf" in name.lower() or any(folder.glob("*.gguf")):
        raise CheckpointError(f"{folder} holds GGUF files: {NO_GGUF}")
    raise CheckpointError(
        f"{folder} holds no weights; looked for *.safetensors, pytorch_model*.bin, model.pth and "
        "consolidated.*.pth"
    )


def is_gguf(path: Path) -> bool:
    """Whether a file is in llama.cpp's format, by its first bytes or by its name."""
    with files.named("--checkpoint_path", path, CheckpointError), open(path, "rb") as file:
        return file.read(4) == b"GGUF" or path.suffix.lower() == ".gguf"


def _dummy(what: str) -> Checkpoint:
    path = Path(what)
    if path.suffix == ".json" or (what and os.path.lexists(path)):
        file = path / "config.json" if path.is_dir() else path
        folder = Path(os.path.abspath(file)).parent
        architecture = from_hugging_face(read_json(file), folder.name, file)
        return Checkpoint("dummy", folder.name, folder, (), architecture)
    architecture = preset(what)
    return Checkpoint("dummy", architecture.name, None, (), architecture)


@functools.lru_cache(maxsize=2)
def _download(hub_id: str, weights: bool) -> Path:
    """The local snapshot of a hub entry: its configs, its tokenizer and, if asked, its weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )
    from huggingface_hub.errors import RepositoryNotFoundError as NotFound

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_HUB_SMALL))
        for pattern in _HUB_WEIGHTS if weights else ():
            snapshot_download(hub_id, allow_patterns=[*_HUB_SMALL, pattern])
            if any(folder.glob(pattern)):
                break
        return folder
    except GatedRepoError:
        reason = "its licence has to be accepted on the hub first; then run `hf auth login`"
    except NotFound:
        reason = "the hub has no such model, or it is private (`hf auth login`)"
    except HFValidationError:
        reason = "it cannot be a hub id either; give a folder, a model.pth, dummy:NAME, or tiny"
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        reason = "the Hugging Face hub cannot be reached either; give a local folder or dummy:NAME"
    raise CheckpointError(f"{hub_id} is no local path: {reason}")


def architecture_of(checkpoint: Checkpoint) -> ModelConfig:
    """The architecture: from config.json, params.json, or the folder's exact name.

    Raises CheckpointError if none of them gives it.
    """
    if checkpoint.architecture is not None:
        return checkpoint.architecture
    assert checkpoint.folder is not None
    if checkpoint.layout == "quantbench":
        saved = checkpoint.folder / SAVED
        try:
            return from_fields(read_json(saved).get("architecture"), checkpoint.name)
        except CheckpointError as error:
            raise CheckpointError(f"{saved}: {error}") from None
    config, params = checkpoint.folder / "config.json", checkpoint.folder / "params.json"
    if os.path.lexists(config):
        return from_hugging_face(read_json(config), checkpoint.name, config)
    if checkpoint.layout != "hugging face":
        if os.path.lexists(params):
            content = read_json(params)
            rows = None
            if content.get("vocab_size") in (None, -1):
                rows = _embedding_rows(checkpoint)
            return from_params(content, checkpoint.name, rows, params)
        try:
            return preset(checkpoint.name)
        except UsageError:
            raise CheckpointError(
                f"{checkpoint.folder} has no config.json or params.json, and its name is that of "
                "no known model"
            ) from None
    raise CheckpointError(f"{config} is missing")


def _embedding_rows(checkpoint: Checkpoint) -> int:
    source = open_source(checkpoint)
    return source.read("tok_embeddings.weight").shape[0]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if there is none."""
    content = files.read_json("cannot read", file, CheckpointError)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return content


def _index(file: Path) -> dict[str, str]:
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{file} has no weight_map")
    if not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointError(f"{file}: its weight_map must give a file's name for every tensor")
    return shards


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


def _check_index(index: Path, tensors: Mapping[str, Stored]) -> None:
    """Raise CheckpointError unless every tensor lies in the file that the index names for it."""
    for name, shard in _index(index).items():
        if name not in tensors or tensors[name].file != index.parent / shard:
            raise CheckpointError(
                f"{index} says that {shown(shard)} holds tensor {shown(name)}, which it does not"
            )


# ---------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """A checkpoint's tensors by name, not read yet."""

    where: Path  # the checkpoint's folder, for error messages
    tensors: Mapping[str, Stored]
    name_map: names.NameMap  # from a parameter's name in the model to the tensors' names here
    interleaved: bool  # Meta's rotary layout: pairs (2i, 2i + 1) instead of (i, i + E/2)

    def read(self, name: str) -> Tensor:
        """A dense floating-point tensor. It may be a view of the mapped file: copy what is to stay.

        Raises CheckpointError for a tensor that is missing, sparse, or of another dtype.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.where} lacks tensor {name}")
        tensor = self.tensors[name].read()
        if tensor.layout != torch.strided or tensor.is_meta:
            kind = "without values (on the meta device)" if tensor.is_meta else "sparse"
            raise CheckpointError(
                f"{self.tensors[name].file}: tensor {name} is {kind}; dense tensors are read"
            )
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.tensors[name].file}: tensor {name} is {tensor.dtype}: weights that other "
                "tools quantized are read in compressed-tensors' format alone; give the "
                "full-precision checkpoint and --quantization"
            )
        return tensor


def open_source(checkpoint: Checkpoint) -> Source:
    """A source over the checkpoint's files. Only their lists of tensors are read here.

    Raises CheckpointError for a damaged file, or for two that hold the same tensor.
    """
    where = checkpoint.folder or checkpoint.files[0]
    if checkpoint.layout == "hugging face":
        is_safetensors = checkpoint.files[0].suffix == ".safetensors"
        open_file = safetensors_file if is_safetensors else pickle_file
        tensors: dict[str, Stored] = {}
        for file in checkpoint.files:
            stored = open_file(file)
            for name in stored.keys() & tensors.keys():
                raise CheckpointError(
                    f"{tensors[name].file} and {file.name} both hold tensor {name}; remove the "
                    "file that does not belong to this checkpoint"
                )
            tensors |= stored
        index = where / "model.safetensors.index.json"
        if is_safetensors and os.path.lexists(index):
            _check_index(index, tensors)
        config = read_json(where / "config.json")
        if config.get("quantization_config"):
            tensors = compressed.dequantized(tensors)
        row = ARCHITECTURES.get(str(config.get("model_type")))
        name_map = names.of_architecture(row.weights if row else {}, tensors)
        return Source(where, tensors, name_map, interleaved=False)
    ranks = [pickle_file(file) for file in checkpoint.files]
    if len(ranks) == 1:
        return Source(where, ranks[0], names.meta, interleaved=True)
    merged = {
        name: Stored(rank[name].file, functools.partial(_merged, name, ranks))
        for rank in ranks
        for name in rank
    }
    return Source(where, merged, names.meta, interleaved=True)


def _merged(name: str, ranks: list[dict[str, Stored]]) -> Tensor:
    """One tensor joined from Meta's model-parallel ranks, by rows or by columns as it was cut."""
    stored = [rank[name] for rank in ranks if name in rank]
    if len(stored) != len(ranks):
        raise CheckpointError(f"tensor {name} is not in every consolidated.*.pth")
    pieces = [piece.read() for piece in stored]
    for piece, part in zip(pieces, stored, strict=True):
        if piece.shape != pieces[0].shape:
            raise CheckpointError(
                f"{part.file}: tensor {name} has shape {tuple(piece.shape)}, but in "
                f"{stored[0].file.name} {tuple(pieces[0].shape)}; ranks are cut evenly"
            )
    if pieces[0].ndim < 2:
        return pieces[0]  # norms are the same in all ranks
    by_column = name.endswith((".wo.weight", ".w2.weight"))
    if name == "tok_embeddings.weight":
        # Llama 2 cuts the embedding by columns, Llama 3 by rows. The norm has the full width.
        by_column = pieces[0].shape[1:] != _merged("norm.weight", ranks).shape
    return torch.cat(pieces, 1 if by_column else 0)
