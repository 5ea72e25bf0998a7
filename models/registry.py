"""Which class computes a model: a new architecture is a file beside this one, and a line here.

model = build(config)           # weights as torch initializes them, on torch's default device
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from errors import CheckpointError

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.llama import Transformer

# ModelConfig.architecture -> the class of its models; by name, so that
# only the one in use is imported, and this file needs no torch.
ARCHITECTURES = {"llama": "models.llama:Transformer"}


def build(config: ModelConfig) -> Transformer:
    """The model of this config, its weights as torch initializes them, on torch's default device.

    Raises CheckpointError for an architecture that there is no class for.
    """
    if config.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{config.name}: architecture {config.architecture!r} is not supported; there are "
            f"{', '.join(ARCHITECTURES)}"
        )
    model: Transformer = pkgutil.resolve_name(ARCHITECTURES[config.architecture])(config)
    return model
