"""A quantizer that gives each layer its own scheme and kernel: autoquant's choices, by the layer's
shape, or those of a saved model, by its name.

    quantizer = MixedQuantizer({(768, 256): (spec, "cpu")}, device, dtype)
    quantizer = MixedQuantizer(by_name(saved.layers), device, dtype)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quantbench.errors import CheckpointError, KernelError, UsageError
from quantbench.quantize.registry import Quantizer, available
from quantbench.quantize.spec import Spec, parse_scheme


class MixedQuantizer:
    """(name, module) -> module, as registry.Quantizer."""

    def __init__(
        self, chosen: Mapping[Any, tuple[Spec, str]], device: torch.device, dtype: torch.dtype
    ) -> None:
        """chosen: a scheme and a kernel by a layer's shape (N, K) or name. A kernel that cannot run
        here is replaced by the best that can; KernelError if none can."""
        self.ran: Counter[str] = Counter()  # how many layers each kernel got
        self.layers: dict[str, tuple[str, str]] = {}  # (scheme, kernel) of each layer built
        made = {}
        for spec, kernel in set(chosen.values()):
            runs = available(spec, device, dtype).get(kernel, "unknown") is None
            made[spec, kernel] = Quantizer(spec, device, dtype, kernel if runs else "auto")
        self._quantizers = {key: made[how] for key, how in chosen.items()}

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        return self.built(name, self.quantized(name, module))

    def takes(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        """The layer with its scheme's numbers; KernelError, naming the layer, without a choice."""
        return self._of(name, module).quantized(name, module) if self.takes(module) else module

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        """The layer in its kernel's form."""
        if not self.takes(layer):
            return layer
        quantizer = self._of(name, layer)
        built = quantizer.built(name, layer)
        kernel = quantizer.kernel_for(name, layer)  # the one built: those that failed are gone
        self.ran[kernel] += 1
        self.layers[name] = str(quantizer.spec), kernel
        return built

    def _of(self, name: str, layer: nn.Module) -> Quantizer:
        N, K = layer.out_features, layer.in_features
        quantizer = self._quantizers.get(name) or self._quantizers.get((N, K))
        if quantizer is None:
            raise KernelError(f"{name} is {N} by {K}, and no scheme was chosen for that")
        return quantizer


def by_name(layers: Mapping[str, Sequence[str]]) -> dict[Any, tuple[Spec, str]]:
    """What a saved model notes of its layers. CheckpointError for an unknown scheme."""
    chosen = {}
    for name, (scheme, kernel) in layers.items():
        try:
            chosen[name] = parse_scheme(scheme), kernel
        except UsageError as error:
            raise CheckpointError(f"{name} was saved as {scheme!r}: {error}") from None
    return chosen
