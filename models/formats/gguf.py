"""GGUF: llama.cpp's files, of any mix of types, whole or in parts.

    checkpoint = Gguf(Path("model-Q4_K_M.gguf"))

Metadata is translated into the words of Hugging Face's config.json, and Hugging Face's names of
tensors into the file's, so that models/hugging_face.py checks the one and formats/stacked.py the
other.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.models.config import ModelConfig, RopeScaling
from quantbench.models.config_checks import LAYERS
from quantbench.models.formats import gguf_recurrent, gguf_tokenizer, names
from quantbench.models.formats.gguf_blocks import PACKED
from quantbench.models.formats.gguf_file import (
    MAGIC,
    STACKED,
    GgufFile,
    GgufTensor,
    name_in_file,
    shards,
)
from quantbench.models.formats.stacked import MaybeQuantized, StackedTensors
from quantbench.models.formats.tensor_files import StoredTensor
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.registry import ARCHITECTURES, Architecture
from quantbench.models.rotary_scaling import scaled
from quantbench.models.tokenizer import ByteTokenizer, Tokenizer, tokenizer_of
from quantbench.text import shown

PART = re.compile(r"-\d{5}-of-\d{5}$")  # what the name of a file in several parts ends with
# general.architecture → model_type; "llama" is Mistral's and, with experts, Mixtral's, too; "olmo2"
# with a window is OLMo 3's.
_KINDS = {
    **{kind: kind for kind in ("llama", "qwen2", "qwen3", "gemma2", "olmoe", "phi3", "smollm3")},
    **{kind: kind for kind in ("granite", "olmo2", "arcee", "glm4")},
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "mistral3": "ministral3",
    "gpt-oss": "gpt_oss",
    "granitehybrid": "granite",  # without Mamba layers
    "gemma4": "gemma4_text",
    **gguf_recurrent.KINDS,
}
_WITH_WINDOW = {"olmo2": "olmo3", "llama": "mistral"}
# Whose rows of queries and keys llama.cpp's converter reorders: it rotates neighbouring ones.
_REORDERED = {"llama", "mistral", "mixtral", "smollm3", "granite", "ministral3", "arcee"}
_CONFIG = {  # behind "ARCHITECTURE."
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
    "expert_shared_feed_forward_length": "intermediate_size",  # Granite 4's, without experts
}
_ROPE = {  # keys of rotary scaling, in the words of rope_parameters
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Of layers with a window, in llama.cpp's words and in Ollama's.
_LOCAL = dict.fromkeys(("rope.freq_base_swa", "rope.local.freq_base"), "rope_local_base_freq")
_HEADS = ("embedding_length", "attention.head_count", "attention.key_length")
# What else may stand behind "ARCHITECTURE." and says nothing more.
_HARMLESS = {
    "vocab_size", "rope.dimension_count", "attention.value_length", "attention.key_length_swa",
    "attention.value_length_swa", "rope.scaling.type", "rope.scaling.finetuned",
    "attention.layer_norm_epsilon", "pooling_type", "tensor_data_layout", "rope.scale_linear",
}  # fmt: skip
# What else a file may have there, with the value that absence means: 1 of factors and counts of
# groups, scores of experts by softmax, …
_NEUTRAL = {
    **dict.fromkeys(("expert_weights_scale", "expert_group_count", "expert_group_used_count"), 1),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), 1),
    **dict.fromkeys(("expert_gating_func", "interleave_moe_layer_step"), 1),
    **dict.fromkeys(("attention.causal", "rope.scaling.yarn_ext_factor"), True),
}
_TURNS = "rope_freqs.weight"  # what frequencies are divided by, in Llama 3's files
# What longrope divides them by.
_LONG = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
# Llama 3.1's and 3.2's: factor, and the rest of both.
_LLAMA_3_FACTORS = (8.0, 32.0)
_LLAMA_3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Gguf(MaybeQuantized):
    """A file, or the folder of the one model that it holds."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a damaged file, or a folder of several models."""
        super().__init__(path)
        first = _first_part(path) if path.is_file() else _only_model(path)
        opened = GgufFile(first)
        self.metadata = opened.metadata
        self.files = tuple(shards(first, opened.metadata))
        self.name = PART.sub("", first.stem)
        opened_files = [opened if file == first else GgufFile(file) for file in self.files]
        self.blocks: dict[str, GgufTensor] = {}  # by the file's names
        for part in opened_files:
            for name in part.tensors.keys() & self.blocks.keys():
                raise CheckpointError(
                    f"{part.path} and {first.name} both hold tensor {shown(name)}"
                )
            self.blocks |= part.tensors

    @classmethod
    def sniff(cls, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob("*.gguf"))
        with files.named("--checkpoint_path", path, CheckpointError), open(path, "rb") as file:
            return file.read(4) == MAGIC or path.suffix.lower() == ".gguf"

    @functools.cached_property
    def kind(self) -> str:
        """Hugging Face's model_type."""
        architecture = self.metadata.get("general.architecture")
        if architecture not in _KINDS:
            raise CheckpointError(
                f"{self.files[0]}: architecture {shown(architecture)} is not supported; "
                f"supported: {', '.join(_KINDS)}"
            )
        if architecture == "llama" and self.metadata.get("llama.expert_count"):
            return "mixtral"
        if self.metadata.get(f"{architecture}.attention.sliding_window"):
            return _WITH_WINDOW.get(architecture, _KINDS[architecture])
        return _KINDS[architecture]

    @property
    def _layers(self) -> int:
        """How many there are; 0 where the file does not say it or says what cannot be."""
        layers = self.metadata.get(f"{self.metadata['general.architecture']}.block_count")
        return layers if LAYERS.test(layers) else 0

    def config(self) -> ModelConfig:
        return from_hugging_face(dict(self._described()), self.name, self.files[0])

    def _described(self) -> Iterator[tuple[str, Any]]:
        """Keys and values of the config.json that this model has. Raises CheckpointError."""
        yield "model_type", self.kind
        row, prefix = ARCHITECTURES[self.kind], f"{self.metadata['general.architecture']}."
        words = _CONFIG | (_EXPERTS if row.experts else {})
        if row.experts and "moe_intermediate_size" not in row.accepts:
            words |= {"expert_feed_forward_length": "intermediate_size"}
        words |= _GRANITE if self.kind == "granite" else {}
        words |= gguf_recurrent.WORDS if row.recurrent else {}
        words |= gguf_recurrent.MIXTURE_WORDS if self.kind == "lfm2_moe" else {}
        is_gemma4 = self.kind == "gemma4_text"
        if is_gemma4:
            from quantbench.models.formats import gguf_gemma4

            words |= gguf_gemma4.WORDS
        words |= _LOCAL if "rope_local_base_freq" in row.fields else {}
        base = self.metadata.get(f"{prefix}rope.freq_base")
        rope = {"rope_type": self.metadata.get(f"{prefix}rope.scaling.type") or "none"}
        factor = self.metadata.get(f"{prefix}rope.scale_linear")  # of 2023
        if f"{prefix}rope.scaling.type" not in self.metadata and factor not in (None, 0, 1):
            rope = {"rope_type": "linear", "factor": factor}
        for key, value in self.metadata.items():
            if not key.startswith(prefix):
                continue
            word = key.removeprefix(prefix)
            windows = word == "attention.sliding_window_pattern" and row.window
            if (is_gemma4 and word in gguf_gemma4.OTHERS) or self._is_of_other_layers(word):
                continue
            if word in _ROPE:
                rope[_ROPE[word]] = _number(value)
            elif word in words:
                yield words[word], _number(_alike(value, self._layers))
            elif windows and isinstance(value, list | int):
                kinds, layers = ("full_attention", "sliding_attention"), value
                if isinstance(value, int):  # the period of layers without a window; 0: none is
                    layers = [not value or (i + 1) % value != 0 for i in range(self._layers)]
                yield "layer_types", [kinds[bool(narrow)] for narrow in layers]
            elif word in _LOCAL and (row.window is None or value == base):
                continue
            elif row.recurrent and word in gguf_recurrent.OTHERS:
                continue
            elif word not in _HARMLESS and value not in (0, 0.0, False, [], _NEUTRAL.get(word)):
                raise CheckpointError(
                    f"{self.files[0]}: metadata {shown(key)} is not understood, and it may change "
                    "the result"
                )
        if "token_embd.weight" not in self.blocks:
            raise CheckpointError(f"{self.files[0]} lacks tensor token_embd.weight")
        yield "vocab_size", self.blocks["token_embd.weight"].shape[0]
        yield "tie_word_embeddings", "output.weight" not in self.blocks
        if row.window and not self.metadata.get(f"{prefix}attention.sliding_window"):
            yield "sliding_window", None
        for key, tensor in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up")):
            if key in row.fields:
                yield key, f"blk.0.{tensor}.bias" in self.blocks
        yield from self._rotary(prefix, rope, row)
        if row.recurrent:
            yield from gguf_recurrent.described(self.metadata, prefix, self.blocks)
        if self.kind == "qwen3_moe":
            yield "norm_topk_prob", True
        if is_gemma4:
            yield from gguf_gemma4.described(self.files[0], self.metadata, self.blocks)
        elif self.kind.startswith("gemma"):  # as llama.cpp has it: the 27B models differ
            width, heads, head = (self.metadata.get(prefix + key) for key in _HEADS)
            large = (self.kind, self._layers) in (("gemma2", 46), ("gemma3_text", 62))
            if type(width) is int and type(heads) is int and heads:
                yield "query_pre_attn_scalar", width // heads if large else head

    def _is_of_other_layers(self, word: str) -> bool:
        """Whether a key describes layers that a Granite 4 without Mamba layers does not have."""
        has_states = any("ssm_" in name for name in self.blocks)
        return self.kind == "granite" and word.startswith("ssm.") and not has_states

    def _rotary(
        self, prefix: str, rope: dict[str, Any], row: Architecture
    ) -> Iterator[tuple[str, Any]]:
        """What rotates, and how it is scaled. rope: keys of rope_parameters."""
        rotates = self.metadata.get(f"{prefix}rope.scaling.finetuned", True)
        if self.kind == "granite" and not rotates:
            yield "no_rope_layers", list(range(self._layers))  # as llama.cpp understands it
        if row.partial_rotary is not None:
            rotated = self.metadata.get(f"{prefix}rope.dimension_count")
            width, heads, head = (self.metadata.get(prefix + key) for key in _HEADS)
            head = head or (width // heads if width and heads else None)
            if rotated and head:
                yield "partial_rotary_factor", rotated / head
        if _TURNS in self.blocks:
            rope = self._divided(self.blocks[_TURNS].read(), prefix, rope)
        elif _LONG.keys() <= self.blocks.keys():
            rope |= {word: self.blocks[name].read().tolist() for name, word in _LONG.items()}
            rope["rope_type"] = "longrope"
            original = "original_max_position_embeddings"
            yield original, rope.get(original)
        elif rope["rope_type"] == "none":
            if rope.get("factor") and f"{prefix}rope.scaling.type" not in self.metadata:
                rope["rope_type"] = "linear"  # as llama.cpp takes it
            elif extra := sorted(rope.keys() - {"rope_type", "original_max_position_embeddings"}):
                raise CheckpointError(
                    f"{self.files[0]}: {extra[0]} of rotary scaling is given, and no type of it"
                )
            else:
                rope = {"rope_type": "default"}
        if self.kind == "gpt_oss":
            rope["truncate"] = False
        if "mscale_all_dim" in rope:
            rope["mscale"] = 1.0
        yield "rope_parameters", rope

    def _divided(self, divisors: Tensor, prefix: str, rope: Mapping[str, Any]) -> dict[str, Any]:
        """The rotary scaling that divides each pair's frequency by its divisor: Llama 3's by its
        published numbers, which other programs are given, and any other by the divisors."""
        if rope["rope_type"] != "none" and rope.get("factor") not in (None, 1):
            raise CheckpointError(
                f"{self.files[0]} has {_TURNS} and {rope['rope_type']} rotary scaling; accepted is "
                "one of the two"
            )
        theta = self.metadata.get(f"{prefix}rope.freq_base", 10000.0)
        plain = theta ** -(torch.arange(len(divisors)) / len(divisors))
        for factor in _LLAMA_3_FACTORS:
            ours = plain / scaled(plain, RopeScaling(factor, 1.0, 4.0, 8192))
            if divisors.shape == ours.shape and torch.allclose(divisors, ours, 1e-4):
                return _LLAMA_3 | {"factor": factor}
        original = self.metadata.get(f"{prefix}context_length")
        return {
            "rope_type": "longrope",
            **dict.fromkeys(("short_factor", "long_factor"), divisors.float().tolist()),
            **{"factor": 1.0, "attention_factor": 1.0},
            "original_max_position_embeddings": original,
        }

    def _label(self) -> str | None:
        quantized = any(tensor.type in PACKED for tensor in self.blocks.values())
        return f"gguf-{self._mix}" if quantized else None

    @property
    def _mix(self) -> str:
        """What the file calls its mix of types: Q4_K_M."""
        try:
            name = gguf.LlamaFileType(self.metadata.get("general.file_type")).name
        except ValueError:
            sizes = Counter[str]()
            for tensor in self.blocks.values():
                sizes[tensor.type] += tensor.data.nbytes
            return sizes.most_common(1)[0][0]
        return name.removeprefix("MOSTLY_").removeprefix("ALL_")

    def _stacked(self, device: torch.device | str = "cpu") -> StackedTensors:
        config, row = self.config(), ARCHITECTURES[self.kind]
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        kind = kinds.get(self.metadata["general.architecture"], gguf.MODEL_ARCH.LLAMA)
        table = gguf.get_tensor_name_map(kind, config.num_layers)
        weights = {  # tensors of layers are called weights or biases
            name if parts[0].endswith(".weight") else name.removesuffix(".weight"): parts
            for name, parts in row.weights.items()
        }
        if row.recurrent:
            weights = gguf_recurrent.weights(weights, self.blocks)
        elif self.kind == "gemma4_text":
            from quantbench.models.formats import gguf_gemma4

            weights |= gguf_gemma4.WEIGHTS
        if any("ffn_gate_up_exps" in name for name in self.blocks):
            weights["feed_forward.experts.#.w13"] = ("mlp.experts.#.gate_up_proj",)
        in_hugging_face = names.of_architecture(weights)

        def in_file(name: str) -> tuple[str, ...]:
            return tuple(name_in_file(table, part) for part in in_hugging_face(name))

        stored: dict[str, StoredTensor] = {}
        for name, tensor in self.blocks.items():
            if self.kind == "gemma4_text" and name.endswith(".scale"):
                stored[gguf_gemma4.in_hugging_face(name)] = self._stored(name, tensor)
            elif name.endswith((".input_scale", ".scale")):  # of activations; in _stored
                continue
            elif STACKED in name:
                for i in range(tensor.shape[0]):
                    stored[f"{name}[{i}]"] = self._stored(name, tensor.expert(i), i)
            elif row.recurrent and gguf_recurrent.drafts(name, config.num_layers):
                continue
            elif name not in (_TURNS, *_LONG):
                stored[name] = self._stored(name, tensor)
        interleaved = self.kind in _REORDERED or row.interleaved
        return StackedTensors(self.files[0], stored, in_file, config, interleaved, device)

    def _stored(self, name: str, tensor: GgufTensor, expert: int = 0) -> StoredTensor:
        offset = self.kind.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))
        if offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            # llama.cpp adds 1 beforehand
            return StoredTensor(tensor.file, lambda: tensor.read() - 1)
        kind = PACKED.get(tensor.type) if len(tensor.shape) == 2 else None
        stored = StoredTensor(
            tensor.file, tensor.read, kind and kind.form, tensor.packed if kind else None
        )
        whole = self.blocks.get(f"{name.removesuffix('.weight')}.scale")  # NVFP4's
        if whole is not None and name.endswith(".weight") and self.kind != "gemma4_text":
            stored = _multiplied(stored, whole.read()[expert if STACKED in name else 0])
        recurrent = self.kind in gguf_recurrent.KINDS.values()
        return gguf_recurrent.stored(name, stored) if recurrent else stored

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return gguf_tokenizer.tokenizer_files(self.files[0], self.metadata)

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """The file's; a ByteTokenizer where the file says that it has none."""
        content = self.tokenizer_files()
        if not content:
            return ByteTokenizer(vocab_size)
        tokenizer = tokenizer_of(self.files[0], content, vocab_size)
        tokenizer.same = gguf_tokenizer.twins(self.metadata.get("tokenizer.ggml.tokens", ()))
        if gguf_tokenizer.lacks_pattern(self.metadata):
            tokenizer.notes += (gguf_tokenizer.NO_PATTERN,)
        return tokenizer


def _number(value: Any) -> Any:
    """A float32 as it was written: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _multiplied(stored: StoredTensor, factor: Tensor) -> StoredTensor:
    """A tensor all of whose numbers the file multiplies by one factor."""
    packed, form = stored.packed, stored.form
    return replace(
        stored,
        read=lambda: stored.read() * factor,
        form=form and replace(form, whole=float(factor)),
        packed=packed and (lambda: replace(packed(), tensor_scale=factor.float())),
    )


def _alike(value: Any, layers: int) -> Any:
    """A number that a file may give for each of its layers; the list where layers differ."""
    is_alike = isinstance(value, list) and len(value) == layers and len(set(value)) == 1
    return value[0] if is_alike else value


def _first_part(path: Path) -> Path:
    """The first file of a model in parts, which describes it, for any of them."""
    first = path.with_name(re.sub(r"-\d{5}(-of-\d{5})", r"-00001\1", path.name))
    return first if first.exists() else path


def is_model(name: str) -> bool:
    """Whether the file of this name is a model, and not what is published beside one: the part that
    reads pictures, or statistics for quantizing."""
    return not re.match(r"mmproj|.*[-._]?(mmproj|imatrix)", name, re.IGNORECASE)


def _only_model(folder: Path) -> Path:
    """The first file of a folder's only model. Raises CheckpointError where there are several."""
    models: dict[str, Path] = {}
    for file in filter(lambda file: is_model(file.name), sorted(folder.glob("*.gguf"))):
        models.setdefault(PART.sub("", file.stem), file)
    if len(models) > 1:
        raise CheckpointError(
            f"{folder} holds {len(models)} GGUF models; name one file: "
            f"{', '.join(sorted(file.name for file in models.values()))}"
        )
    return next(iter(models.values()))
