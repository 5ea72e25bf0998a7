"""A recipe in llama.cpp's words: llama-quantize's --tensor-type-file, a line regex=type a tensor.

    text = tensor_types(recipe, names.hugging_face)

A scheme becomes the type that `quantbench schemes` compares it with: similar numbers, not the same.
"""

import re
from collections.abc import Callable, Sequence

import gguf

from quantbench.errors import UsageError
from quantbench.quantize.recipe import EMBEDDING, Recipe
from quantbench.quantize.spec import FullPrecision, Int8Embedding, Int8WeightOnly


def tensor_types(recipe: Recipe, names: Callable[[str], Sequence[str]]) -> str:
    """recipe: with its layers. names: of a parameter, its names in Hugging Face's checkpoints; a
    layer may be several of llama.cpp's tensors. Raises UsageError, with the layer's name, for a
    scheme or a layer that llama.cpp has no name for."""
    schemes = {EMBEDDING: FullPrecision()} | dict(recipe.layers)
    blocks = 1 + max(int(layer.split(".")[1]) for layer in schemes if layer.startswith("layers."))
    tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, blocks).mapping
    lines = []
    for layer, scheme in schemes.items():
        if layer != EMBEDDING and scheme == Int8Embedding():  # the same numbers
            scheme = Int8WeightOnly()
        if scheme.gguf == "-":
            raise UsageError(f"llama.cpp has no type for {scheme}, which {layer} has")
        for name in names(f"{layer}.weight"):
            module = name.removesuffix(".weight")
            if module not in tensors:
                raise UsageError(f"llama.cpp has no name for {module}")
            lines.append(rf"^{re.escape(tensors[module][1])}\.weight$={scheme.gguf.lower()}")
    return "\n".join(lines) + "\n"
