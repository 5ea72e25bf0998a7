"""Weights that a checkpoint's file holds quantized, kept with the file's own numbers.

    tensors = AsIs(checkpoint.tensors())
    tensors.layers(model)           # {"layers.0.attention.wqkv": ["stored-uint-4-32-…", "auto"], …}

A loader reads each tensor inside a packed weight by its name, as from a model that --save wrote.
"""

import copy
import functools
from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantbench.errors import CheckpointError
from quantbench.models.formats import packed
from quantbench.models.formats.base import Checkpoint, SavedScheme, Tensors
from quantbench.models.formats.packed import Form
from quantbench.models.formats.stacked import StackedTensors
from quantbench.models.llama import Transformer
from quantbench.models.registry import build
from quantbench.models.split import Cut
from quantbench.ops.formats import Packed

FULL_PRECISION = ["none", "auto"]


@dataclass
class AsIs:
    """A checkpoint's tensors (models.formats.base.Tensors), quantized ones as they are."""

    stacked: StackedTensors
    # What the weight read last is made of, and its tensors: a tied output is the embedding.
    _held: tuple[tuple[str, ...], dict[str, Tensor]] = field(default=((), {}))

    def check(self, model: Transformer, depth: int) -> None:
        self.stacked.check(model, depth)

    def layers(self, model: Transformer) -> dict[str, list[str]]:
        """(scheme, kernel) of every linear layer and embedding by its name; none at all where the
        file holds everything in full precision."""
        names = [
            name.removesuffix(".weight") for name, p in model.named_parameters() if p.ndim == 2
        ]
        forms = {name: self._form(f"{name}.weight") for name in names}
        if not any(forms.values()):
            return {}
        return {
            name: [str(form), "auto"] if form else FULL_PRECISION for name, form in forms.items()
        }

    def _form(self, name: str) -> Form | None:
        """How the file holds a parameter quantized; None where it does not, or where no form holds
        all that the parameter is made of."""
        tensors = self.stacked.tensors
        forms = [
            tensors[piece].form if piece in tensors else None for piece in self.stacked.pieces(name)
        ]
        return packed.common(forms) if forms and all(forms) else None

    def read(self, name: str, like: Tensor, cut: Cut | None = None) -> Tensor:
        weight, _, part = name.partition(".weight.")
        if not part:
            self._check_floats(name)
            return self.stacked.read(name, like, cut).to(like.dtype)
        pieces = self.stacked.pieces(f"{weight}.weight")
        if self._held[0] != pieces:
            parts = self._packed(f"{weight}.weight", len(like)).tensors
            form = self._form(f"{weight}.weight")
            if form is not None and form.static is not None:
                parts["activation_scale"] = torch.tensor(form.static)
            self._held = pieces, {key: one.to(self.stacked.device) for key, one in parts.items()}
        tensor = self._held[1][part]
        if tensor.shape != like.shape:
            raise CheckpointError(
                f"{self.stacked.where}: {weight} has a {part} of shape {tuple(tensor.shape)}; the "
                f"config says {tuple(like.shape)}"
            )
        return tensor

    def _check_floats(self, name: str) -> None:
        """Raise CheckpointError for a parameter that is read as floats since no form holds all of
        it, though activations are rounded for a part of it."""
        tensors = self.stacked.tensors
        for piece in self.stacked.pieces(name):
            form = tensors[piece].form if piece in tensors else None
            if form is not None and form.activation:
                raise CheckpointError(
                    f"{tensors[piece].file}: {piece} rounds activations ({form.activation}) in "
                    "another way than the others that are one matrix with it here; give "
                    "--quantization none or a scheme"
                )

    def _packed(self, name: str, rows: int) -> Packed:
        """A parameter (rows, K) with the file's numbers."""
        form, pieces = self._form(name), self.stacked.pieces(name)
        shapes = self.stacked.shapes(name, torch.empty(rows, 0, device="meta"))
        weights = []
        for piece, (count, _) in zip(pieces, shapes, strict=True):
            stored = self.stacked.tensors[piece]
            weight = stored.packed()
            found = len(weight.planes[0])
            if found != count:
                raise CheckpointError(
                    f"{stored.file}: tensor {piece} has {found} rows; the config says {count}"
                )
            if stored.form != form:
                weight = packed.widened(weight, form)
            weights.append(weight)
        weight, order = packed.stacked(weights), self.stacked.rotary_order(name, self.stacked.heads)
        if order is None:
            return weight
        order = torch.cat((order, torch.arange(len(order), rows)))
        return weight.with_rows({name: part[order] for name, part in weight.by_row.items()})


class MaybeQuantized(Checkpoint):
    """A checkpoint whose file may hold weights quantized. They stay so, unless in_full_precision is
    asked for."""

    _as_is = True

    @abstractmethod
    def _label(self) -> str | None:
        """What logs call the file's quantization; None where it has none."""

    @abstractmethod
    def _stacked(self, device: torch.device | str = "cpu") -> StackedTensors:
        """The weights as floats."""

    @functools.cached_property
    def saved(self) -> SavedScheme | None:  # type: ignore[override]
        label = self._label() if self._as_is else None
        if not label:
            return None
        config = self.config()
        with torch.device("meta"):
            model = build(config)
        layers = AsIs(self._stacked()).layers(model)
        return SavedScheme("as-is", None, layers, label) if layers else None

    def in_full_precision(self) -> Checkpoint:
        if self.saved is None:
            return self
        other = copy.copy(self)
        other.given_up = self.saved.label
        other.__dict__.pop("saved", None)
        other._as_is = False
        return other

    def tensors(self, device: torch.device | str = "cpu") -> Tensors:
        stacked = self._stacked(device)
        return AsIs(stacked) if self.saved else stacked
