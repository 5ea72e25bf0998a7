"""A parameter that is made of several of a file's tensors, with the file's own numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantbench.errors import CheckpointError
from quantbench.models.formats import packed
from quantbench.ops.formats import Packed

if TYPE_CHECKING:
    from quantbench.models.formats.packed import PackedForm
    from quantbench.models.formats.stacked import StackedTensors


def packed_weight(reader: StackedTensors, name: str, form: PackedForm | None, rows: int) -> Packed:
    """A parameter (rows, K) with the file's numbers."""
    shapes = reader.shapes(name, torch.empty(rows, 0, device="meta"))
    weights = []
    for piece, (count, _) in zip(reader.pieces(name), shapes, strict=True):
        stored = reader.tensors[piece]
        weight = stored.packed()
        rows_stored = len(weight.planes[0])
        if rows_stored != count:
            raise CheckpointError(
                f"{stored.file}: tensor {piece} has {rows_stored} rows; the config says {count}"
            )
        weights.append(weight if stored.form == form else packed.widened(weight, form))
    weight, order = packed.stacked(weights), reader.row_order(name, reader.heads(name))
    if order is None:
        return weight
    order = torch.cat((order, torch.arange(len(order), rows)))
    return weight.with_rows({name: part[order] for name, part in weight.by_row.items()})
