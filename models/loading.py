"""Load a model layer by layer, so that it never exists in full precision as a whole.

    config = load_config("dummy:Llama-3.2-1B")
    model = load_model("path/to/folder", device="cuda", precision=torch.bfloat16)

The model is built on the meta device, without memory. Then each layer is read, moved to the device,
quantized, saved if --save asks for it, and brought into the form of its kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.errors import CheckpointError
from quantbench.models.config import ModelConfig
from quantbench.models.formats import Checkpoint, open_checkpoint
from quantbench.models.formats.base import Tensors
from quantbench.models.llama import Transformer
from quantbench.models.registry import build

if TYPE_CHECKING:
    from quantbench.models.formats.saver import Saver
    from quantbench.models.split import Split

Transform = Callable[[str, nn.Module], nn.Module]
_LAYER = re.compile(r"layers\.\d+(?=\.)")
PIECE = 64 << 20  # bytes of memory that weights share
LARGEST = 16 << 20  # bytes of a weight that is moved: the system gives larger ones huge pages
LINE = 64  # bytes; each weight is aligned to a cache line
KEPT = 1 << 20  # bytes of weights that were moved away, after which malloc returns their memory


@runtime_checkable
class Stages(Protocol):
    """The two halves of quantizing a layer (quantize/registry.py): the numbers, then the kernel."""

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        """The layer with its weights quantized; works on the meta device, too."""

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        """The quantized layer in the form that its kernel takes."""


@runtime_checkable
class Holding(Stages, Protocol):
    """Stages that have some of a model's layers already."""

    def held(self, name: str) -> nn.Module | None:
        """The layer of that name, whose weights need not be read; None: it is to be read."""


def load_config(checkpoint_path: str, num_layers: int | None = None) -> ModelConfig:
    """The architecture that `checkpoint_path` names, or its first `num_layers` layers, without
    reading its weights.

    Raises CheckpointError or UsageError if there is none, or it has fewer layers.
    """
    return open_checkpoint(checkpoint_path).config().with_layers(num_layers)


@devices.returning_memory()
def load_model(
    checkpoint: Checkpoint | str,
    device: torch.device | str = "cpu",
    precision: torch.dtype = torch.float32,
    num_layers: int | None = None,
    transform: Transform | Stages | None = None,
    progress: Callable[[int, int], None] | None = None,
    ready: Callable[[str, nn.Module], None] | None = None,
    split: Split | None = None,
    reads_whole: Callable[[str], bool] = lambda name: False,
    saver: Saver | None = None,
) -> Transformer:
    """The model, ready to run, its weights on `device` in `precision`.

    checkpoint: one that was opened, or what --checkpoint_path takes.
    num_layers: the number of layers to load, from the first.
    transform: called as (name, module) with every embedding, norm and linear layer as soon as its
    weights are loaded, in the model's order. The module that it returns replaces the given one. For
    a checkpoint whose weights stay quantized, and for a saver, it must implement `Stages`.
    progress: called as (bytes loaded, total bytes), both counted in `precision`.
    ready: called as (name, module) with "tok_embeddings", "layers.0", …, "norm" and "output", each
    complete and in full precision, before `transform` is called for the modules in it.
    split: one rank's share; only that is read.
    reads_whole: whether `transform` is given the whole module of a name, though there is a split;
    it has to return this rank's part.
    saver: writes each layer when it is quantized.

    Raises CheckpointError for a tensor that is missing, superfluous, damaged or of a wrong shape.
    """
    if isinstance(checkpoint, str):
        checkpoint = open_checkpoint(checkpoint)
    if checkpoint.saved and not isinstance(transform, Stages):
        floats = checkpoint.in_full_precision()
        if floats is None:
            raise CheckpointError(
                f"{checkpoint.folder} is quantized as {checkpoint.saved.scheme}; load_model reads "
                "it back with transform=Quantizer(…) of that scheme"
            )
        checkpoint = floats
    saved = checkpoint.saved
    if saved and saved.precision and str(precision) != f"torch.{saved.precision}":
        raise CheckpointError(
            f"{checkpoint.folder} was saved with --precision {saved.precision}; give that one"
        )
    config = checkpoint.config()
    depth, config = config.num_layers, config.with_layers(num_layers)
    with torch.device("meta"):
        split = replace(split, whole=config) if split else None
        model, unsplit = build(config, split).to(precision), build(config).to(precision)
    tensors = checkpoint.in_memory or checkpoint.tensors(device)
    tensors.check(unsplit, depth)
    stages = transform if isinstance(transform, Stages) else _OneStage(transform)
    loader = _Loader(model, unsplit, tensors, saved is not None, stages, saver, split, reads_whole)
    sizes = {
        name: sum(map(devices.stored_bytes, module.parameters()))
        for name, module in model.named_modules()
        if module._parameters
    }
    if saved and config.tie_embeddings:  # packing both takes the most while there is nothing else
        sizes = {name: sizes[name] for name in dict.fromkeys(("tok_embeddings", "output", *sizes))}
    done, total, pool = 0, sum(sizes.values()), WeightPool()
    for part, names in _parts(sizes, whole_layers=ready is not None).items():
        if not saved:
            for name in names:
                loader.fill(name)
            if ready:
                ready(part, model.get_submodule(part))
        for name in names:
            model.set_submodule(name, loader.finished(name))
            if _LAYER.match(name):  # the output may share its weight with the embedding
                pool.move(model.get_submodule(name))
            done += sizes[name]
            if progress:
                progress(done, total)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class _OneStage:
    """A transform that is not divided into stages."""

    transform: Transform | None

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        return module

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        return self.transform(name, layer) if self.transform else layer


@dataclass(frozen=True)
class _Loader:
    """Reads, quantizes and saves layers, and brings them into the form of their kernels."""

    model: Transformer  # on the meta device, but for what was filled
    whole: Transformer  # on the meta device; the model without the split
    tensors: Tensors
    is_packed: bool  # whether the tensors are quantized
    stages: Stages
    saver: Saver | None
    split: Split | None
    reads_whole: Callable[[str], bool]

    def finished(self, name: str) -> nn.Module:
        """The layer `name` quantized, saved, and in the form that its kernel takes."""
        if not self.is_packed:
            layer = self.stages.quantized(name, self.model.get_submodule(name))
        else:
            held = self.stages.held(name) if isinstance(self.stages, Holding) else None
            if held is not None:
                return held
            layer = self._packed(name)
        if self.saver:
            self.saver.add(name, layer)
        return self.stages.built(name, layer)

    def fill(self, name: str) -> None:
        """Give the model's module `name` its weights in full precision."""
        module, split = self.model.get_submodule(name), self.split
        tied = name == "output" and self.model.config.tie_embeddings
        for kind, _ in list(module.named_parameters(recurse=False)):
            full_name = f"{name}.{kind}"
            cut = None if split is None or self.reads_whole(name) else split.cut(full_name)
            weight = self._embedding() if tied and (split is None or cut is not None) else None
            if weight is None:
                source = "tok_embeddings.weight" if tied else full_name
                weight = self.tensors.read(source, self.whole.get_parameter(full_name), cut)
            module.register_parameter(kind, self._parameter(full_name, weight))

    def _packed(self, name: str) -> nn.Module:
        """The layer `name` with quantized weights, which are read as the checkpoint has them.

        Quantizing the layer on the meta device tells which tensors to expect."""
        layer = self.stages.quantized(name, self.whole.get_submodule(name))
        read_packed(self.tensors, name, layer)
        for kind, parameter in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(kind, self._parameter(f"{name}.{kind}", parameter.data))
        return layer

    def _parameter(self, name: str, weight: Tensor) -> nn.Parameter:
        if self.split and self.split.is_zero(name):
            weight = torch.zeros_like(weight)
        return nn.Parameter(weight, requires_grad=False)

    def _embedding(self) -> Tensor | None:
        """The embedding's weights, for a tied output to share; None where they are quantized."""
        weight = getattr(self.model.tok_embeddings, "weight", None)
        plain = isinstance(weight, nn.Parameter) and type(weight.data) is Tensor
        return weight.data if plain and weight.is_floating_point() else None


def read_packed(tensors: Tensors, name: str, layer: nn.Module) -> None:
    """Give the quantized layer `name`, on the meta device, the checkpoint's weights."""
    for kind, parameter in list(layer.named_parameters(recurse=False)):
        weight = _inner(tensors, f"{name}.{kind}", parameter.data)
        layer.register_parameter(kind, nn.Parameter(weight, requires_grad=False))


def _inner(tensors: Tensors, name: str, like: Tensor) -> Tensor:
    if not hasattr(like, "__tensor_flatten__"):
        return tensors.read(name, like)
    names, attributes = like.__tensor_flatten__()
    inner = {part: _inner(tensors, f"{name}.{part}", getattr(like, part)) for part in names}
    return type(like).__tensor_unflatten__(inner, attributes, like.shape, like.stride())


def _parts(names: Iterable[str], whole_layers: bool) -> dict[str, list[str]]:
    """What is loaded at a time: its name, and the names of its modules that have parameters.

    A list of the modules themselves would keep those in memory that were replaced.
    """
    parts: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        parts.setdefault(layer[0] if layer and whole_layers else name, []).append(name)
    return parts


class WeightPool:
    """Pieces of the CPU's memory that are filled with weights, side by side, so that these lie in
    huge pages.

    The CPU finds a page of 2 MB in its tables as fast as one of 4 KB, so a kernel that reads
    weights from memory waits less (docs/LOG.md). The system gives such pages to whole, aligned 2 MB
    alone: a matrix of 1.6 MB, as experts have them, gets none, and one of 3 MB one at most.
    """

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.uint8, device="cpu")  # the newest piece's rest
        self.moved = 0  # bytes since malloc returned memory

    def move(self, module: nn.Module) -> None:
        """Copy the module's parameters into the pool; they stay the same Parameters.

        What is large, elsewhere than on the CPU or in a tensor subclass stays where it is.
        """
        for parameter in module.parameters():
            weight = parameter.data
            size = weight.numel() * weight.element_size()
            moves = type(weight) is Tensor and weight.device.type == "cpu" and size <= LARGEST
            if moves and weight.is_contiguous():
                parameter.data = self._take(size).view(weight.dtype).view(weight.shape)
                parameter.data.copy_(weight)
                self.moved += size
        if self.moved > KEPT:  # or the heap would grow by holes: loading peaked 80 MB higher
            devices.return_freed()
            self.moved = 0

    def _take(self, size: int) -> Tensor:
        lines = -(-size // LINE) * LINE
        if lines > len(self.free):
            self.free = torch.empty(PIECE, dtype=torch.uint8, device="cpu")
        # numpy gives each weight a separate storage. To torch.compile, parts of one
        # storage are aliases, and a region that is compiled once for all layers takes none.
        taken = torch.from_numpy(self.free[:size].numpy())
        self.free = self.free[lines:]
        return taken
