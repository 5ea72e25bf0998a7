"""How ranks share a model: tensor parallelism as in Megatron-LM (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053).

    split = Split(config, ranks)
    split.config                                # the widths of this rank's modules
    split.cut("layers.0.attention.wo.weight")   # Cut(1, ((0, 1024),)): these of its columns
    model = build_share(Transformer, split)     # with these widths, wired to the other ranks
    model.split                                 # the Split; None for a whole model

Each rank has some of the heads, of the feed-forward network's columns and of the vocabulary. Its
attention and its feed-forward network give a part of a sum, and its output layer some logits. So
ranks exchange numbers at two places of each layer, and at the model's beginning and end. Where
there are fewer key/value heads than ranks, several ranks have the same one.

The model's own file knows no ranks. Here each layer's attention and feed-forward network get a hook
that sums their outputs over ranks, and the model's class gets an embedding and logits of which each
rank has a part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from quantbench.errors import UsageError
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Block, JointNorm, Transformer
from quantbench.models.registry import of_config
from quantbench.models.shapes import beyond_llama
from quantbench.ops.ranks import Ranks

Range = tuple[int, int]  # from the first, up to but without the last
# Columns of the feed-forward network are cut at multiples of this, if that gives equal parts: the
# C++ kernels read 32 at a time.
PREFERRED = 32


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that a rank has: ranges along one dimension, one behind the other."""

    dim: int
    ranges: tuple[Range, ...]

    def of(self, pieces: Sequence[Tensor]) -> Tensor:
        """The part of pieces that are stacked along dimension 0; a copy, contiguous."""
        if self.dim:
            (piece,) = pieces
            parts = [piece[:, start:end] for start, end in self.ranges]
        else:
            parts = [part for span in self.ranges for part in _rows(pieces, span)]
        return torch.cat(parts, self.dim).contiguous()

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.ranges)


def _rows(pieces: Sequence[Tensor], span: Range) -> list[Tensor]:
    parts, first = [], 0
    for piece in pieces:
        start, end = (min(max(at - first, 0), len(piece)) for at in span)
        if start < end:
            parts.append(piece[start:end])
        first += len(piece)
    return parts


@dataclass(frozen=True)
class Split:
    """One rank's share of a model.

    Raises UsageError, with the numbers of ranks that are possible, where heads cannot be shared
    evenly.
    """

    whole: ModelConfig
    ranks: Ranks
    unit: int = 1  # columns of the feed-forward network that must stay together

    def __post_init__(self) -> None:
        config, size = self.whole, self.ranks.size
        possible = possible_ranks(config)
        heads = f"{config.num_heads} query and {config.num_kv_heads} key/value heads"
        if size not in possible:
            takes = ", ".join(map(str, possible))
            raise UsageError(
                f"--tp {size}: {config.name} has {heads}, which {size} ranks cannot share evenly; "
                f"--tp takes {takes}"
            )
        narrowest = min(feed_forward_widths(config))
        if narrowest // self.unit < size or config.vocab_size < size:
            raise UsageError(
                f"--tp {size}: {config.name}'s feed-forward network of {narrowest} columns, "
                f"in groups of {self.unit}, is too narrow for them; take fewer"
            )

    @property
    def config(self) -> ModelConfig:
        """The widths of this rank's modules."""
        first, last = self.vocabulary
        experts = self.whole.mixture
        if experts is not None:
            experts = replace(
                experts,
                expert_dim=self._width(experts.expert_dim),
                shared_dim=self._width(experts.shared_dim),
            )
        return replace(
            self.whole,
            num_heads=self.whole.num_heads // self.ranks.size,
            num_kv_heads=max(1, self.whole.num_kv_heads // self.ranks.size),
            ffn_dim=self._width(self.whole.ffn_dim),
            vocab_size=last - first,
            mixture=experts,
        )

    @property
    def heads(self) -> Range:
        """This rank's query heads."""
        return _share(self.whole.num_heads, 1, self.ranks.rank, self.ranks.size)

    @property
    def kv_heads(self) -> Range:
        """This rank's key/value heads: those that its query heads read."""
        each = self.whole.num_heads // self.whole.num_kv_heads
        first, last = self.heads
        return first // each, (last - 1) // each + 1

    def feed_forward(self, width: int) -> Range:
        """This rank's columns of a feed-forward network of that width."""
        size = self.ranks.size
        unit = math.lcm(self.unit, PREFERRED)
        unit = self.unit if width % (unit * size) else unit
        return _share(width, unit, self.ranks.rank, size)

    def _width(self, width: int) -> int:
        start, end = self.feed_forward(width)
        return end - start

    @property
    def vocabulary(self) -> Range:
        """The tokens whose embeddings and logits this rank has."""
        return _share(self.whole.vocab_size, 1, self.ranks.rank, self.ranks.size)

    def cut(self, parameter: str) -> Cut | None:
        """The part of a parameter, by its name in the model, that this rank has; None: all of it.

        wo and w2 are cut by columns, so their products are summed over ranks. Their biases are
        added once: rank 0 has them, and for the others they are zeros.
        """
        name = parameter.removesuffix(".weight").removesuffix(".bias")
        whole, E = self.whole, self.whole.head_dim
        query = _scaled(self.heads, E)
        if name.endswith("attention.wqkv"):
            kv = _scaled(self.kv_heads, E)
            keys, values = whole.num_heads * E, (whole.num_heads + whole.num_kv_heads) * E
            return Cut(0, (query, _moved(kv, keys), _moved(kv, values)))
        if name.endswith(".w13"):
            width = self._whole_width(name)
            columns = self.feed_forward(width)
            return Cut(0, (columns, _moved(columns, width)))
        if name in ("tok_embeddings", "output"):
            return Cut(0, (self.vocabulary,))
        if parameter.endswith("attention.wo.weight"):
            return Cut(1, (query,))
        if parameter.endswith(".w2.weight"):
            return Cut(1, (self.feed_forward(self._whole_width(name)),))
        if whole.joint_qk_norm and name.endswith(("q_norm", "k_norm")):
            return Cut(0, (query if name.endswith("q_norm") else _scaled(self.kv_heads, E),))
        return None

    def _whole_width(self, name: str) -> int:
        """The width of the whole feed-forward network that a matrix of this name is in."""
        experts = self.whole.mixture
        if experts is None or name.count(".") == 3:  # layers.N.feed_forward.w13
            return self.whole.ffn_dim
        return experts.expert_dim if ".experts." in name else experts.shared_dim

    def widths(self, name: str) -> list[int]:
        """How many rows or columns of a layer, whichever is cut, each rank has."""
        shares = [replace(self, ranks=Ranks(i, self.ranks.size)) for i in range(self.ranks.size)]
        cuts = [share.cut(f"{name}.weight") for share in shares]
        return [cut.size for cut in cuts if cut is not None]

    def is_zero(self, parameter: str) -> bool:
        """Whether a parameter is a bias that another rank adds: to a sum over ranks, only once."""
        return self.ranks.rank > 0 and parameter.endswith(("wo.bias", "w2.bias"))


def feed_forward_widths(config: ModelConfig) -> set[int]:
    """The widths of all feed-forward networks of a model."""
    experts = config.mixture
    if experts is None:
        return {config.ffn_dim}
    widths = {experts.expert_dim, *([experts.shared_dim] if experts.shared_dim else [])}
    return widths | ({config.ffn_dim} if experts.dense_layers else set())


def possible_ranks(config: ModelConfig) -> list[int]:
    """The numbers of ranks that can share the heads evenly, least first."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def _share(count: int, unit: int, rank: int, size: int) -> Range:
    """Rank's part of `count`, cut at multiples of `unit`; the last rank has what is left over."""
    units = count // unit
    start, end = units * rank // size * unit, units * (rank + 1) // size * unit
    return start, count if rank == size - 1 else end


def _scaled(span: Range, by: int) -> Range:
    return span[0] * by, span[1] * by


def _moved(span: Range, by: int) -> Range:
    return span[0] + by, span[1] + by


def check_split(config: ModelConfig, ranks: int) -> None:
    """Raise UsageError for a model that ranks cannot share."""
    if not of_config(config).splits:
        raise UsageError(
            f"--tp {ranks}: how ranks share a model of architecture {config.architecture} is not "
            "known yet; leave out --tp"
        )
    if part := beyond_llama(config):
        raise UsageError(
            f"--tp {ranks}: how ranks share a model with {part} is not known yet; leave out --tp"
        )


# ---------------------------------------------------------------------------------- the model


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
        return self.split.ranks.gather(y, self.split.widths("output"))


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


def kind_of(model: nn.Module) -> type[nn.Module]:
    """The class of a model of which this is a share."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, Shared))
