"""Which class computes which architecture. A new one is a file in this folder and a line here.

model = build(config)           # weights as torch initializes them, on torch's default device
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from errors import CheckpointError

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.llama import Transformer
    from models.split import Split

# ModelConfig.architecture → the class of its models. Classes are named, not imported, so that only
# the one in use is loaded and this file needs no torch.
ARCHITECTURES = {"llama": "models.llama:Transformer", "mixtral": "models.mixtral:Mixtral"}


def build(config: ModelConfig, split: Split | None = None) -> Transformer:
    """The model of this config, its weights as torch initializes them, on torch's default device.

    split: one rank's share of it, if several ranks compute it.
    Raises CheckpointError for an architecture without a class.
    """
    if config.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{config.name}: architecture {config.architecture!r} is not supported; there are "
            f"{', '.join(ARCHITECTURES)}"
        )
    model: Transformer = pkgutil.resolve_name(ARCHITECTURES[config.architecture])(config, split)
    return model
