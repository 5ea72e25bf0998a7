"""A model as a GGUF file, which llama.cpp reads (github.com/ggml-org/ggml, docs/gguf.md).

    write(Path("model.gguf"), "dummy:TinyLlama-1.1B-Chat-v1.0", "Q8_0")

Llama models and Mixtrals are written as architecture "llama", Qwen3-MoE as "qwen3moe", with the
weights that generate.py loads from the same checkpoint. All matrices have one format, embedding and
output included, as all linear layers have in a scheme of ours; norms and routers stay in float32.
The vocabulary is one of placeholders, for servers that turn ids into text; prompts are ids.
"""

import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import nn

from quantbench import files
from quantbench.errors import LogError, UsageError
from quantbench.models import build
from quantbench.models.config import ModelConfig
from quantbench.models.formats.gguf_blocks import encoded
from quantbench.models.formats.gguf_file import STACKED, GgufFile
from quantbench.models.formats.gguf_writer import (
    Tensors,
    describe,
    float_type,
    llama_cpp,
    not_written,
    rope_factors,
)
from quantbench.models.loading import load_config, load_model

MIXES = ("Q4_K_M",)  # formats that llama.cpp itself makes


def check(architecture: ModelConfig, format: str) -> None:
    """UsageError unless the model can be written in the format."""
    if strange := not_written(architecture):
        raise UsageError(
            f"{architecture.name} has {strange}; only plain Llama models, Mixtrals and Qwen3-MoEs "
            "are compared"
        )
    kind = "Q4_K" if format in MIXES else format
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    widths = {columns for _, columns in architecture.linear_shapes().values()}
    if wrong := sorted(width for width in widths if width % block):
        raise UsageError(
            f"{format} takes rows of a multiple of {block}; {architecture.name} has {wrong[0]}"
        )


def write(path: Path, checkpoint_path: str, format: str, num_layers: int | None = None) -> None:
    """Write the checkpoint there, tensor by tensor.

    Raises UsageError for a model or format that cannot be written, LogError where the file cannot
    be.
    """
    architecture = load_config(checkpoint_path, num_layers)
    check(architecture, format)
    if format in MIXES:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            floats = Path(folder) / "bf16.gguf"
            write(floats, checkpoint_path, "BF16", num_layers)
            _mix(floats, path, format)
        return
    writer, factors = gguf.GGUFWriter(None, llama_cpp(architecture)), rope_factors(architecture)
    describe(writer, architecture)
    _add_vocabulary(writer, architecture.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{format}"])  # what most of its numbers are
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, np.dtype("f4"), factors.nbytes)
    with torch.device("meta"):
        model = build(architecture)
    tensors = Tensors(architecture)
    for module_name, module in model.named_modules():
        for name, parts in tensors.of(module_name, module) if module._parameters else ():
            kind = float_type(name, parts[0], format)
            values, size = gguf.GGML_QUANT_SIZES[kind]
            stack = [len(parts)] if STACKED in name else []
            nbytes = len(parts) * parts[0].numel() // values * size
            shape = (*stack, *parts[0].shape)
            writer.add_tensor_info(name, shape, np.dtype("f4"), nbytes, kind)

    def put(module_name: str, module: nn.Module) -> nn.Module:
        for name, parts in tensors.of(module_name, module):
            rows = [encoded(part, float_type(name, part, format)) for part in parts]
            writer.write_tensor_data(np.concatenate(rows))
        return nn.Identity()  # its memory is free for the next one

    with files.named("cannot write", path, LogError):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        load_model(checkpoint_path, "cpu", torch.bfloat16, num_layers, put)
        writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, count: int) -> None:
    """The end, bytes as BPE names them, one merge, since readers want some, and placeholders.

    Of ASCII alone: llama-server answers a request with an error whose text is no UTF-8."""
    names = ["<|end|>", *map(chr, range(33, 127)), *map(chr, range(256, 290)), "!!"]
    names += [f"<{number}>" for number in range(len(names), count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names[:count])
    writer.add_token_types([gguf.TokenType.CONTROL, *(count - 1) * [gguf.TokenType.NORMAL]])
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _mix(floats: Path, path: Path, format: str) -> None:
    """A file of another file's weights in llama.cpp's mix of types."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{format}")
    if llama_cpp.llama_model_quantize(str(floats).encode(), str(path).encode(), params):
        raise LogError(f"llama.cpp cannot write {path} as {format}")


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
