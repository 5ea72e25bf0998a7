"""Checkpoint formats, a class per format behind one interface (base.py).

    checkpoint = open_checkpoint("path/to/folder")      # or tiny, dummy:NAME, org/name
    checkpoint.config()                                 # its ModelConfig
    checkpoint.tensors()                                # its weights, read one at a time
    checkpoint.tokenizer(vocab_size)                    # its Tokenizer

A new format is a file in this folder with a subclass of Checkpoint, and an entry in FORMATS.
Classes are named, not imported, so that a run loads only those that it uses.
"""

import os
import pkgutil
import re
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.models.formats.base import Checkpoint
from quantbench.text import shown

if TYPE_CHECKING:
    from quantbench.models.formats.saver import Saver

__all__ = ["EMBEDDED", "EMBEDDED_MODELS", "FORMATS", "Checkpoint", "open_checkpoint", "saver_of"]

# In this order: the first class that recognizes a path reads it. A class is imported only if a
# folder has a file of such a name.
FORMATS = {
    "saved:SavedModel": ("quantbench.json*", "quantized-*.safetensors*"),
    "hugging_face:HuggingFace": ("*.safetensors", "pytorch_model*.bin", "*.index.json"),
    "meta:GptFast": ("*.pth",),
    "meta:MetaCheckpoint": ("*.pth",),
    "gguf:Gguf": ("*.gguf",),
}
_SAVERS = {  # by --format
    "quantbench": "saver:Saver",
    "compressed-tensors": "given_back:CompressedTensorsSaver",
    "torchao": "given_back:TorchaoSaver",
    "gguf": "gguf_writer:GgufSaver",
}
EMBEDDED = Path(__file__).parent.parent / "tiny"
# Models in the source tree, by the names that --checkpoint_path takes.
EMBEDDED_MODELS = {"tiny": EMBEDDED, "tiny_moe": EMBEDDED.parent / "tiny_moe"}
# org/name, at a revision, of GGUF files a quantization; see hub.py.
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?(?::([\w.-]+))?")
_LONGEST_HUB_ID = 200  # characters; the hub allows 96 for each half


def open_checkpoint(checkpoint_path: str) -> Checkpoint:
    """The checkpoint that --checkpoint_path names. No weights are read or downloaded.

    Raises CheckpointError or UsageError, one line, if there is nothing of that name.
    """
    if checkpoint_path.startswith("dummy:"):
        return _format("dummy:Dummy")(Path(checkpoint_path))
    path = EMBEDDED_MODELS.get(checkpoint_path) or Path(checkpoint_path)
    if why := files.missing(path):
        if os.path.islink(path) or len(checkpoint_path) > _LONGEST_HUB_ID:
            raise CheckpointError(f"--checkpoint_path {shown(checkpoint_path, 300)}: {why}")
        hub_id = HUB_ID.fullmatch(checkpoint_path)
        if not hub_id:
            raise CheckpointError(
                f"{checkpoint_path} does not exist; --checkpoint_path takes a folder, a GGUF file, "
                "a model.pth, a hub id such as org/name or org/name-GGUF:Q4_K_M, dummy:NAME, tiny, "
                "or tiny_moe"
            )
        return pkgutil.resolve_name(f"{__name__}.hub:opened")(*hub_id.groups())
    if not path.is_dir():
        with files.named("--checkpoint_path", path, CheckpointError):
            files.require_regular(path)  # no pipe, no device
    # Links are not followed: a linked file's config is in the folder of the link.
    path = Path(os.path.abspath(path))
    folder = path if path.is_dir() else path.parent
    for place in dict.fromkeys((path, folder)):  # a file that no format knows means its folder
        for kind in map(_format, _candidates(place)):
            if kind.sniff(place):
                checkpoint = kind(place)
                # tiny_moe has 8 bits for the sake of the source tree's size.
                floats = (
                    checkpoint.in_full_precision() if checkpoint_path in EMBEDDED_MODELS else None
                )
                return floats or checkpoint
    hint = "" if path == folder else f"{checkpoint_path} is no checkpoint, and "
    raise CheckpointError(
        f"{hint}{folder} holds no weights; looked for *.safetensors, pytorch_model*.bin, "
        "model.pth, consolidated.*.pth and *.gguf"
    )


def saver_of(format: str) -> "type[Saver]":
    """What writes the folder of --save in a format of --format."""
    return pkgutil.resolve_name(f"{__name__}.{_SAVERS[format]}")


def _candidates(place: Path) -> list[str]:
    if not place.is_dir():
        return [*FORMATS]
    return [name for name, patterns in FORMATS.items() if any(map(any, map(place.glob, patterns)))]


def _format(name: str) -> type[Checkpoint]:
    return pkgutil.resolve_name(f"{__name__}.{name}")
