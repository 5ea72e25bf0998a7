"""--save --format gguf: a model as one GGUF file, which llama.cpp loads.

Weights in full precision become BF16, F16 or F32, symmetric ones in groups of 32 Q4_0 or Q8_0. How
a scheme rounds activations is not written. A GGUF file as it is keeps its blocks, of any type.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from quantbench.models.config import ModelConfig
from quantbench.models.formats import gguf_writer
from quantbench.models.formats.base import Checkpoint, NotSaved, SavedScheme, read_json
from quantbench.models.formats.gguf import Gguf
from quantbench.models.formats.gguf_file import GgufTensor
from quantbench.models.formats.gguf_tokenizer import cut_of
from quantbench.models.formats.saver import Saver
from quantbench.models.tokenizer import FILES

FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # by --precision


class GgufSaver(Saver):
    """Writes NAME.gguf into the folder NAME; the checkpoint is one that is not refused."""

    @staticmethod
    def refuses(checkpoint: Checkpoint) -> str | None:
        if strange := gguf_writer.not_written(checkpoint.config()):
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
        self.last = f"{folder.absolute().name or 'model'}.gguf"
        self.checkpoint, self.tensors = checkpoint, gguf_writer.Tensors(config)
        self.writer = gguf.GGUFWriter(None, gguf_writer.llama_cpp(config), use_temp_file=True)
        # The file's own blocks: fused layers may have another form in memory.
        self.kept: Mapping[str, GgufTensor] | None = None
        if isinstance(checkpoint, Gguf) and checkpoint.saved:
            self.kept = checkpoint.blocks
        # The header, which comes first, is known last.
        self._write(folder, self._open)

    def _open(self, folder: Path) -> None:
        self.writer.temp_file = tempfile.TemporaryFile(dir=folder)

    def add(self, name: str, module: nn.Module) -> None:
        for key, weights in self.tensors.of(name, module):
            if self.kept is not None:
                if key in self.kept:  # a tied output is not
                    kept = self.kept[key]
                    self._add(key, kept.data, gguf.GGMLQuantizationType[kept.type])
                continue
            data, kind = zip(*(self._data(key, weight) for weight in weights), strict=True)
            stack = np.stack(data) if gguf_writer.STACKED in key else data[0]
            self._add(key, stack, kind[0])

    def _add(self, key: str, data: NDArray[Any], kind: gguf.GGMLQuantizationType) -> None:
        self._write(self.folder, lambda _: self.writer.add_tensor(key, data, raw_dtype=kind))

    def _data(self, key: str, weight: Tensor) -> tuple[NDArray[Any], gguf.GGMLQuantizationType]:
        packed = getattr(weight, "parts", None)
        if packed is None:
            kind = gguf_writer.float_type(key, weight, FLOATS[str(self.scheme.precision)])
            rows = gguf_writer.encoded(weight.cpu(), kind)
            return (rows[0] if weight.ndim == 1 else rows), kind
        try:
            data, kind = gguf_writer.blocks(packed)
        except ValueError as error:
            self.clear()
            raise NotSaved(f"--format gguf: {key}: {error}") from None
        return data.cpu().numpy(), kind

    def finish(self, architecture: ModelConfig, *_: object) -> None:
        gguf_writer.describe(self.writer, architecture)
        self._describe_tokenizer(architecture.vocab_size)
        mix = getattr(self.checkpoint, "metadata", {}).get("general.file_type")
        if self.kept is not None and mix is not None:
            self.writer.add_file_type(mix)
        factors = gguf_writer.rope_factors(architecture)
        if factors is not None:
            self._add("rope_freqs.weight", factors, gguf.GGMLQuantizationType.F32)
        self._write(self.unfinished, self._put_together)
        os.replace(self.unfinished, self.folder / self.last)

    def _put_together(self, file: Path) -> None:
        self.writer.write_header_to_file(file)
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _describe_tokenizer(self, size: int) -> None:
        """size: of the vocabulary; ids without a token are padding."""
        writer, folder = self.writer, self.checkpoint.tokenizer_folder
        kind = _tokenizer_kind(self.checkpoint)
        if isinstance(self.checkpoint, Gguf):
            for key, value in self.checkpoint.metadata.items():
                if key.startswith("tokenizer."):
                    type = gguf.GGUFValueType.get_type(value)
                    if type == gguf.GGUFValueType.INT32:
                        type = gguf.GGUFValueType.UINT32  # ids of tokens
                    writer.add_key_value(key, value, type)
            return
        writer.add_tokenizer_model(kind or "none")
        if kind is None:
            return
        pieces = {id: (f"[PAD{id}]", -1000.0, gguf.TokenType.UNUSED) for id in range(size)}
        if kind == "llama":
            vocabulary = gguf.vocab.SentencePieceVocab(folder)
            pieces |= dict(enumerate(vocabulary.all_tokens()))
            first = vocabulary.sentencepiece_tokenizer.encode("a", out_type=str)[0]
            writer.add_add_space_prefix(first.startswith("\u2581"))
        else:
            described = read_json(folder / "tokenizer.json")
            writer.add_tokenizer_pre(cut_of(described))
            vocabulary, added = described["model"]["vocab"], described.get("added_tokens", [])
            pieces |= {id: (token, 0.0, gguf.TokenType.NORMAL) for token, id in vocabulary.items()}
            kinds = gguf.TokenType.USER_DEFINED, gguf.TokenType.CONTROL
            pieces |= {one["id"]: (one["content"], 0.0, kinds[one["special"]]) for one in added}
        tokens, scores, types = zip(*(pieces[id] for id in range(size)), strict=True)
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        special_tokens = gguf.SpecialVocab(folder, load_merges=kind == "gpt2", n_vocab=size)
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
