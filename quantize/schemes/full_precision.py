"""none: weights stay as and where they are; only the kernel that multiplies by them differs."""

from torch import Tensor

from quantbench.ops.cpu import plain
from quantbench.quantize.cpu import no_cpu, prepare
from quantbench.quantize.kernel import Kernel, KernelLinear
from quantbench.quantize.scheme import Scheme
from quantbench.quantize.spec import FullPrecision


class PlainLinear(KernelLinear):
    """The weight stays where torch has put it, in full precision; C++ reads it there."""

    @property
    def fused_weight(self) -> Tensor | None:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        y = plain.linear(x, self.weight)
        return y if self.bias is None else y + self.bias


KERNELS = {
    "cpu": Kernel(PlainLinear.of, no_cpu, prepare=prepare, takes_shapes=True),
    "torch": Kernel(lambda layer, spec: layer),  # torch's own product is the layer itself
}
SCHEMES = {FullPrecision: Scheme(lambda weight, spec: weight, KERNELS)}
