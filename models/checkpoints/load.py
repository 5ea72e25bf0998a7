"""Load a model, tensor by tensor, from any layout in which Llama-family weights are published.

    config = load_config("dummy:Llama-3.2-1B")
    model = load_model("path/to/folder", device="cuda", precision=torch.bfloat16)

The model is built on the meta device, without memory. Then, layer by layer, the tensors are read,
stacked, cast, moved to the device and passed to `transform`, which may quantize them. So a model
that is being quantized never exists in full precision as a whole.
"""

import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.errors import CheckpointError
from quantbench.models.checkpoints.pool import Pool
from quantbench.models.checkpoints.saved import Holding, SavedWeights, Stages, how_saved
from quantbench.models.checkpoints.sources import (
    Checkpoint,
    Source,
    architecture_of,
    locate,
    open_source,
)
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.models.registry import build
from quantbench.models.split import Cut, Split
from quantbench.models.tokenizer import FILES

Transform = Callable[[str, nn.Module], nn.Module]
Progress = Callable[[int, int], None]
Ready = Callable[[str, nn.Module], None]

# Tensors that checkpoints hold and that follow from the config.
_HARMLESS = re.compile(r".*rotary_emb\.inv_freq|rope\.freqs|freqs_cis|causal_mask")
_LAYER_NUMBER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_DUMMY_STD = 0.02  # standard deviation of dummy weights
_DUMMY_PERIOD = (1 << 20) + 7  # length of the repeated block; prime, so that a matrix's rows differ


def load_config(checkpoint_path: str) -> ModelConfig:
    """The architecture that `checkpoint_path` names, without reading its weights.

    Raises CheckpointError or UsageError if there is none.
    """
    return architecture_of(locate(checkpoint_path))


def model_name(checkpoint_path: str) -> str:
    """The model's name in the log: that of its folder, its preset or its hub entry."""
    return locate(checkpoint_path).name


def tokenizer_folder(checkpoint_path: str) -> Path | None:
    """The folder of the tokenizer; None for a dummy or a saved model without one."""
    checkpoint = locate(checkpoint_path)
    folder = checkpoint.folder
    if checkpoint.layout in ("dummy", "quantbench") and folder:
        return folder if any((folder / name).exists() for name in FILES) else None
    return folder


@devices.returning_memory()
def load_model(
    checkpoint_path: str,
    device: torch.device | str = "cpu",
    precision: torch.dtype = torch.float32,
    num_layers: int | None = None,
    transform: Transform | None = None,
    progress: Progress | None = None,
    ready: Ready | None = None,
    split: Split | None = None,
    reads_whole: Callable[[str], bool] = lambda name: False,
) -> Transformer:
    """The model, ready to run, its weights on `device` in `precision`.

    checkpoint_path: "tiny"; a Hugging Face folder; a gpt-fast or torchao model.pth; a Meta folder;
    a hub id; dummy:NAME or dummy:path/to/config.json for random weights.
    num_layers: the number of layers to load, from the first.
    transform: called as (name, module) with every embedding, norm and linear layer as soon as its
    weights are loaded, in the model's order. The module that it returns replaces the given one. For
    a checkpoint that was saved quantized it must implement `Stages` (models/checkpoints/saved.py).
    progress: called as (bytes loaded, total bytes), both counted in `precision`.
    ready: called as (name, module) with "tok_embeddings", "layers.0", …, "norm" and "output", each
    complete and in full precision, before `transform` is called for the modules in it.
    split: one rank's share; only that is read.
    reads_whole: whether `transform` is given the whole module of a name, though there is a split;
    it has to return this rank's part.

    Raises CheckpointError for a tensor that is missing, superfluous, damaged or of a wrong shape.
    """
    checkpoint = locate(checkpoint_path, weights=True)
    if checkpoint.layout == "quantbench":
        return _load_saved(checkpoint, device, precision, num_layers, transform, progress, split)
    config = architecture_of(checkpoint)
    full_depth = config.num_layers
    if num_layers is not None:
        config = config.with_layers(num_layers)
    if split is not None:
        split = replace(split, whole=config)
    model, whole = _on_meta(config, precision, split)
    if checkpoint.layout == "dummy":
        read: Callable[[str, Tensor, Cut | None], Tensor] = _DummyWeights(precision, device)
    else:
        source = open_source(checkpoint)
        _check_names(whole, source, full_depth)
        read = _StoredWeights(source, config)

    done, total, pool = 0, sum(p.numel() * precision.itemsize for p in model.parameters()), Pool()
    for part, names in _parts(model, whole_layers=ready is not None):
        for name in names:
            module = model.get_submodule(name)
            for kind, parameter in list(module.named_parameters(recurse=False)):
                full_name = f"{name}.{kind}"
                cut = None if split is None or reads_whole(name) else split.cut(full_name)
                tied = full_name == "output.weight" and config.tie_embeddings
                shares = tied and (split is None or cut is not None)
                weight = _embedding(model) if shares else None
                if weight is None:
                    stored = "tok_embeddings.weight" if tied else full_name
                    weight = read(stored, whole.get_parameter(full_name), cut)
                    weight = weight.to(device, precision)
                if split and split.is_zero(full_name):
                    weight = torch.zeros_like(weight)
                setattr(module, kind, nn.Parameter(weight, requires_grad=False))
                del weight  # or it would stay in memory until the next one is read
                done += parameter.numel() * precision.itemsize
                if progress:
                    progress(done, total)
            del module
        if ready:
            ready(part, model.get_submodule(part))
        for name in names:
            if transform:
                model.set_submodule(name, transform(name, model.get_submodule(name)))
            if name.startswith("layers."):  # the output may share its weight with the embedding
                pool.move(model.get_submodule(name))
    return model.eval().requires_grad_(False)


def _parts(model: Transformer, whole_layers: bool) -> list[tuple[str, list[str]]]:
    """What is loaded at a time: (name, names of its modules that have parameters).

    A list of the modules themselves would keep those in memory that transform has replaced.
    """
    parts: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if module._parameters:
            layer = _LAYER_NUMBER.match(name)
            part = layer[0].rstrip(".") if layer and whole_layers else name
            parts.setdefault(part, []).append(name)
    return list(parts.items())


def _load_saved(
    checkpoint: Checkpoint,
    device: torch.device | str,
    precision: torch.dtype,
    num_layers: int | None,
    transform: Transform | None,
    progress: Progress | None,
    split: Split | None,
) -> Transformer:
    """Load a model that --save wrote: quantize it on the meta device for its shapes, read the
    weights, then bring each layer into its kernel's form."""
    how = how_saved(checkpoint)
    assert how is not None
    if not isinstance(transform, Stages):
        raise CheckpointError(
            f"{checkpoint.folder} is quantized as {how.scheme}; load_model reads it back with "
            "transform=Quantizer(…) of that scheme"
        )
    if str(precision) != f"torch.{how.precision}":
        raise CheckpointError(
            f"{checkpoint.folder} was saved with --precision {how.precision}; give that one"
        )
    config = architecture_of(checkpoint)
    if num_layers is not None:
        config = config.with_layers(num_layers)
    if split is not None:
        split = replace(split, whole=config)
    model, whole = _on_meta(config, precision, split)
    weights, pool = SavedWeights(checkpoint, device), Pool()
    done, total = 0, sum(p.numel() * precision.itemsize for p in model.parameters())
    for name, _ in _parts(model, whole_layers=False):
        done += sum(p.numel() * precision.itemsize for p in model.get_submodule(name).parameters())
        held = transform.held(name) if isinstance(transform, Holding) else None
        if held is None:
            layer = transform.quantized(name, whole.get_submodule(name))
            weights.fill(name, layer)
            if split and split.is_zero(f"{name}.bias") and layer.bias is not None:
                layer.bias = nn.Parameter(torch.zeros_like(layer.bias), requires_grad=False)
            layer = transform.built(name, layer)
            weights.settle(layer)
        else:
            layer = held
        if name.startswith("layers."):
            pool.move(layer)
        model.set_submodule(name, layer)
        if progress:
            progress(done, total)
    return model.eval().requires_grad_(False)


def _on_meta(
    config: ModelConfig, precision: torch.dtype, split: Split | None
) -> tuple[Transformer, Transformer]:
    """The model, and the one without the split, on the meta device."""
    with torch.device("meta"):
        whole = build(config).to(precision)
        return (build(config, split).to(precision) if split else whole), whole


def _embedding(model: Transformer) -> Tensor | None:
    """The embedding's weights, for a tied output to share; None if `transform` replaced them."""
    weight = getattr(model.tok_embeddings, "weight", None)
    plain = isinstance(weight, nn.Parameter) and type(weight.data) is torch.Tensor
    return weight if plain and weight.is_floating_point() else None


# ---------------------------------------------------------------------------------- stored weights


class _StoredWeights:
    """Reads a parameter from a source: finds its pieces, checks shapes, stacks, permutes."""

    def __init__(self, source: Source, config: ModelConfig) -> None:
        self.source, self.config = source, config

    def __call__(self, name: str, parameter: Tensor, cut: Cut | None = None) -> Tensor:
        """The parameter, of which only the shape is used, or a part of it.

        A piece is a view of the mapped file, so what is cut away is not read."""
        parts = _pieces(name, self.source, self.config)
        shapes = _piece_shapes(name, parameter, len(parts), self.config)
        pieces = [self.source.read(part) for part in parts]
        for part, piece, shape in zip(parts, pieces, shapes, strict=True):
            if tuple(piece.shape) != shape:
                raise CheckpointError(
                    f"{self.source.tensors[part].file}: tensor {part} has shape "
                    f"{tuple(piece.shape)}; the config says {shape}"
                )
        heads = _heads(self.config)
        if cut is not None:
            weight = cut.of(pieces)
            heads = tuple((end - start) // self.config.head_dim for start, end in cut.ranges)
        elif len(pieces) > 1:
            weight = torch.cat(pieces)
        else:  # a pickled transposed tensor is column-major; the copy is row-major
            weight = pieces[0].clone(memory_format=torch.contiguous_format)
        if self.source.interleaved and ".wqkv." in name:
            rotated = sum(heads[:2]) * self.config.head_dim
            weight[:rotated] = _half_split(weight[:rotated], self.config.head_dim)
        return weight


def _pieces(name: str, source: Source, config: ModelConfig) -> tuple[str, ...]:
    if name in source.tensors:  # gpt-fast stores some projections fused, under the model's name
        return (name,)
    if name == "output.weight" and config.tie_embeddings:
        return source.name_map("tok_embeddings.weight")
    return source.name_map(name)


def _piece_shapes(
    name: str, parameter: Tensor, count: int, config: ModelConfig
) -> list[tuple[int, ...]]:
    """The shapes that `count` pieces stacked into the parameter must have."""
    if count == 1:
        return [tuple(parameter.shape)]
    if ".wqkv." in name:
        rows = [heads * config.head_dim for heads in _heads(config)]
    else:
        rows = [parameter.shape[0] // count] * count
    return [(row, *parameter.shape[1:]) for row in rows]


def _heads(config: ModelConfig) -> tuple[int, int, int]:
    return config.num_heads, config.num_kv_heads, config.num_kv_heads


def _half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Rows in Meta's order, with rotary pairs (2i, 2i + 1), reordered to pairs (i, i + E/2)."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _check_names(model: Transformer, source: Source, full_depth: int) -> None:
    """Raise CheckpointError if a tensor is missing, or if there is one that the model ignores."""
    config = model.config
    needed: set[str] = set()
    for name, _ in model.named_parameters():
        needed.update(_pieces(name, source, config))
    missing = sorted(needed - source.tensors.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{source.where} lacks tensor {missing[0]}{more}")
    for extra in sorted(source.tensors.keys() - needed):
        layer = _LAYER_NUMBER.match(extra)
        cut_off = layer and config.num_layers <= int(layer[1]) < full_depth
        if not cut_off and not _HARMLESS.fullmatch(extra) and not _is_tied(extra, source, config):
            raise CheckpointError(
                f"{source.tensors[extra].file} has tensor {extra}, which the model would not "
                "read; is its config.json the right one?"
            )


def _is_tied(extra: str, source: Source, config: ModelConfig) -> bool:
    """Whether `extra` is the output layer of a tied checkpoint, equal to the embedding."""
    if not config.tie_embeddings or extra not in source.name_map("output.weight"):
        return False
    (embedding,) = source.name_map("tok_embeddings.weight")
    return torch.equal(source.read(extra), source.read(embedding))


# ---------------------------------------------------------------------------------- random weights


class _DummyWeights:
    """Random weights for measuring speed and memory, the same in every run.

    They are normal with a standard deviation of 0.02; norms are ones. Drawing billions of normal
    numbers would take longer than the measurement, so one block of them is repeated. Where it
    begins depends on the parameter's name, and on nothing else: neither on the number of layers nor
    on that of threads.
    """

    def __init__(self, precision: torch.dtype, device: torch.device | str) -> None:
        generator = torch.Generator().manual_seed(0)
        block = torch.randn(_DUMMY_PERIOD, generator=generator) * _DUMMY_STD
        self.twice = block.to(device, precision).repeat(2)  # so that every rotation is a slice

    def __call__(self, name: str, parameter: Tensor, cut: Cut | None = None) -> Tensor:
        """The parameter, of which only the shape is used, or a part of it."""
        if cut is not None and cut.dim == 0:
            parts = [self._rows(name, parameter, *span) for span in cut.ranges]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        weight = self._rows(name, parameter, 0, len(parameter))
        return weight if cut is None else cut.of([weight])

    def _rows(self, name: str, parameter: Tensor, start: int, end: int) -> Tensor:
        shape = (end - start, *parameter.shape[1:])
        weight = torch.empty(shape, dtype=self.twice.dtype, device=self.twice.device)
        if "norm" in name:
            return weight.fill_(1.0)
        first = start * parameter[0].numel() - zlib.crc32(name.encode())
        block = self.twice[first % _DUMMY_PERIOD :][:_DUMMY_PERIOD]
        flat = weight.view(-1)
        whole = flat.numel() // _DUMMY_PERIOD
        end = whole * _DUMMY_PERIOD
        # In one op: each op ends by waiting for its slowest thread.
        flat[:end].view(whole, _DUMMY_PERIOD).copy_(block)
        flat[end:].copy_(block[: flat.numel() - end])
        return weight
