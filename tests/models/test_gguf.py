"""GGUF files against transformers, whose models are written by the gguf package as llama.cpp's
converter would, and against hand-made damage."""

import copy
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantbench import models
from quantbench.errors import CheckpointError
from quantbench.generate import Generator
from quantbench.models.formats import EMBEDDED, gguf_gemma4, open_checkpoint
from quantbench.models.formats.gguf_file import GgufFile
from quantbench.models.loading import load_model
from quantbench.models.tokenizer import load_tokenizer
from tests.models import hugging_face, test_families
from tests.models.hugging_face import LLAMA_3_1, SIZES, assert_near, turned
from tests.models.refused import refusal
from tests.models.test_tokenizer import HARD_TEXTS

LONG_CONTEXT = LLAMA_3_1 | {"original_max_position_embeddings": 8192}
ARCHITECTURES = {"gemma-3": "gemma3", "olmo3": "olmo2"}  # llama.cpp's names
# Whose rows of queries and keys the converter reorders.
REORDERED = ("llama", "smollm3", "granite", "mistral3", "arcee")
OTHERS = ("Q8_1", "Q8_K", "Q1_0")  # not of weights, or not known to the package
KINDS = [
    kind
    for kind in gguf.GGML_QUANT_SIZES
    if kind.name.startswith(("Q", "IQ4", "MXFP", "NVFP")) and kind.name not in OTHERS
]


KEYS = {  # behind "ARCHITECTURE.", and what transformers calls them
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
    "attention.head_count_kv": "num_key_value_heads", "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    **{f"{kind}_logit_softcapping": f"{kind}_logit_softcapping" for kind in ("attn", "final")},
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def written(path: Path, made, architecture: str, matrix="F32", metadata=(), **options) -> Path:
    """A transformers model as llama.cpp's converter writes it. options: GGUFWriter's."""
    config, writer = made.config, gguf.GGUFWriter(path, architecture, **options)
    rope = config.rope_parameters
    rope = rope.get("full_attention") or rope
    found = {key: getattr(config, name, None) for key, name in KEYS.items()}
    found["rope.freq_base"] = float(rope["rope_theta"])
    if architecture in ("phi3", "glm4"):
        share = rope.get("partial_rotary_factor", 1.0)
        found["rope.dimension_count"] = int(share * config.head_dim)
    found |= rotary(writer, config, rope)
    keys = {f"{architecture}.{key}": value for key, value in found.items() if value is not None}
    for key, value in (keys | dict(metadata)).items():
        kind = gguf.GGUFValueType.get_type(value)
        kind = gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind
        writer.add_key_value(key, value, kind)
    kind = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = dict(made.state_dict())
    turns = architecture in REORDERED
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        if turns and ".q_proj." in name:
            tensor = turned(tensor, config.num_attention_heads)
        elif turns and ".k_proj." in name:
            tensor = turned(tensor, config.num_key_value_heads)
        if architecture.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        tensors[name] = tensor
    for name, tensor in stacked(tensors).items():
        values = tensor.numpy()
        to = matrix if values.ndim > 1 and "gate.weight" not in name else "F32"
        to = gguf.GGMLQuantizationType[to(name) if callable(to) else to]
        in_file = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert in_file, name
        writer.add_tensor(in_file, encoded(values, to), raw_dtype=to)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rotary(writer: gguf.GGUFWriter, config, rope: dict) -> dict:
    """What the converter writes about rotary scaling and windows."""
    kind, found = rope.get("rope_type"), {}
    if writer.arch == "olmo2" and getattr(config, "sliding_window", None):
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        found["attention.sliding_window_pattern"] = windows
    if kind == "llama3":  # what frequencies are divided by
        scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    if kind == "longrope":
        for name in ("short", "long"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
        original = rope["original_max_position_embeddings"]
        attention = 1 + np.log(config.max_position_embeddings / original) / np.log(original)
        found["rope.scaling.original_context_length"] = original
        found["rope.scaling.attn_factor"] = float(np.sqrt(attention))
    if kind in ("yarn", "linear"):
        keys = {"factor": "factor", "original_max_position_embeddings": "original_context_length",
                "mscale_all_dim": "yarn_log_multiplier"}  # fmt: skip
        found["rope.scaling.type"] = kind
        found |= {f"rope.scaling.{key}": rope[word] for word, key in keys.items() if word in rope}
    found["attention.temperature_scale"] = rope.get("llama_4_scaling_beta")
    return found


def encoded(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The values in blocks of a type; blocks of other numbers where the package cannot make any."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        columns, size = gguf.GGML_QUANT_SIZES[kind]
        return blocks(kind, values.shape[0], values.shape[1] // columns).reshape(len(values), -1)


# Where blocks have their float16 scales.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_XS": (0,),
}  # fmt: skip


def blocks(kind: gguf.GGMLQuantizationType, rows: int, count: int) -> np.ndarray:
    """Random blocks (rows, count, bytes) with scales that are small and finite."""
    made = torch.randint(0, 256, (rows, count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=torch.uint8)
    drawn = made.numpy()
    for at in HALVES.get(kind.name, ()):
        scales = torch.randn(rows, count, 1).mul(0.002).half().numpy()
        drawn[..., at : at + 2] = scales.view(np.uint8).reshape(rows, count, 2)
    if kind.name == "MXFP4":
        drawn[..., 0] = 110 + drawn[..., 0] % 16
    if kind.name == "NVFP4":
        drawn[..., :4] %= 127  # the largest code is NaN
    return drawn


def stacked(tensors: dict) -> dict:
    """Experts' matrices as one tensor; transformers 5 stacks gate and up already."""
    out = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("experts.gate_up_proj")
        if stem != name:
            gate, up = tensor.chunk(2, 1)
            out[f"{stem}experts.gate_proj.weight"] = gate.contiguous()
            out[f"{stem}experts.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            out[f"{name}.weight"] = tensor
        else:
            out[name] = tensor
    return out


def logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    return hugging_face.logits(load_model(str(path), precision=torch.float32), tokens)


@pytest.mark.parametrize("factor", (8.0, 32.0))
def test_llama_3s_rotary_scaling_is_told_from_its_divisors(factor, tmp_path):
    scaling = LONG_CONTEXT | {"factor": factor}
    config = hugging_face.llama_3(2, rope_scaling=scaling)
    made = AutoModelForCausalLM.from_config(config).eval()
    path = written(tmp_path / "model.gguf", made, "llama")
    found = open_checkpoint(str(path)).config().rope_scaling
    assert (found.factor, found.original_max_position) == (factor, 8192)


@pytest.mark.parametrize("factor, high", [(4.0, 4.0), (8.0, 2.0)])
def test_other_divisors_of_rotations_are_taken_from_the_file(factor, high, tmp_path):
    scaling = LLAMA_3_1 | {"factor": factor, "high_freq_factor": high}
    made = hugging_face.drawn(hugging_face.llama_3(2, rope_scaling=scaling))
    path = written(tmp_path / "model.gguf", made, "llama")
    tokens = torch.randint(3, 96, (2, 24))
    assert_near(logits(path, tokens), made(tokens).logits)
    assert Generator(models.load(str(path)), 1, 64).decoder.name == "cpu-step"
    both = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    path = written(tmp_path / "both.gguf", made, "llama", metadata=both)
    assert "has rope_freqs.weight and linear" in refusal(CheckpointError, logits, path, tokens)


@pytest.mark.parametrize("key", ("rope.freq_base_swa", "rope.local.freq_base"))
@pytest.mark.parametrize("base", (10_000.0, 20_000.0, 500_000.0))
@pytest.mark.parametrize("family, usual", [("gemma-3", 10_000.0), ("olmo3", 500_000.0)])
def test_layers_with_a_window_have_their_own_rotary_base(family, usual, base, key, tmp_path):
    """transformers' model of that base, and not the one of its usual base."""
    made = test_families.made(family)
    architecture = ARCHITECTURES[family]
    path = written(
        tmp_path / "m.gguf", made, architecture, metadata={f"{architecture}.{key}": base}
    )
    config = copy.deepcopy(made.config)
    parts = config.rope_parameters["sliding_attention"]
    assert parts["rope_theta"] == usual
    parts["rope_theta"], tokens = base, torch.randint(3, 96, (2, 24))
    like = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    like.load_state_dict(made.state_dict())
    found, before = logits(path, tokens), made(tokens).logits
    assert_near(found, like(tokens).logits)
    assert base == usual or (found - before).abs().max() > 1e-2 * before.abs().max()


def test_a_window_s_base_without_windows_says_nothing(tmp_path):
    made = test_families.made("olmo2")
    path = written(tmp_path / "m.gguf", made, "olmo2", metadata={"olmo2.rope.freq_base_swa": 5.0})
    tokens = torch.randint(3, 96, (2, 24))
    assert_near(logits(path, tokens), made(tokens).logits)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_is_read_as_the_gguf_package_has_it(kind, tmp_path):
    values, size = gguf.GGML_QUANT_SIZES[kind]
    drawn = torch.randint(0, 256, (3, 2 * size), dtype=torch.uint8).numpy()
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("x", drawn, raw_dtype=kind)
    finish(writer)
    tensor = GgufFile(tmp_path / "one.gguf").tensors["x"]
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(drawn, kind)
    assert tensor.shape == (3, 2 * values) == tuple(tensor.read().shape)
    np.testing.assert_array_equal(tensor.read().numpy(), expected)


def test_a_quantized_file_in_parts_is_one_model(tmp_path):
    made, folder = hugging_face.model("llama-2"), tmp_path / "parts"
    whole = written(tmp_path / "whole.gguf", made, "llama", "Q8_0")
    folder.mkdir()
    written(folder / "m.gguf", made, "llama", "Q8_0", split_max_tensors=20)
    tokens = torch.randint(3, SIZES["vocab_size"], (1, 9))
    assert torch.equal(logits(folder, tokens), logits(whole, tokens))
    second = folder / "m-00002-of-00002.gguf"
    assert torch.equal(logits(second, tokens), logits(whole, tokens))
    joined = tmp_path / "joined.gguf"
    joined.write_bytes((folder / "m-00001-of-00002.gguf").read_bytes() + second.read_bytes())
    with pytest.raises(CheckpointError, match="one of 2 parts, or these in one file: keep parts"):
        open_checkpoint(str(joined))
    (folder / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="lacks m-00002-of-00002.gguf"):
        open_checkpoint(str(folder))


def tokenizer_of_tiny() -> dict:
    """The metadata that llama.cpp's converter makes of tiny's tokenizer."""
    model = SentencePieceProcessor(str(EMBEDDED / "tokenizer.model"))
    ids = range(model.vocab_size())
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }


def test_sentencepiece_out_of_a_file_is_the_same(tmp_path):
    metadata = {**tokenizer_of_tiny(), "tokenizer.chat_template": "{{ messages }}"}
    ids = range(len(metadata["tokenizer.ggml.tokens"]))
    made = hugging_face.model("llama-2")
    path = written(tmp_path / "m.gguf", made, "llama", metadata=metadata)
    ours = open_checkpoint(str(path)).tokenizer(len(ids))
    theirs = open_checkpoint("tiny").tokenizer(len(ids))
    for text in HARD_TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id, theirs.eos_ids)
    assert ours.chat_template == "{{ messages }}"
    for name, content in open_checkpoint(str(path)).tokenizer_files().items():  # as --save does
        (tmp_path / name).write_bytes(content)
    kept = load_tokenizer(tmp_path, len(ids))
    assert [kept.encode(text) for text in HARD_TEXTS] == [ours.encode(t) for t in HARD_TEXTS]
    for attribute in ("bos_id", "eos_ids", "chat_template"):
        assert getattr(kept, attribute) == getattr(ours, attribute)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_pieces_that_are_there_twice_or_empty(kind, tmp_path):
    """As in official files of Gemma 4: both ids decode, and one of them is encoded to."""
    tokens = tokenizer_of_tiny() | {"tokenizer.ggml.model": kind}
    pieces = tokens["tokenizer.ggml.tokens"]
    if kind == "gpt2":
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        pieces = ["<unk>", "<s>", "</s>", *sorted(alphabet), *map(str, range(10, 200))]
        types = [1] * len(pieces)
        tokens |= {"tokenizer.ggml.merges": ["1 0"], "tokenizer.ggml.pre": "gpt-2"}
        tokens |= {"tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": None}
        tokens = {key: value for key, value in tokens.items() if value is not None}
    pieces[400], pieces[410] = pieces[290], ""
    tokens["tokenizer.ggml.tokens"] = pieces
    made = hugging_face.model("llama-2", vocab_size=len(pieces))
    path = written(tmp_path / "m.gguf", made, "llama", metadata=tokens)
    tokenizer = open_checkpoint(str(path)).tokenizer(len(pieces))
    assert tokenizer.size == len(pieces)
    assert tokenizer.decode([290]) == tokenizer.decode([400]) != ""
    assert tokenizer.decode([410]) == ""
    text = tokenizer.decode([290])
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


@pytest.mark.parametrize("pre", (None, "gpt-2"))
def test_a_file_without_a_pattern_says_so(pre, tmp_path):
    made, tokens = hugging_face.model("llama-2"), ["a", "b", "ab", "<s>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
        **({"tokenizer.ggml.pre": pre} if pre else {}),
    }
    path = written(tmp_path / "m.gguf", made, "llama", metadata=metadata)
    opening, *others = open_checkpoint(str(path)).tokenizer(SIZES["vocab_size"]).notes
    assert opening == "No token opens a text: add_bos_token is false"
    assert ["tokenizer.ggml.pre" in note for note in others] == [True] * (pre is None)


def put(new: bytes, at: int = 0, behind: bytes = b""):
    """Damage: overwrites len(new) bytes, from `at` bytes after the first `behind` on."""

    def damage(content: bytes) -> bytes:
        start = content.index(behind) + len(behind) + at
        return content[:start] + new + content[start + len(new) :]

    return damage


# Behind the name of a vector: 4 bytes for its one dimension, 8 for its size, its type, its place.
NORM, TYPE, PLACE = b"output_norm.weight", 4 + 8, 4 + 8 + 4
DAMAGES = {
    "no GGUF file": put(b"GGML"),
    "version 7 is not read": put(b"\7", 4),
    "counts 1152921504606846976 entries": put(struct.pack("<Q", 1 << 60), 8),
    "is of type 99, which is not known": put(struct.pack("<I", 99), TYPE, NORM),
    "lies past its end": put(struct.pack("<Q", 1 << 40), PLACE, NORM),
    "overlaps another": put(struct.pack("<Q", 0), PLACE, NORM),
    "ends within its header": lambda content: content[:6],
    "more than it has bytes for": lambda content: content[:90],
    "lies past its end: fetch": lambda content: content[:-64],
    "architecture 'llamb' is not supported": lambda content: content.replace(b"llama", b"llamb", 1),
}


STRANGE = {  # metadata that may change the result
    "beta_fast of rotary scaling is given, and no type": {"llama.rope.scaling.yarn_beta_fast": 2.0},
    "'llama.attention.causal' is not understood": {"llama.attention.causal": 3},
    "rotary scaling 'odd' is not supported": {"llama.rope.scaling.type": "odd"},
    "'llama.attention.sliding_window_pattern' is not understood": {
        "llama.attention.sliding_window_pattern": [True, False, True]
    },
}


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
SAID_OTHERWISE = {  # of a family: keys of a file, and what they mean to transformers
    "factor without a type": ("llama-2", {"rope.scaling.factor": 2.0}, {"rope_parameters": LINEAR}),
    "factor of 2023": ("llama-2", {"rope.scale_linear": 2.0}, {"rope_parameters": LINEAR}),
    "factor of 1": ("llama-2", {"rope.scale_linear": 1.0}, {}),
    "window": ("mistral-0.1", {"attention.sliding_window": 8}, {}),
    "period": ("gemma-3", {"attention.sliding_window_pattern": 3},
               {"layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2
                               + ["sliding_attention"]}),
    "period of 0": ("gemma-3", {"attention.sliding_window_pattern": 0},
                    {"layer_types": ["sliding_attention"] * 7}),
    "neutral": ("llama-2", {"attention.causal": True, "pooling_type": 3, "logit_scale": 1.0,
                            "attention.layer_norm_epsilon": 0.5, "expert_gating_func": 1}, {}),
    "each layer": ("llama-2", {"attention.head_count_kv": [4] * 3,
                               "feed_forward_length": [96] * 3}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID_OTHERWISE)
def test_keys_that_say_the_same_in_other_words(case, tmp_path):
    family, keys, changes = SAID_OTHERWISE[case]
    made = hugging_face.model(family, **changes | {"query_pre_attn_scalar": 32})
    name = ARCHITECTURES.get(family, "llama")
    plain = made.config.rope_parameters  # the file says it by these keys alone
    made.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    if "full_attention" in plain:
        made.config.rope_parameters = plain
    metadata = {f"{name}.{key}": value for key, value in keys.items()}
    path = written(tmp_path / "m.gguf", made, name, metadata=metadata)
    tokens = torch.randint(3, 96, (2, 24))
    assert_near(logits(path, tokens), made(tokens).logits)


def test_gemma_4_has_a_layer_that_sees_all():
    keys = {"block_count": 2, "feed_forward_length": 8, "attention.head_count_kv": 1}
    keys |= {"attention.sliding_window_pattern": [True, True]}
    metadata = {f"gemma4.{key}": value for key, value in keys.items()}
    line = refusal(CheckpointError, lambda: [*gguf_gemma4.described(Path("w"), metadata, {})])
    assert "sliding_window_pattern" in line


@pytest.mark.parametrize("message", [*DAMAGES, *STRANGE])
def test_damage_is_said_in_one_line(message, tmp_path):
    made, metadata = hugging_face.model("llama-2"), STRANGE.get(message, {})
    path = written(tmp_path / "m.gguf", made, "llama", metadata=metadata)
    if message in DAMAGES:
        path.write_bytes(DAMAGES[message](path.read_bytes()))
    assert message in refusal(CheckpointError, lambda: open_checkpoint(str(path)).config())


BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.add_bos_token": True,
}


@pytest.mark.parametrize("vocabulary", ("sentencepiece", "bpe"))
def test_metadata_of_another_type_is_refused_in_one_line(vocabulary, tmp_path):
    made = hugging_face.model("llama-2")
    metadata = BPE if vocabulary == "bpe" else tokenizer_of_tiny()
    metadata = {**metadata, "tokenizer.chat_template": "x", "llama.rope.dimension_count": 32}
    whole = GgufFile(written(tmp_path / "w.gguf", made, "llama", metadata=metadata)).metadata
    keys = [key for key in whole if key.startswith(("llama", "tokenizer", "general.arch"))]
    assert len(keys) > 15
    for key in keys:
        size = len(whole[key]) if isinstance(whole[key], list) else 1
        for value in ("x", 7, 1.5, True, ["x"] * size, [7] * size, [1.5] * size):
            if type(value) is type(whole[key]) and not isinstance(value, list):
                continue
            if isinstance(value, list) and type(whole[key]) is list:
                kinds = type(value[0]), type(whole[key][0])
                if kinds[0] is kinds[1] or kinds == (int, float):
                    continue
            if type(whole[key]) is float and type(value) is int:
                continue
            with pytest.MonkeyPatch.context() as patch:
                changed = _with(key, value)
                patch.setattr("quantbench.models.formats.gguf_file.GgufFile._check_types", changed)
                line = refusal(CheckpointError, _opened, tmp_path / "w.gguf")
            assert "w.gguf" in line, (key, value)


def _with(key: str, value):
    check = GgufFile._check_types

    def changed(file: GgufFile) -> None:
        file.metadata[key] = value
        check(file)

    return changed


def _opened(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    checkpoint.config()
    checkpoint.tokenizer(SIZES["vocab_size"])


def test_a_folder_of_two_models_asks_for_one(tmp_path):
    for name in ("a.gguf", "b.gguf", "mmproj-a.gguf", "imatrix.gguf", "a.imatrix.gguf"):
        (tmp_path / name).write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(CheckpointError, match=r"2 GGUF models; name one file: a.gguf, b.gguf"):
        open_checkpoint(str(tmp_path))
