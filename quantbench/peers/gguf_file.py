"""The GGUF file of a comparison, which llama.cpp reads: every matrix in one format.

    write(Path("model.gguf"), "dummy:TinyLlama-1.1B-Chat-v1.0", "Q8_0")

It has the weights that generate.py loads from the same checkpoint. All matrices have one format,
embedding and output included, as all linear layers have in a scheme of ours; norms and routers stay
in float32. The vocabulary is one of placeholders, for servers that turn ids into text; prompts are
ids.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import nn

from quantbench import files
from quantbench.errors import LogError, UsageError
from quantbench.models.config import ModelConfig
from quantbench.models.formats import open_checkpoint
from quantbench.models.formats.base import SavedScheme
from quantbench.models.formats.gguf_file import STACKED, GgufFile
from quantbench.models.formats.gguf_writer import GgufSaver, not_written
from quantbench.models.loading import load_config, load_model


class OneFormat(GgufSaver):
    """Writes every matrix in `form`, and placeholders for the vocabulary."""

    def __init__(self, folder: Path, form: str, checkpoint_path: str) -> None:
        super().__init__(folder, SavedScheme("none", "bfloat16"), open_checkpoint(checkpoint_path))
        self.floats = form

    def finish(self, architecture: ModelConfig, *more: Any) -> None:
        self.writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{self.floats}"])
        super().finish(architecture, *more)

    def _describe_tokenizer(self, size: int) -> None:
        """The end, bytes as BPE names them, one merge, since readers want some, and placeholders.

        Of ASCII alone: llama-server answers a request with an error whose text is no UTF-8."""
        writer = self.writer
        names = ["<|end|>", *map(chr, range(33, 127)), *map(chr, range(256, 290)), "!!"]
        names += [f"<{number}>" for number in range(len(names), size)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(names[:size])
        writer.add_token_types([gguf.TokenType.CONTROL, *(size - 1) * [gguf.TokenType.NORMAL]])
        writer.add_token_merges(["! !"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)


def check(architecture: ModelConfig, format: str) -> None:
    """UsageError unless the model can be written in the format."""
    if strange := not_written(architecture):
        raise UsageError(
            f"{architecture.name} has {strange}; only plain Llama models, Mixtrals and Qwen3-MoEs "
            "are compared"
        )
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    widths = {columns for _, columns in architecture.linear_shapes().values()}
    if wrong := sorted(width for width in widths if width % block):
        raise UsageError(
            f"{format} takes rows of a multiple of {block}; {architecture.name} has {wrong[0]}"
        )


def write(path: Path, checkpoint_path: str, format: str, num_layers: int | None = None) -> None:
    """Write the checkpoint there, whole or not at all.

    Raises UsageError for a model or format that cannot be written, QuantbenchError where the file
    cannot be.
    """
    architecture = load_config(checkpoint_path, num_layers)
    check(architecture, format)
    with (
        files.named("cannot write", path, LogError),
        tempfile.TemporaryDirectory(prefix="quantbench-", dir=path.parent) as scratch,
    ):
        saver = OneFormat(Path(scratch) / "model", format, checkpoint_path)

        def put(name: str, module: nn.Module) -> nn.Module:
            saver.add(name, module)
            return nn.Identity()  # its memory is free for the next one

        load_model(checkpoint_path, "cpu", torch.bfloat16, num_layers, put)
        saver.finish(architecture)
        os.replace(saver.folder / saver.last, path)


def vocabulary(path: Path) -> int:
    """The number of ids of a file's model."""
    return len(GgufFile(path).tensors["token_embd.weight"].data)


def weight_bytes(path: Path) -> int:
    """Bytes that a decoding step of one row reads of a file: all but the embedding's table, unless
    that is the output, too; of experts those that are chosen."""
    file = GgufFile(path)
    sizes = {name: tensor.data.nbytes for name, tensor in file.tensors.items()}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    experts = sum(size for name, size in sizes.items() if STACKED in name)
    kind = file.metadata["general.architecture"]
    count: int = file.metadata.get(f"{kind}.expert_count", 1)
    used: int = file.metadata.get(f"{kind}.expert_used_count", 1)
    return sum(sizes.values()) - experts + experts * used // count
