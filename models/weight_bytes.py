"""Bytes of a model's weights, from shapes alone, so that the meta device gives the same numbers."""

from torch import nn

from quantbench.devices import stored_bytes
from quantbench.models.llama import Transformer


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights but the embedding table's. Everything that a quantized weight stores
    counts: packed values, scales, zero points."""
    modules = (m for m in model.modules() if not isinstance(m, nn.Embedding))
    return sum(stored_bytes(p) for module in modules for p in module.parameters(recurse=False))


def step_bytes(model: Transformer, rows: int = 1) -> int:
    """Bytes of weights that one decoding step of so many rows reads: of the experts of a mixture
    those that are chosen."""
    return weight_bytes(model) - round(model.unread_bytes(rows))
