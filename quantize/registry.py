"""From a spec to what carries it out: a scheme's kernels, and the torchao config of each."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_

from errors import KernelError
from quantize import int8
from quantize.spec import FullPrecision, Int8DynamicActivation, Int8WeightOnly, Spec


@dataclass(frozen=True)
class Kernel:
    """One way to carry a scheme out: torchao's config (None leaves the layer to torch), and a
    function that says why a layer cannot be run so, or None."""

    make_config: Callable[[], AOBaseConfig] | None
    refuses: Callable[[nn.Linear], str | None] = lambda layer: None


# Per scheme its kernels, fastest first: `--kernel auto` takes the first.
KERNELS: dict[type[Spec], dict[str, Kernel]] = {
    FullPrecision: {"torch": Kernel(None)},
    Int8WeightOnly: {"torchao": Kernel(int8.weight_only, int8.weight_only_refuses)},
    Int8DynamicActivation: {"torchao": Kernel(int8.DynamicActivationConfig)},
}

Transform = Callable[[str, nn.Module], nn.Module]


def kernel_for(spec: Spec, kernel: str = "auto") -> str:
    """The kernel that will run: the one named, or the fastest. KernelError if there is none."""
    available = list(KERNELS[type(spec)])
    if kernel == "auto":
        return available[0]
    if kernel not in available:
        raise KernelError(
            f"--kernel {kernel}: {spec} has no such kernel; it has {', '.join(available)} "
            "(or leave --kernel at auto)"
        )
    return kernel


def transform(spec: Spec, kernel: str = "auto") -> Transform:
    """A function (name, module) -> module that quantizes every nn.Linear it is handed.

    `models.load_model` calls it on each layer as its weights arrive, so the full-precision model
    is never whole in memory.
    """
    name_of_kernel = kernel_for(spec, kernel)
    chosen = KERNELS[type(spec)][name_of_kernel]
    make_config = chosen.make_config

    def quantized(name: str, module: nn.Module) -> nn.Module:
        if make_config is None or not isinstance(module, nn.Linear):
            return module
        if reason := chosen.refuses(module):
            raise KernelError(f"{spec} with kernel {name_of_kernel}: {name} {reason}")
        # quantize_ may put another module in a layer's place, which takes a parent to show.
        holder = nn.ModuleList([module])
        quantize_(holder, make_config(), filter_fn=lambda m, _: isinstance(m, nn.Linear))
        return holder[0]

    return quantized
