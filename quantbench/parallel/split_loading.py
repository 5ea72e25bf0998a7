"""Loading one rank's part of a model, with the quantized numbers that one rank alone would have.

    stages = RankStages(quantizer, split)
    load_model(path, transform=stages, split=split, reads_whole=stages.reads_whole)

A scheme's numbers may depend on more of a weight than a rank has: on the whole row, if that shares
a scale, or on the whole weight. Such a layer is read whole, quantized whole and then cut, one layer
at a time. All others are read in part.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from quantbench.errors import KernelError
from quantbench.models.config import ModelConfig
from quantbench.models.loading import Stages
from quantbench.models.split import Cut, Split, feed_forward_widths
from quantbench.ops.ranks import Ranks
from quantbench.quantize.activation import STATIC, RoundedAcross
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.per_layer import MixedQuantizer
from quantbench.quantize.registry import Quantizer, column_unit, has_row_scales, with_weight
from quantbench.quantize.spec import Spec, parse_layer

Layer = nn.Linear | nn.Embedding


def split_for(
    config: ModelConfig,
    ranks: Ranks,
    spec: Spec | None,
    layers: Mapping[str, Sequence[str]] | None = None,
) -> Split:
    """One rank's share of a model whose layers have the scheme `spec`; or those of `layers`,
    (scheme, kernel) by name.

    Raises UsageError for a number of ranks that cannot share its heads, KernelError for a scheme
    whose groups of columns do not fit a rank's heads.
    """
    chosen = [parse_layer(scheme) for scheme, _ in (layers or {}).values()]
    schemes = {str(scheme): scheme for scheme in (*chosen, *(spec.candidates if spec else ()))}
    widths = feed_forward_widths(config)
    units = [column_unit(scheme, width) for scheme in schemes.values() for width in widths]
    split = Split(config, ranks, math.lcm(*units))
    columns = split.config.num_heads * config.head_dim
    for name, scheme in schemes.items():
        unit = column_unit(scheme, config.num_heads * config.head_dim)
        if columns % unit:
            raise KernelError(
                f"--tp {ranks.size}: a rank's heads have {columns} columns of attention.wo, no "
                f"multiple of the {unit} that {name} keeps together; take fewer ranks, or smaller "
                "groups"
            )
    return split


class RankStages:
    """The stages of quantizing (models.loading.Stages), with a cut between them."""

    def __init__(
        self, stages: Stages, split: Split, whole: bool = False, saved: bool = False
    ) -> None:
        """whole: whether all layers are quantized whole, to be saved. saved: whether the checkpoint
        holds quantized numbers."""
        self.stages, self.split, self.whole, self.saved = stages, split, whole, saved
        self.quantized = stages.quantized  # of the whole layer, or of what was read of it
        # Parts by (address of the whole, cut): an output that shares the embedding's weight goes on
        # sharing it.
        self._parts: dict[tuple[int, Cut], nn.Parameter] = {}

    def reads_whole(self, name: str) -> bool:
        """Whether a module is read and quantized whole."""
        if self.whole:
            return True
        quantizer: Stages | None = self.stages
        if isinstance(quantizer, MixedQuantizer) and not self.saved:
            quantizer = quantizer.of(name)
        cut = self.split.cut(f"{name}.weight")
        if not isinstance(quantizer, Quantizer) or cut is None or name == "tok_embeddings":
            return False
        spec = quantizer.spec
        if quantizer.scheme.needs_all_rows(spec):
            return True
        return cut.dim == 1 and has_row_scales(spec)

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        """This rank's part of the layer, in the form that its kernel takes."""
        cut = self.split.cut(f"{name}.weight")
        if cut is None or not isinstance(layer, nn.Linear | nn.Embedding):
            return self.stages.built(name, layer)
        if layer.weight.shape[cut.dim] != cut.size:
            layer = self._cut(layer, cut)
        weight = layer.weight.data
        activation = weight.activation if isinstance(weight, PackedWeight) else None
        if (
            cut.dim == 0
            or activation is None
            or activation in STATIC
            or isinstance(layer, nn.Embedding)
        ):
            return self.stages.built(name, layer)
        assert isinstance(weight, PackedWeight)
        inner = with_weight(layer, weight.replaced(activation=None))
        inner.register_parameter("bias", None)
        return RoundedAcross(
            self.stages.built(name, inner),
            layer.bias,
            activation,
            self.split.ranks,
            self.split.widths(name),
        )

    def _cut(self, layer: Layer, cut: Cut) -> Layer:
        full_weight, bias = layer.weight.data, getattr(layer, "bias", None)
        weight: Tensor
        if isinstance(full_weight, PackedWeight):
            ((start, end), *_) = cut.ranges
            weight = (
                full_weight.columns_between(start, end)
                if cut.dim
                else full_weight.rows_of(cut.ranges)
            )
        else:
            key = (full_weight.data_ptr(), cut)
            if full_weight.is_meta or key not in self._parts:
                self._parts[key] = nn.Parameter(cut.of([full_weight]), requires_grad=False)
            weight = self._parts[key]
        part = with_weight(layer, weight)
        if bias is not None and cut.dim == 0:
            part.bias = nn.Parameter(cut.of([bias]), requires_grad=False)
        return part
