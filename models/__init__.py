"""Llama-family models, and where their weights come from.

    model = models.load("tiny", quantization="int8wo")      # a checkpoint, quantized, ready to run
    model = models.build(config)                            # the modules alone, random weights

A new architecture is a file with its model's class and a row in models/registry.py.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from quantbench.models.registry import build

if TYPE_CHECKING:
    import torch

    from quantbench.models.llama import Transformer

__all__ = ["SAVED", "build", "load"]

SAVED = "quantbench.json"  # the file that marks a folder written by --save


def load(
    checkpoint_path: str,
    device: str | torch.device = "cpu",
    precision: torch.dtype | None = None,
    quantization: str | None = None,
) -> Transformer:
    """The model that --checkpoint_path, --device, --precision and --quantization name on the
    command line, quantized layer by layer as it is read, on the kernels that the command would use.

    checkpoint_path: "tiny", dummy:NAME, a folder, a file or a hub id; a folder that --save wrote
    keeps the scheme that it was saved in.
    quantization: a scheme, or "none" for full precision. None: as the checkpoint is, which for a
    GGUF file or a quantized folder means its own codes and scales.
    precision: dtype of what is not quantized; torch.float32 if not given.

    Raises UsageError for a scheme or device that does not exist, CheckpointError for a checkpoint
    that cannot be read, KernelError for a scheme that has no kernel here.
    """
    # models/ may not import run/, which imports models/ (pyproject.toml): hence the import by name,
    # at the time of the call.
    load_quantized = pkgutil.resolve_name("quantbench.run.loading:load_quantized")
    return load_quantized(checkpoint_path, device, precision, quantization)
