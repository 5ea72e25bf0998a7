"""A quantizer that gives each layer its own scheme and kernel: autoquant's choices, by the layer's
shape, or those of a saved model or of another program's file, by its name.

    quantizer = MixedQuantizer({(768, 256): (spec, "cpu")}, device, dtype)
    quantizer = MixedQuantizer(by_name(saved.layers), device, dtype)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quantbench.errors import CheckpointError, KernelError, UsageError
from quantbench.quantize.registry import Quantizer, available, check_vectors
from quantbench.quantize.spec import Spec, parse_layer


class MixedQuantizer:
    """(name, module) -> module, as registry.Quantizer."""

    def __init__(
        self,
        chosen: Mapping[Any, tuple[Spec, str | None]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """chosen: a scheme and a kernel by a layer's shape (N, K) or name. A kernel that cannot run
        here is replaced by the best that can; KernelError if none can. Kernel None: layers are
        quantized only."""
        self.ran: Counter[str] = Counter()  # how many layers each kernel got
        self.layers: dict[str, tuple[str, str]] = {}  # (scheme, kernel) of each layer built
        quantizers = {}
        for spec, kernel in set(chosen.values()):
            runs = kernel is None or available(spec, device, dtype).get(kernel, "unknown") is None
            quantizers[spec, kernel] = Quantizer(spec, device, dtype, kernel if runs else "auto")
            quantizers[spec, kernel].ran, quantizers[spec, kernel].layers = self.ran, self.layers
        self._quantizers = {key: quantizers[choice] for key, choice in chosen.items()}

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        return self.built(name, self.quantized(name, module))

    def takes(self, module: nn.Module, name: str = "") -> bool:
        held = isinstance(module, nn.Embedding) and name in self._quantizers
        return held or isinstance(module, nn.Linear)

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        """The layer with its scheme's numbers; KernelError, naming the layer, without a choice."""
        if not self.takes(module, name):
            check_vectors(name, module)
            return module
        return self._of(name, module).quantized(name, module)

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        """The layer in its kernel's form."""
        return self._of(name, layer).built(name, layer) if self.takes(layer, name) else layer

    def stored(self, name: str, layer: nn.Linear) -> nn.Module:
        """A layer on the meta device as its kernel stores it; nothing is loaded."""
        return self._of(name, layer).stored(name, layer)

    def of(self, name: str) -> Quantizer | None:
        """The quantizer of the layer of this name; None where the shape decides."""
        return self._quantizers.get(name)

    def _of(self, name: str, layer: nn.Module) -> Quantizer:
        N, K = layer.weight.shape
        quantizer = self.of(name) or self._quantizers.get((N, K))
        if quantizer is None:
            raise KernelError(f"{name} is {N} by {K}, and no scheme was chosen for that")
        return quantizer


def by_name(layers: Mapping[str, Sequence[str]]) -> dict[Any, tuple[Spec, str]]:
    """What a saved model notes of its layers. CheckpointError for an unknown scheme."""
    chosen = {}
    for name, (scheme, kernel) in layers.items():
        try:
            chosen[name] = parse_layer(scheme), kernel
        except UsageError as error:
            raise CheckpointError(f"{name} was saved as {scheme!r}: {error}") from None
    return chosen
