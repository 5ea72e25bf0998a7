"""--save --format gguf: a model as one GGUF file, which llama.cpp loads.

Weights in full precision become BF16, F16 or F32, symmetric ones in groups of 32 Q4_0 or Q8_0. How
a scheme rounds activations is not written.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from quantbench.models.config import ModelConfig
from quantbench.models.formats import gguf_writer
from quantbench.models.formats.base import Checkpoint, NotSaved, SavedScheme
from quantbench.models.formats.gguf import Gguf
from quantbench.models.formats.saver import Saver

FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # by --precision


class GgufSaver(Saver):
    """Writes model.gguf, from a checkpoint that `refuses` gives no reason against."""

    last = "model.gguf"

    @staticmethod
    def refuses(checkpoint: Checkpoint) -> str | None:
        strange = gguf_writer.not_written(checkpoint.config())
        return strange and (
            f"{checkpoint.name} has {strange}; only plain Llama models, Mixtrals and Qwen3-MoEs "
            "are written"
        )

    def __init__(self, folder: Path, scheme: SavedScheme, checkpoint: Checkpoint) -> None:
        config = checkpoint.config()
        super().__init__(folder, scheme, None)
        self.checkpoint, self.tensors = checkpoint, gguf_writer.Tensors(config)
        self.writer = gguf.GGUFWriter(None, gguf_writer.llama_cpp(config), use_temp_file=True)
        # The header, which comes first, is known last.
        self._write(folder, self._open)

    def _open(self, folder: Path) -> None:
        self.writer.temp_file = tempfile.TemporaryFile(dir=folder)

    def add(self, name: str, module: nn.Module) -> None:
        for key, weights in self.tensors.of(name, module):
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

    def _describe_tokenizer(self, vocab_size: int) -> None:
        """A sentencepiece model, or what the GGUF file that was read says. Of another tokenizer
        nothing is written: llama.cpp would have to know how it cuts text."""
        writer, folder = self.writer, self.checkpoint.tokenizer_folder
        if isinstance(self.checkpoint, Gguf):
            for key, value in self.checkpoint.metadata.items():
                if key.startswith("tokenizer."):
                    kind = gguf.GGUFValueType.get_type(value)
                    if kind == gguf.GGUFValueType.INT32:
                        kind = gguf.GGUFValueType.UINT32  # ids of tokens
                    writer.add_key_value(key, value, kind)
        elif folder and (folder / "tokenizer.model").is_file():
            vocabulary = gguf.vocab.SentencePieceVocab(folder)
            tokens, scores, types = map(list, zip(*vocabulary.all_tokens(), strict=True))
            padding = vocab_size - len(tokens)
            writer.add_tokenizer_model("llama")
            writer.add_token_list([*tokens, *(b"[PAD%d]" % i for i in range(padding))])
            writer.add_token_scores([*scores, *[-1000.0] * padding])
            writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * padding])
            first = vocabulary.sentencepiece_tokenizer.encode("a", out_type=str)[0]
            writer.add_add_space_prefix(first.startswith("\u2581"))
            gguf.SpecialVocab(folder, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)
        else:
            writer.add_tokenizer_model("none")
