"""Sizes of a mixture's experts, and how many of them --expert_memory has room for."""

import torch
from torch import nn

from quantbench.devices import stored_bytes
from quantbench.errors import KernelError
from quantbench.experts.layout import whole_pages
from quantbench.log.config import RunConfig
from quantbench.log.kinds import room_bytes
from quantbench.models import build
from quantbench.models.config import ModelConfig
from quantbench.models.mixtral import MixtureOfExperts
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import Spec


def expert_bytes(
    architecture: ModelConfig,
    spec: Spec,
    device: torch.device,
    precision: torch.dtype,
    kernel: str = "auto",
) -> int:
    """Bytes of one expert of a mixture, as its kernels hold it.

    Raises KernelError if the scheme does not support the expert's shapes.
    """
    with torch.device("meta"):
        model = build(architecture.one_of_each_kind()).to(precision)
    try:
        quantizer = Quantizer(spec, device, precision, kernel)
    except KernelError:
        quantizer = Quantizer.of_shapes(spec, device, precision)
    mixtures = (name for name, m in model.named_modules() if isinstance(m, MixtureOfExperts))
    name = f"{next(mixtures)}.experts.0"
    count = 0
    for part, module in model.get_submodule(name).named_children():
        layer = quantizer.quantized(f"{name}.{part}", module)
        if isinstance(layer, nn.Linear) and quantizer.kernels:
            layer = quantizer.stored(f"{name}.{part}", layer)
        count += sum(map(stored_bytes, layer.parameters()))
    return count


def expert_slots(config: RunConfig, nbytes: int, free: float) -> int:
    """For how many experts of so many bytes --expert_memory has room.

    free: bytes for them, where it is "auto".
    """
    asked = config.expert_memory
    assert asked is not None
    if asked.isdigit():
        return int(asked)
    room = room_bytes(asked)
    return int((free if room is None else room) // whole_pages(nbytes))


def slow_bytes(
    config: RunConfig,
    architecture: ModelConfig,
    spec: Spec,
    device: torch.device,
    precision: torch.dtype,
) -> int:
    """Bytes of the experts that --expert_memory leaves in slow memory alone, at most."""
    mixture = architecture.mixture
    if config.expert_memory is None or mixture is None:
        return 0
    nbytes = expert_bytes(architecture, spec, device, precision, config.kernel)
    layers = sum(not mixture.is_dense(layer) for layer in range(architecture.num_layers))
    least = mixture.experts_per_token * nbytes  # what "auto" takes where there is nothing more
    return max(0, layers * mixture.num_experts - expert_slots(config, nbytes, least)) * nbytes
