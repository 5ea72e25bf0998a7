"""No quantization: weights stay as and where they are; only who multiplies by them differs."""

from typing import Any

from torch import Tensor, nn

from quantize.cpu import no_cpu
from quantize.scheme import Kernel, Scheme


class PlainLinear(nn.Linear):
    """A linear layer whose weight is read by the C++ kernel, from where torch has put it."""

    in_cpp = True  # other C++ kernels can call this one's

    def forward(self, x: Tensor) -> Tensor:
        from ops.cpu.plain import linear

        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias


def as_plain(layer: nn.Linear, spec: Any) -> nn.Module:
    like = PlainLinear(layer.in_features, layer.out_features, False, "meta")
    like.weight, like.bias = layer.weight, layer.bias
    return like


SCHEME = Scheme(
    quantize=lambda weight, spec: weight,
    kernels={"cpu": Kernel(as_plain, no_cpu), "torch": Kernel(lambda layer, spec: layer)},
)
