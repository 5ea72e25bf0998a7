"""Weights of published checkpoints: found by name, checked, stacked, reordered. What a file holds
quantized is read as floats, or kept with the file's own numbers.

    checkpoint.tensors().read("layers.0.attention.wqkv.weight", like)           # floats
    checkpoint.tensors().read("layers.0.attention.wqkv.weight.plane0", like)    # the file's codes

A loader reads each tensor inside a packed weight by its name, as from a model that --save wrote.
"""

from __future__ import annotations

import copy
import functools
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantbench.errors import CheckpointError
from quantbench.models.config import ModelConfig
from quantbench.models.formats.base import Checkpoint, SavedScheme
from quantbench.models.formats.names import NameMap
from quantbench.models.formats.tensor_files import StoredTensor
from quantbench.models.llama import Transformer
from quantbench.models.registry import build

if TYPE_CHECKING:
    from quantbench.models.formats.packed import PackedForm
    from quantbench.models.split import Cut

FULL_PRECISION = ["none", "auto"]
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Tensors that follow from the config, and those of layers that draft the tokens behind the next.
_DERIVED = re.compile(r".*rotary_emb\.inv_freq|rope\.freqs|freqs_cis|causal_mask|mtp\..*")
_LAYER_NUMBER = re.compile(r"(?:(?:model\.)?layers|blk)\.(\d+)\.")


@dataclass
class StackedTensors:
    """Reads a parameter from the tensors that it is made of, one or several."""

    where: Path  # the checkpoint, for error messages
    tensors: Mapping[str, StoredTensor]
    names: NameMap
    config: ModelConfig
    interleaved: bool  # whether q and k rows have rotary pairs (2i, 2i + 1), as in Meta's order
    device: torch.device | str = "cpu"
    # What the packed weight read last is made of, and its tensors: a tied output is the embedding.
    _held: tuple[tuple[str, ...], dict[str, Tensor]] = field(default=((), {}))

    def check(self, model: Transformer, depth: int) -> None:
        needed = {piece for name, _ in model.named_parameters() for piece in self.pieces(name)}
        missing = sorted(needed - self.tensors.keys())
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{self.where} lacks tensor {missing[0]}{others}")
        # Published layers that read an earlier layer's keys and values have these even so.
        parts = [
            f"layers.{i}.attention.{part}.weight"
            for i in self.config.shared_layers
            for part in ("wqkv", "k_norm")
        ]
        unread = {piece for part in parts for piece in self.names(part)}
        for extra in sorted(self.tensors.keys() - needed - unread):
            layer = _LAYER_NUMBER.match(extra)
            is_cut_off = layer and model.config.num_layers <= int(layer[1]) < depth
            is_harmless = is_cut_off or _DERIVED.fullmatch(extra)
            if not (is_harmless or self._is_zero_bias(extra) or self._is_tied_output(extra)):
                raise CheckpointError(
                    f"{self.tensors[extra].file} has tensor {extra}, which the model would not "
                    "read; is its config.json the right one?"
                )

    def read(self, name: str, like: Tensor, cut: Cut | None = None) -> Tensor:
        weight, _, part = name.partition(".weight.")
        if part:
            return self._part(f"{weight}.weight", part, like)
        names = self.pieces(name)
        for piece in names:
            self._check_floats(piece)
        # Each is a view of the mapped file, so what is cut away is not read.
        pieces = [self.piece(piece) for piece in names]
        for piece_name, piece, shape in zip(names, pieces, self.shapes(name, like), strict=True):
            if tuple(piece.shape) != shape:
                raise CheckpointError(
                    f"{self.tensors[piece_name].file}: tensor {piece_name} has shape "
                    f"{tuple(piece.shape)}; the config says {shape}"
                )
        E, heads = self.config.head_dim, self.heads(name)
        if cut is not None:
            weight = cut.of(pieces)
            heads = [(end - start) // E for start, end in cut.ranges]
        elif len(pieces) > 1:
            weight = torch.cat(pieces)
        else:  # a pickled transposed tensor is column-major; the copy is row-major
            weight = pieces[0].clone(memory_format=torch.contiguous_format)
        if (order := self.row_order(name, heads)) is not None:
            weight[: len(order)] = weight[order]
        return weight.to(self.device).to(like.dtype)

    def row_order(self, name: str, heads: Sequence[int]) -> Tensor | None:
        """Which of a checkpoint's rows each of ours is, of `heads` queries, keys and values; None:
        the same."""
        config = self.config
        rotary_dim = config.rotary_dim or config.head_dim
        if not (self.interleaved or rotary_dim < config.head_dim or config.gated_attention):
            return None
        from quantbench.models.formats.row_order import row_order

        return row_order(name, self.pieces(name), heads, config, self.interleaved)

    def piece(self, name: str) -> Tensor:
        """A checkpoint tensor. It may be a view of the mapped file: copy what is to stay.

        Raises CheckpointError for a tensor that is missing, sparse, or of another dtype.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.where} lacks tensor {name}")
        tensor, file = self.tensors[name].read(), self.tensors[name].file
        if tensor.layout != torch.strided or tensor.is_meta:
            kind = "without values (on the meta device)" if tensor.is_meta else "sparse"
            raise CheckpointError(f"{file}: tensor {name} is {kind}; dense tensors are read")
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{file}: tensor {name} is {tensor.dtype}, and config.json has no "
                "quantization_config that says how to read it; give the full-precision checkpoint "
                "and --quantization"
            )
        return tensor

    def pieces(self, name: str) -> tuple[str, ...]:
        if name in self.tensors:  # gpt-fast stores some projections fused, under the model's name
            return (name,)
        if name == "output.weight" and self.config.tie_embeddings:
            name = "tok_embeddings.weight"
        names = self.names(name)
        if ".wqkv." not in name or len(names) == 1:
            return names
        return tuple(piece for piece, heads in zip(names, self.heads(name), strict=True) if heads)

    def shapes(self, name: str, like: Tensor) -> list[tuple[int, ...]]:
        """The shapes of the pieces that are stacked into a parameter."""
        count = len(self.pieces(name))
        if count > 1 and ".wqkv." in name:
            width = self.config.layers[_number(name)].head_dim
            rows = [heads * width for heads in self.heads(name) if heads]
        elif count > 1 and ".w_in." in name and self.config.recurrent:
            columns = self.config.recurrent.columns(self.config.dim)
            rows = [columns, like.shape[0] - columns]
        else:
            rows = [like.shape[0] // count] * count
        return [(row, *like.shape[1:]) for row in rows]

    def heads(self, name: str) -> Sequence[int]:
        """Heads of queries, with their gates if there are any, keys and values in the layer of a
        parameter; none for a parameter of no layer."""
        if not _LAYER_NUMBER.match(name):
            return ()
        queries, *others = self.config.heads_of(_number(name))
        return [queries * (1 + self.config.gated_attention), *others]

    def _is_zero_bias(self, name: str) -> bool:
        """Whether `name` is a bias of zeros: AutoGPTQ gives one to layers that have none."""
        return name.endswith(".bias") and not self.piece(name).any()

    def _is_tied_output(self, name: str) -> bool:
        """Whether `name` is the output layer of a tied checkpoint, equal to the embedding."""
        if not self.config.tie_embeddings or name not in self.names("output.weight"):
            return False
        (embedding,) = self.names("tok_embeddings.weight")
        return torch.equal(self.piece(name), self.piece(embedding))

    # ------------------------------------------------------------------ with the file's numbers

    def layers(self, model: Transformer) -> dict[str, list[str]]:
        """(scheme, kernel) of every linear layer and embedding by its name; none at all where the
        file holds everything in full precision."""
        kinds = nn.Linear | nn.Embedding
        names = [name for name, layer in model.named_modules() if isinstance(layer, kinds)]
        forms = {name: self._form(f"{name}.weight") for name in names}
        if not any(forms.values()):
            return {}
        return {
            name: [str(form), "auto"] if form else FULL_PRECISION for name, form in forms.items()
        }

    def in_full_precision(self) -> StackedTensors:
        """The same numbers, which are read as floats alone."""
        floats = {name: replace(x, form=None, packed=None) for name, x in self.tensors.items()}
        return replace(self, tensors=floats)

    def _form(self, name: str) -> PackedForm | None:
        """How the file holds a parameter quantized; None where it does not, or where no form holds
        all that the parameter is made of."""
        pieces = [self.tensors.get(piece) for piece in self.pieces(name)]
        forms = [stored.form if stored else None for stored in pieces]
        if not all(forms):
            return None
        from quantbench.models.formats import packed

        return packed.common(forms)

    def _check_floats(self, piece: str) -> None:
        """Raise CheckpointError for a tensor that is read as floats since no form holds all of its
        parameter, though activations are rounded for it."""
        form = self.tensors[piece].form if piece in self.tensors else None
        if form is not None and form.activation:
            raise CheckpointError(
                f"{self.tensors[piece].file}: {piece} rounds activations ({form.activation}) in "
                "another way than the others that are one matrix with it here; give "
                "--quantization none or a scheme"
            )

    def _part(self, name: str, part: str, like: Tensor) -> Tensor:
        """A tensor inside a packed parameter."""
        pieces = self.pieces(name)
        if self._held[0] != pieces:
            form = self._form(name)
            from quantbench.models.formats.stacked_packed import packed_weight

            parts = packed_weight(self, name, form, len(like)).tensors
            if form is not None and form.static is not None:
                parts["activation_scale"] = torch.tensor(form.static)
            self._held = (
                pieces,
                {key: tensor_part.to(self.device) for key, tensor_part in parts.items()},
            )
        tensor = self._held[1][part]
        if tensor.shape != like.shape:
            raise CheckpointError(
                f"{self.where}: {name.removesuffix('.weight')} has a {part} of shape "
                f"{tuple(tensor.shape)}; the config says {tuple(like.shape)}"
            )
        return tensor


def _number(name: str) -> int:
    """The layer's number, in the name of its parameter."""
    layer = _LAYER_NUMBER.match(name)
    assert layer is not None
    return int(layer[1])


class MaybeQuantized(Checkpoint):
    """A checkpoint whose file may hold weights quantized. They stay so, unless in_full_precision is
    asked for."""

    _as_is = True

    @abstractmethod
    def _label(self) -> str | None:
        """What logs call the file's quantization; None where it has none."""

    @abstractmethod
    def _stacked(self, device: torch.device | str = "cpu") -> StackedTensors:
        """The weights."""

    @functools.cached_property
    def saved(self) -> SavedScheme | None:  # type: ignore[override]
        label = self._label() if self._as_is else None
        if not label:
            return None
        config = self.config()
        with torch.device("meta"):
            model = build(config)
        layers = self._stacked().layers(model)
        return SavedScheme("as-is", None, layers, label) if layers else None

    def in_full_precision(self) -> Checkpoint:
        if self.saved is None:
            return self
        copied = copy.copy(self)
        copied.given_up = self.saved.label
        copied.__dict__.pop("saved", None)
        copied._as_is = False
        return copied

    def tensors(self, device: torch.device | str = "cpu") -> StackedTensors:
        stacked = self._stacked(device)
        return stacked if self.saved else stacked.in_full_precision()
