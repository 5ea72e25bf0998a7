"""--save --format gguf: a model as one GGUF file, which llama.cpp loads
(github.com/ggml-org/ggml, docs/gguf.md); and what such a file says of any model.

Weights in full precision become BF16, F16 or F32, symmetric ones in groups of 32 Q4_0 or Q8_0. How
a scheme rounds activations is not written. A GGUF file as it is keeps its blocks, of any type.
Llama models and Mixtrals are written as architecture "llama", Qwen3-MoE as "qwen3moe".
"""

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantbench.models.config import ModelConfig
from quantbench.models.formats.base import Checkpoint, NotSaved, SavedScheme, read_json
from quantbench.models.formats.gguf import Gguf
from quantbench.models.formats.gguf_blocks import blocks, encoded
from quantbench.models.formats.gguf_file import STACKED, GgufTensor, name_in_file
from quantbench.models.formats.gguf_tokenizer import cut_of
from quantbench.models.formats.names import hugging_face
from quantbench.models.formats.saver import Saver
from quantbench.models.rotary_scaling import scaled
from quantbench.models.shapes import beyond_llama
from quantbench.models.tokenizer import FILES

FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # by --precision
UNSUPPORTED = ("sliding_window", "qkv_bias", "attention_out_bias", "mlp_bias", "joint_qk_norm")


class GgufSaver(Saver):
    """Writes NAME.gguf into the folder NAME; the checkpoint is one that is not refused."""

    @staticmethod
    def refuses(checkpoint: Checkpoint) -> str | None:
        if strange := not_written(checkpoint.config()):
            return (
                f"{checkpoint.name} has {strange}; only plain Llama models, Mixtrals and "
                "Qwen3-MoEs are written"
            )
        folder, known = checkpoint.tokenizer_folder, isinstance(checkpoint, Gguf)
        has_tokenizer = folder and any((folder / name).is_file() for name in FILES)
        if has_tokenizer and not known and not _tokenizer_kind(checkpoint):
            return (
                f"the tokenizer of {checkpoint.name} is neither a sentencepiece model nor a "
                "byte-level BPE that llama.cpp has a name for"
            )
        return None

    def __init__(self, folder: Path, scheme: SavedScheme, checkpoint: Checkpoint) -> None:
        config = checkpoint.config()
        super().__init__(folder, scheme, None)
        self.floats = FLOATS[str(scheme.precision)]  # the format of what is not quantized
        self.last = f"{folder.absolute().name or 'model'}.gguf"
        self.checkpoint, self.tensors = checkpoint, GgufTensors(config)
        self.writer = gguf.GGUFWriter(None, llama_cpp(config), use_temp_file=True)
        # The file's own blocks: fused layers may have another form in memory.
        self.blocks: Mapping[str, GgufTensor] | None = None
        if isinstance(checkpoint, Gguf) and checkpoint.saved:
            self.blocks = checkpoint.blocks
        # The header, which comes first, is known last.
        self._write(folder, self._open)

    def _open(self, folder: Path) -> None:
        self.writer.temp_file = tempfile.TemporaryFile(dir=folder)

    def add(self, name: str, module: nn.Module) -> None:
        for key, weights in self.tensors.of(name, module):
            if self.blocks is not None:
                if key in self.blocks:  # a tied output is not
                    blocks = self.blocks[key]
                    self._add(key, blocks.data, gguf.GGMLQuantizationType[blocks.type])
                continue
            data, kind = zip(*(self._data(key, weight) for weight in weights), strict=True)
            stack = np.stack(data) if STACKED in key else data[0]
            self._add(key, stack, kind[0])

    def _add(self, key: str, data: NDArray[Any], kind: gguf.GGMLQuantizationType) -> None:
        self._write(self.folder, lambda _: self.writer.add_tensor(key, data, raw_dtype=kind))

    def _data(self, key: str, weight: Tensor) -> tuple[NDArray[Any], gguf.GGMLQuantizationType]:
        packed = getattr(weight, "parts", None)
        if packed is None:
            kind = float_type(key, weight, self.floats)
            rows = encoded(weight.cpu(), kind)
            return (rows[0] if weight.ndim == 1 else rows), kind
        try:
            data, kind = blocks(packed)
        except ValueError as error:
            self.clear()
            raise NotSaved(f"--format gguf: {key}: {error}") from None
        return data.cpu().numpy(), kind

    def finish(self, architecture: ModelConfig, *_: object) -> None:
        describe(self.writer, architecture)
        self._describe_tokenizer(architecture.vocab_size)
        mix = getattr(self.checkpoint, "metadata", {}).get("general.file_type")
        if self.blocks is not None and mix is not None:
            self.writer.add_file_type(mix)
        factors = rope_factors(architecture)
        if factors is not None:
            self._add("rope_freqs.weight", factors, gguf.GGMLQuantizationType.F32)
        self._finish(self._put_together)

    def _put_together(self, file: Path) -> None:
        self.writer.write_header_to_file(file)
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _describe_tokenizer(self, size: int) -> None:
        """size: of the vocabulary; ids without a token are padding."""
        writer, folder = self.writer, self.checkpoint.tokenizer_folder
        if isinstance(self.checkpoint, Gguf):
            for key, value in self.checkpoint.metadata.items():
                if key.startswith("tokenizer."):
                    type = gguf.GGUFValueType.get_type(value)
                    if type == gguf.GGUFValueType.INT32:
                        type = gguf.GGUFValueType.UINT32  # ids of tokens
                    writer.add_key_value(key, value, type)
            return
        kind = _tokenizer_kind(self.checkpoint)
        writer.add_tokenizer_model(kind or "none")
        if kind is None:
            return
        tokenizer = self.checkpoint.tokenizer(size)
        pieces = {id: (f"[PAD{id}]", -1000.0, gguf.TokenType.UNUSED) for id in range(size)}
        if kind == "llama":
            vocabulary = gguf.vocab.SentencePieceVocab(folder)
            pieces |= dict(enumerate(vocabulary.all_tokens()))
            first = tokenizer.encode("a", bos=False)[0]
            piece = vocabulary.sentencepiece_tokenizer.id_to_piece(first)
            writer.add_add_space_prefix(piece.startswith("\u2581"))
        else:
            described = read_json(folder / "tokenizer.json")
            writer.add_tokenizer_pre(cut_of(described))
            vocabulary, added = described["model"]["vocab"], described.get("added_tokens", [])
            pieces |= {id: (token, 0.0, gguf.TokenType.NORMAL) for token, id in vocabulary.items()}
            kinds = gguf.TokenType.USER_DEFINED, gguf.TokenType.CONTROL
            pieces |= {
                token["id"]: (token["content"], 0.0, kinds[token["special"]]) for token in added
            }
        tokens, scores, types = zip(*(pieces[id] for id in range(size)), strict=True)
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        special_tokens = gguf.SpecialVocab(folder, load_merges=kind == "gpt2", n_vocab=size)
        special_tokens.add_special_token["bos"] = tokenizer.bos_id is not None
        special_tokens.add_to_gguf(writer, quiet=True)


def _tokenizer_kind(checkpoint: Checkpoint) -> str | None:
    """GGUF's word for a tokenizer of which a file can be written; None: there is none."""
    folder = checkpoint.tokenizer_folder
    if folder and (folder / "tokenizer.json").is_file():
        if cut_of(read_json(folder / "tokenizer.json")):
            return "gpt2"
    model = folder / "tokenizer.model" if folder else None
    is_sentencepiece = model and model.is_file() and model.read_bytes()[:1] == b"\n"
    return "llama" if is_sentencepiece else None


# -------------------------------------------------------------------------------------- description


def not_written(architecture: ModelConfig) -> str | None:
    """A property of the model that the files' architectures lack, or None."""
    experts = architecture.mixture
    if architecture.architecture not in ("llama", "mixtral"):
        return f"architecture {architecture.architecture}"
    if part := beyond_llama(architecture):
        return part
    without_experts = () if experts else ("qk_norm",)
    in_qwen = ("rope_scaling",) if architecture.qk_norm else ()
    for name in UNSUPPORTED + without_experts + in_qwen:
        if getattr(architecture, name):
            return name
    if experts and (experts.shared_dim or experts.dense_layers or not experts.normalized):
        return "other experts than Mixtral"
    return None


def llama_cpp(architecture: ModelConfig) -> str:
    """llama.cpp's name of the architecture."""
    return "qwen3moe" if architecture.qk_norm else "llama"


def describe(writer: gguf.GGUFWriter, architecture: ModelConfig) -> None:
    """Everything but the tokenizer."""
    writer.add_name(architecture.name)
    writer.add_context_length(architecture.max_position)
    writer.add_embedding_length(architecture.dim)
    writer.add_block_count(architecture.num_layers)
    experts = architecture.mixture
    writer.add_feed_forward_length(experts.expert_dim if experts else architecture.ffn_dim)
    if experts:
        writer.add_expert_count(experts.num_experts)
        writer.add_expert_used_count(experts.experts_per_token)
        if architecture.qk_norm:  # Mixtral's files do without
            writer.add_expert_feed_forward_length(experts.expert_dim)
    writer.add_head_count(architecture.num_heads)
    writer.add_head_count_kv(architecture.num_kv_heads)
    writer.add_key_length(architecture.head_dim)
    writer.add_value_length(architecture.head_dim)
    writer.add_layer_norm_rms_eps(architecture.norm_eps)
    writer.add_rope_dimension_count(architecture.head_dim)
    writer.add_rope_freq_base(architecture.rope_theta)
    writer.add_vocab_size(architecture.vocab_size)


def rope_factors(architecture: ModelConfig) -> NDArray[np.float32] | None:
    """Divisors of each rotation's frequency, (E/2,) float32; None where no frequency is scaled."""
    if architecture.rope_scaling is None:
        return None
    exponents = torch.arange(0, architecture.head_dim, 2) / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents
    return (frequencies / scaled(frequencies, architecture.rope_scaling)).numpy()


# ---------------------------------------------------------------------------------------- tensors


def as_hugging_face(name: str, weight: Any, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """A module's weight under Hugging Face's names; fused projections are taken apart."""
    parts = hugging_face(f"{name}.weight")
    rows = weight.shape[0] // len(parts)
    kv_rows = config.num_kv_heads * config.head_dim
    sizes = [weight.shape[0] - 2 * kv_rows, kv_rows, kv_rows] if len(parts) == 3 else rows
    pieces: Any = weight.split(sizes)
    return zip(parts, pieces, strict=True)


class GgufTensors:
    """The file's tensors, from the model's modules in order. Weights may be quantized."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.names = gguf.get_tensor_name_map(
            gguf.MODEL_ARCH.QWEN3MOE if config.qk_norm else gguf.MODEL_ARCH.LLAMA, config.num_layers
        )
        self.experts: dict[str, list[Tensor]] = {}  # of a layer, by the tensor that they make

    def of(self, name: str, module: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
        """The tensors that this module completes: one matrix or norm, or a layer's experts."""
        if name == "output" and self.config.tie_embeddings and type(module.weight.data) is Tensor:
            return
        for part, tensor in as_hugging_face(name, module.weight, self.config):
            key, _, is_expert = name_in_file(self.names, part).partition("[")
            if is_expert:
                stack = self.experts.setdefault(key, [])
                stack.append(tensor)
                if len(stack) == self.config.mixture.num_experts:
                    yield key, self.experts.pop(key)
            elif llama_cpp(self.config) == "llama" and re.search(r"\.attn_[qk]\.", key):
                yield key, [tensor.index_select(0, _neighbours(tensor, self.config.head_dim))]
            else:
                yield key, [tensor]


def _neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """The order of rows in which rotary pairs (i, i + E/2) are (2i, 2i + 1): in the architecture
    "llama" llama.cpp rotates neighbours."""
    rows = torch.arange(weight.shape[0], device=weight.device)
    return rows.reshape(-1, 2, head_dim // 2).transpose(1, 2).flatten()


def float_type(name: str, tensor: Tensor, type: str) -> gguf.GGMLQuantizationType:
    """`type`, but for norms and routers."""
    return gguf.GGMLQuantizationType["F32" if tensor.dim() == 1 or "ffn_gate_inp" in name else type]
