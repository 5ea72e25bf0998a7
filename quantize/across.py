"""Rounding activations by a scale that they share with other ranks.

A layer that is cut by columns gets some columns of its input. Schemes that round activations take
the scale from all of them, so ranks gather the whole input first.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from quantbench.ops.ranks import Ranks
from quantbench.quantize.activation import rounded


class RoundedAcross(nn.Module):
    """A linear layer over this rank's columns of x; x is rounded as one rank would round it."""

    def __init__(
        self, inner: nn.Module, bias: Tensor | None, how: str, ranks: Ranks, widths: Sequence[int]
    ) -> None:
        """inner: multiplies by the weight, and neither rounds nor adds a bias.
        how: a name of quantize.activation.ROUNDINGS. widths: columns of each rank.
        """
        super().__init__()
        self.inner, self.how, self.ranks, self.widths = inner, how, ranks, list(widths)
        self.start = sum(self.widths[: ranks.rank])
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, K) → (…, N) in x's dtype: this rank's part of a sum over ranks."""
        numbers, scale = rounded(self.ranks.gather(x.float(), self.widths), self.how)
        mine = numbers[..., self.start : self.start + x.shape[-1]].contiguous()
        y = self.inner(mine) * scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)
