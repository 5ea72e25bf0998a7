"""Quantization of activations: dynamic, every token rounded by scales taken from itself; or static,
all of them by one scale that a checkpoint has.

Each rounding but GROUPED gives numbers that bfloat16 and float16 hold exactly: integers up to 255
in size, or E4M3. So a weight-only kernel multiplies by them what an integer or float8 kernel would
multiply, and the scale is applied afterwards.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.ops.ranks import Ranks

E4M3_MAX = 448.0
SMALLEST = torch.finfo(torch.float32).eps  # torchao's smallest scale
GROUPED = "float8-128"  # columns have several scales: its numbers are scaled, and float32


def rounded(x: Tensor, rounding: str, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x (…, K) as (numbers of x's dtype, scale): x ≈ numbers · scale, float32 scale for each token
    (…, 1) or for all (). GROUPED gives float32 numbers, and the scale 1.

    rounding: a name of ROUNDINGS, or of STATIC with the scale `static`, ().
    """
    if static is None:
        numbers, scale = ROUNDINGS[rounding](x.float())
    else:
        numbers, scale = STATIC[rounding](x.float() / static), static
    return numbers if rounding == GROUPED else numbers.to(x.dtype), scale


def _int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds as torchao's Int8DynamicActivationInt8WeightConfig: -128 to 127, symmetric."""
    scale = (x.abs().amax(-1, keepdim=True) / 127.5).clamp(min=SMALLEST)
    return (x / scale).round().clamp(-128, 127), scale


def _int8_asymmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds as torchao's Int8DynamicActivationIntxWeightConfig: 256 steps from least to most."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=SMALLEST)
    zero = (-128 - (low / scale).round()).clamp(-128, 127)
    return ((x / scale).round() + zero).clamp(-128, 127) - zero, scale


def _int8_bitsandbytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds as bitsandbytes' int8_vectorwise_quant without outliers: float16, -127 to 127."""
    # torch.compile drops a cast to float16 and back, and with it the rounding (torch 2.13); it
    # keeps the one whose bits the kernel reads.
    x = (x.half().view(torch.int16) & -1).view(torch.float16).float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x * torch.where(scale > 0, 1 / scale, 0.0)).round(), scale


def _float8_row(x: Tensor) -> tuple[Tensor, Tensor]:
    return _float8(x, x.abs().amax(-1, keepdim=True))


def _float8_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    return _float8(x, x.abs().amax().expand(*x.shape[:-1], 1))


def _float8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Every 128 columns of a token have a scale, as DeepSeek-V3's have (arXiv:2412.19437, 3.3)."""
    columns = x.shape[-1]
    groups = F.pad(x, (0, -columns % 128)).unflatten(-1, (-1, 128))
    numbers, scale = _float8_row(groups)
    return (numbers * scale).flatten(-2)[..., :columns], x.new_ones(())


def _float8(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = amax.clamp(min=1e-12) / E4M3_MAX
    return _e4m3(x / scale), scale


def _e4m3(x: Tensor) -> Tensor:
    within = x.clamp(-E4M3_MAX, E4M3_MAX)
    if x.is_cuda:
        from quantbench.ops import e4m3

        return e4m3.nearest(within)
    return within.to(torch.float8_e4m3fn).float()


ROUNDINGS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int8": _int8,
    "int8-asymmetric": _int8_asymmetric,
    "int8-bitsandbytes": _int8_bitsandbytes,
    "float8-row": _float8_row,
    "float8-tensor": _float8_tensor,
    GROUPED: _float8_groups,
}
STATIC: dict[str, Callable[[Tensor], Tensor]] = {  # x divided by its scale -> numbers
    "int8-static": lambda x: x.round().clamp(-128, 127),
    "float8-static": _e4m3,
}


class RoundedAcross(nn.Module):
    """A linear layer over this rank's columns of x, which is rounded as one rank would round it:
    the ranks gather the whole x for its scale."""

    def __init__(
        self,
        inner: nn.Module,
        bias: Tensor | None,
        rounding: str,
        ranks: Ranks,
        widths: Sequence[int],
    ) -> None:
        """inner: multiplies by the weight, and neither rounds nor adds a bias.
        rounding: a name of ROUNDINGS. widths: columns of each rank.
        """
        super().__init__()
        self.inner, self.rounding, self.ranks, self.widths = inner, rounding, ranks, list(widths)
        self.start = sum(self.widths[: ranks.rank])
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, K) → (…, N) in x's dtype: this rank's part of a sum over ranks."""
        numbers, scale = rounded(self.ranks.gather(x.float(), self.widths), self.rounding)
        mine = numbers[..., self.start : self.start + x.shape[-1]].contiguous()
        y = self.inner(mine) * scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)
