"""A model that ranks share: built with one rank's widths, then wired to the other ranks.

    model = build_share(Transformer, Split(config, ranks))
    split_of(model)         # the Split; None for a whole model

The model's own file knows no ranks. Here each layer's attention and feed-forward network get a hook
that sums their outputs over ranks, and the model's class gets an embedding and logits of which each
rank has a part (models/split.py).
"""

from typing import Any, cast

from torch import Tensor, nn

from quantbench.models.llama import Block, JointNorm, Transformer
from quantbench.models.split import Split


class Shared:
    """Put before a model's own class: a vocabulary of which each rank has a part."""

    split: Split

    def embed(self, tokens: Tensor) -> Tensor:
        start, end = self.split.vocabulary
        mine = (tokens >= start) & (tokens < end)
        x: Tensor = super().embed((tokens - start).clamp(0, end - start - 1))  # type: ignore[misc]
        return self.split.ranks.sum(x.masked_fill(~mine[..., None], 0))

    def logits(self, x: Tensor) -> Tensor:
        y: Tensor = super().logits(x)  # type: ignore[misc]
        return self.split.ranks.gather(y, self.split.vocabularies)


def build_share(kind: type[Transformer], split: Split) -> Transformer:
    """One rank's share of a model of that class, on torch's default device."""
    ranks = split.ranks
    model = cast("Transformer", type(kind.__name__, (Shared, kind), {"split": split})(split.config))

    def sum_over_ranks(module: nn.Module, inputs: Any, y: Tensor) -> Tensor:
        return ranks.sum(y)

    for layer in model.layers:
        block = cast("Block", layer)
        block.attention.register_forward_hook(sum_over_ranks)
        block.feed_forward.register_forward_hook(sum_over_ranks)
    for module in model.modules():
        if isinstance(module, JointNorm):
            module.share(ranks)
    return model


def split_of(model: nn.Module) -> Split | None:
    """This rank's share; None for a model that no ranks share."""
    return model.split if isinstance(model, Shared) else None


def kind_of(model: nn.Module) -> type[nn.Module]:
    """The model's own class, shared or not."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, Shared))
