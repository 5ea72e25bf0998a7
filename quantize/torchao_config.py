"""Our schemes as torchao configs: what `torchao.quantize_` calls for each layer.

quantize_ hands a handler one module, without its name, and drops what the handler returns for the
root. So layers are changed in place, as torch.nn.utils.parametrize changes them: the module stays
the same object, with its hooks, wherever else it is used, and gets another class.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from quantbench.errors import KernelError, UsageError
from quantbench.quantize.kernel import KernelLinear
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import Int8Embedding, Spec, parse_scheme


@dataclass
class QuantizeConfig(AOBaseConfig):
    """One scheme and kernel for the layers of a model; see quantize.config."""

    scheme: str
    kernel: str = "auto"

    def __post_init__(self) -> None:
        self.spec: Spec = parse_scheme(self.scheme)
        if self.spec.calibrated:
            raise UsageError(
                f"--quantization {self.scheme} is calibrated on a text as a checkpoint is loaded, "
                "by models.load or generate; quantize_ sees one layer at a time"
            )
        self._quantizers: dict[tuple[torch.device, torch.dtype], Quantizer] = {}
        # Modules that this config has quantized: one that a model uses twice comes twice.
        self._done: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def apply(self, name: str, module: nn.Module) -> None:
        """Quantize one layer in place. Raises what quantize.config says."""
        if module in self._done:
            return
        if reason := self._refuses(module):
            raise KernelError(
                f"--quantization {self.scheme}: {name} {reason}; a filter_fn can leave it out"
            )
        place = module.weight.device, module.weight.dtype
        if place not in self._quantizers:
            self._quantizers[place] = Quantizer(self.spec, *place, self.kernel)
        with torch.no_grad():
            _become(module, self._quantizers[place](name, module))
        self._done.add(module)

    def _refuses(self, module: nn.Module) -> str | None:
        """Why a module cannot be quantized whatever its shape, or None."""
        class_name = type(module).__name__
        packed = isinstance(getattr(module, "weight", None), PackedWeight)
        if packed or isinstance(module, KernelLinear):
            return f"is quantized already ({class_name})"
        if isinstance(module, nn.Embedding) and isinstance(self.spec, Int8Embedding):
            plain = nn.Embedding.forward
        elif isinstance(module, nn.Linear):
            plain = nn.Linear.forward
        else:
            return f"is no nn.Linear but {class_name}"
        if type(module).forward is not plain:
            return f"is a {class_name}, whose forward is its own"
        if type(module.weight.data) is not torch.Tensor:
            return f"has a weight that is a {type(module.weight.data).__name__}"
        if not module.weight.dtype.is_floating_point:
            return f"has weights of {str(module.weight.dtype)[6:]}"
        return None


@register_quantize_module_handler(QuantizeConfig)
def _apply(module: nn.Module, config: QuantizeConfig) -> nn.Module:
    config.apply(_described(module), module)
    return module


def _described(module: nn.Module) -> str:
    """A layer in an error's words; torchao does not pass its name on."""
    weight = getattr(module, "weight", None)
    shape = " x ".join(map(str, weight.shape)) if isinstance(weight, torch.Tensor) else "no"
    return f"a {type(module).__name__} with {shape} weights"


def _become(module: nn.Module, built: nn.Module) -> None:
    """Turn `module` into `built`, in place; hooks, buffers of others and `training` stay."""
    if built is module:
        return
    common = vars(nn.Module())
    attributes = {name: value for name, value in vars(built).items() if name not in common}
    module.__class__ = type(built)
    vars(module).update(attributes)
    vars(module)["_parameters"] = vars(built)["_parameters"]
