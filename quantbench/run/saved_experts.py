"""The file of experts that --save has left beside a model: whether this run can read it.

    saved = open_saved(plan, quantizer)     # None: there is none
    saved.slow, saved.linears               # raises Unusable: the run writes its own file

The file holds experts in the form of one kernel. So the first and the last expert are quantized and
packed as this run does it, from the shards of the same folder, and compared with the file's bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from quantbench.experts.layout import Layout
from quantbench.experts.slow import File, Key, Unusable, pages, saved_file
from quantbench.experts.tiers import keys_of
from quantbench.models import build
from quantbench.models.formats.base import Tensors
from quantbench.models.formats.saved import SavedModel
from quantbench.models.loading import read_packed
from quantbench.models.mixtral import MixtureOfExperts
from quantbench.quantize.registry import Quantizer
from quantbench.run.plan import Plan


@dataclass(frozen=True)
class SavedTier:
    """A slow tier that is there before the model is loaded."""

    slow: File
    linears: Mapping[str, nn.Module]  # of one expert, by their names in it


@torch.no_grad()
def open_saved(plan: Plan, quantizer: Quantizer) -> SavedTier | None:
    """The experts beside the plan's checkpoint; None where --save has left none.

    quantizer: the run's; it notes its kernels for all of these experts, which it will not see.
    Raises Unusable, CheckpointError, KernelError.
    """
    checkpoint = plan.checkpoint
    if not isinstance(checkpoint, SavedModel) or checkpoint.experts is None:
        return None
    every, keys = keys_of(checkpoint.config()), keys_of(plan.architecture)
    weights, compared = checkpoint.tensors(), dict.fromkeys((keys[0], keys[-1]))
    experts = {key: _packed(plan, quantizer, weights, key) for key in compared}
    layout = Layout.of(experts[keys[0]])
    try:
        slow = saved_file(checkpoint.file.parent, checkpoint.experts, every, layout.nbytes)
        _compare(slow, layout, experts)
    except Unusable:
        quantizer.ran.clear()
        raise
    for kernel in quantizer.ran:
        quantizer.ran[kernel] *= len(keys) // len(compared)
    return SavedTier(slow, experts[keys[0]])


def _packed(plan: Plan, quantizer: Quantizer, weights: Tensors, key: Key) -> dict[str, nn.Module]:
    """An expert's linear layers as this run's kernels hold them, read from the shards."""
    with torch.device("meta"):
        model = build(plan.architecture.one_of_each_kind()).to(plan.precision)
    mixture = next(module for module in model.modules() if isinstance(module, MixtureOfExperts))
    name = f"layers.{key[0]}.feed_forward.experts.{key[1]}"
    linears = {}
    for part, module in mixture.experts[0].named_children():
        layer = quantizer.quantized(f"{name}.{part}", module)
        read_packed(weights, f"{name}.{part}", layer)
        linears[part] = quantizer.built(f"{name}.{part}", layer)
    return linears


def _compare(slow: File, layout: Layout, experts: Mapping[Key, Mapping[str, nn.Module]]) -> None:
    """Raise Unusable unless the file holds these experts' bytes."""
    stored = pages(layout.nbytes)
    for key, linears in experts.items():
        packed = pages(layout.nbytes)
        layout.write(linears, packed)
        slow.read(key, stored)
        if not torch.equal(packed, stored):
            raise Unusable(f"{slow.where} has another form than this run's kernels read")
