"""none: weights stay as and where they are; only the kernel that multiplies by them differs."""

from typing import Any

from torch import nn

from quantbench.quantize import cpu
from quantbench.quantize.kernel import Kernel
from quantbench.quantize.scheme import Scheme
from quantbench.quantize.spec import FullPrecision


def as_it_is(layer: nn.Linear, spec: Any) -> nn.Module:
    """torch's own product is the layer itself."""
    return layer


KERNELS = {"cpu": cpu.PLAIN, "torch": Kernel(as_it_is)}
SCHEMES = {FullPrecision: Scheme(lambda weight, spec: weight, KERNELS)}
