"""Tensors of Hugging Face folders under names that say what they are, one for each parameter."""

import re
from collections.abc import Mapping

from quantbench.models.formats.names import Layers
from quantbench.models.formats.tensor_files import StoredTensor

_OF_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\.")


def with_kinds(tensors: Mapping[str, StoredTensor], weights: Layers) -> dict[str, StoredTensor]:
    """The tensors; ".weight" is added to names that an architecture's table has whole."""
    whole = {part for parts in weights.values() for part in parts}
    return {
        f"{name}.weight" if _OF_LAYER.sub("", name) in whole else name: tensor
        for name, tensor in tensors.items()
    }
