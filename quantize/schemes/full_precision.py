"""none: weights stay as and where they are; only the kernel that multiplies by them differs."""

from quantbench.quantize import cpu
from quantbench.quantize.kernel import Kernel
from quantbench.quantize.scheme import Scheme
from quantbench.quantize.spec import FullPrecision

# torch's own product is the layer itself.
KERNELS = {"cpu": cpu.PLAIN, "torch": Kernel(lambda layer, spec: layer)}
SCHEMES = {FullPrecision: Scheme(lambda weight, spec: weight, KERNELS)}
