"""Meta's folders (params.json, a consolidated.*.pth per model-parallel rank), and the model.pth of
gpt-fast and torchao, whose tensors have the same names.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantbench.errors import CheckpointError, UsageError
from quantbench.models.config import ModelConfig, RopeScaling
from quantbench.models.config_checks import COUNT, LAYERS, POSITIVE, TRUTH, whole
from quantbench.models.formats import names
from quantbench.models.formats.base import Checkpoint, read_json
from quantbench.models.formats.hugging_face import read_config
from quantbench.models.formats.stacked import StackedTensors
from quantbench.models.formats.tensor_files import StoredTensor, pickle_file
from quantbench.models.hugging_face import check_keys, head_width
from quantbench.models.presets import preset
from quantbench.text import shown


class MetaCheckpoint(Checkpoint):
    """A folder as Meta publishes it. config.json is preferred to params.json; with neither, the
    folder has the exact name of a preset."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files = tuple(sorted(self.folder.glob("consolidated.*.pth")))

    @classmethod
    def sniff(cls, path: Path) -> bool:
        return any(path.glob("consolidated.*.pth"))

    def config(self) -> ModelConfig:
        config, params = self.folder / "config.json", self.folder / "params.json"
        if os.path.lexists(config):
            return read_config(config, self.name)
        if os.path.lexists(params):
            content, rows = read_json(params), None
            if content.get("vocab_size") in (None, -1):
                table = self._stored().get("tok_embeddings.weight")
                if table is None:
                    raise CheckpointError(f"{self.folder} lacks tensor tok_embeddings.weight")
                rows = table.read().shape[0]
            return from_params(content, self.name, rows, params)
        try:
            return preset(self.name)
        except UsageError:
            raise CheckpointError(
                f"{self.folder} has no config.json or params.json, and its name is that of no "
                "known model"
            ) from None

    def tensors(self, device: torch.device | str = "cpu") -> StackedTensors:
        stored = self._stored()
        return StackedTensors(self.folder, stored, names.meta, self.config(), True, device)

    def _stored(self) -> dict[str, StoredTensor]:
        ranks = [pickle_file(file) for file in self.files]
        if len(ranks) == 1:
            return ranks[0]
        return {
            name: StoredTensor(rank[name].file, functools.partial(_merged, name, ranks))
            for rank in ranks
            for name in rank
        }


class GptFast(MetaCheckpoint):
    """A single pickle, as the scripts of gpt-fast and torchao convert it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files = (path / "model.pth" if path.is_dir() else path,)

    @classmethod
    def sniff(cls, path: Path) -> bool:
        if path.is_file():
            return path.suffix in (".pth", ".pt") and "consolidated" not in path.name
        return os.path.lexists(path / "model.pth")


def _merged(name: str, ranks: list[dict[str, StoredTensor]]) -> Tensor:
    """A tensor joined from Meta's model-parallel ranks, by rows or by columns as it was cut."""
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


# ---------------------------------------------------------------------------------- params.json

_PARAMS_ACCEPTED = {
    "n_layers": LAYERS,
    **dict.fromkeys(("dim", "n_heads", "n_kv_heads", "multiple_of"), COUNT),
    **dict.fromkeys(("ffn_dim_multiplier", "norm_eps", "rope_theta"), POSITIVE),
    "vocab_size": whole(-1),
    "use_scaled_rope": TRUTH,
}


def from_params(
    params: Mapping[str, Any], name: str, vocab_size: int | None = None, file: object | None = None
) -> ModelConfig:
    """The architecture of a Meta checkpoint's params.json.

    vocab_size: rows of the embedding, for Llama 2's files, which give -1. The file does not give
    the context: with theta 500000 it is Llama 3's 8192, or 131072 if the rotation is scaled, and
    4096 otherwise. Raises CheckpointError for missing, impossible or unknown values.
    """
    where = file or name
    unknown = sorted(params.keys() - _PARAMS_ACCEPTED.keys())
    if unknown:
        raise CheckpointError(f"{where}: params.json key {shown(unknown[0])} is not understood")
    missing = [key for key in ("dim", "n_layers", "n_heads", "norm_eps") if params.get(key) is None]
    if missing:
        raise CheckpointError(f"{where}: params.json has no {', '.join(missing)}")
    check_keys(where, _PARAMS_ACCEPTED, params)
    params = {key: value for key, value in params.items() if value is not None}
    dim, heads = params["dim"], params["n_heads"]
    head_dim = head_width(dim, heads, where)
    multiple = params.get("multiple_of", 256)
    # Three matrices of width 2/3 · 4 · dim have the parameters of two of width 4 · dim.
    width = int(min(int(2 * 4 * dim / 3) * params.get("ffn_dim_multiplier", 1.0), 2**40))
    stated = params.get("vocab_size", -1)
    vocab = stated if stated > 0 else vocab_size
    if vocab is None:
        raise CheckpointError(f"{where}: params.json has no vocab_size")
    theta = params.get("rope_theta", 10000.0)
    scaled = bool(params.get("use_scaled_rope"))
    # Meta's own code scales by 8 for 3.1; the 1 B and 3 B models of 3.2 were published with 32.
    factor = 32.0 if dim in (2048, 3072) else 8.0
    context = (131072 if scaled else 8192) if theta == 500000.0 else 4096
    return ModelConfig(
        name=name,
        dim=dim,
        num_layers=params["n_layers"],
        num_heads=heads,
        num_kv_heads=params.get("n_kv_heads") or heads,
        head_dim=head_dim,
        ffn_dim=-(-width // multiple) * multiple,
        vocab_size=vocab,
        max_position=context,
        norm_eps=params["norm_eps"],
        rope_theta=theta,
        rope_scaling=RopeScaling(factor) if scaled else None,
    )
