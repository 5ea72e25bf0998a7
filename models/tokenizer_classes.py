"""What transformers (5.24) makes of a folder's tokenizer by its class. Some classes take the
vocabulary and the merges alone from a tokenizer.json, and cut and decode text by their own rules.

    kind, tokens, opens = rules_of(folder, content, tokenizer_config)  # kind "": the files' rules
    parts_of(hints)                       # parts of a tokenizer.json; None: those of the file
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantbench.models.tokenizer_hints import Hints, read_object

# The class of a config.json's model_type, by transformers' TOKENIZER_MAPPING_NAMES; "": the files'
# rules, whatever class they declare. For other types the declared class counts.
REGISTERED = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"), "GemmaTokenizer"),
    **dict.fromkeys(("gemma3n_text", "zaya"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    "qwen3_next": "Qwen2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("gpt2", "phi"), "GPT2Tokenizer"),
    **dict.fromkeys(("mistral", "mistral3", "mixtral", "ministral", "ministral3"), ""),
    **dict.fromkeys(("glm", "glm4", "granite", "granitemoe", "granitemoehybrid"), ""),
    **dict.fromkeys(("olmo2", "olmo3", "phi3"), ""),
}
# Types whose files declare a class that is wrong.
MISDECLARED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")

LLAMA, CODE_LLAMA, GEMMA = "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"
# Of byte-level BPE, with the name that GGUF has for how text is cut (formats/gguf_tokenizer.py).
CUTS = {
    "GPT2Tokenizer": "gpt-2",
    "GPTNeoXTokenizer": "olmo",
    "Qwen2Tokenizer": "qwen2",
    "Qwen3_5Tokenizer": "qwen35",
}
_LLAMAS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_END = "<|endoftext|>"
_QWENS = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
_NEOX = {"unk_token": _END, "bos_token": _END, "eos_token": _END}
TOKENS: Mapping[str, Mapping[str, str | None]] = {
    LLAMA: _LLAMAS,
    CODE_LLAMA: {
        **_LLAMAS,
        "prefix_token": "▁<PRE>",
        "middle_token": "▁<MID>",
        "suffix_token": "▁<SUF>",
        "eot_token": "▁<EOT>",
        "fill_token": "<FILL_ME>",
    },
    GEMMA: {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "GPT2Tokenizer": _NEOX,
    "GPTNeoXTokenizer": {**_NEOX, "pad_token": "<|padding|>"},
    "Qwen2Tokenizer": _QWENS,
    "Qwen3_5Tokenizer": _QWENS,
}
# Whether BOS opens a text if add_bos_token is absent, whatever a tokenizer.json's template says.
OPENS = {CODE_LLAMA: True, "GPTNeoXTokenizer": False}


def rules_of(
    folder: Path, content: Mapping[str, bytes], tokenizer_config: Mapping[str, Any]
) -> tuple[str, dict[str, str | None], bool | None]:
    """The class, its special tokens, and whether BOS opens a text; None: as the files say."""
    config = read_object(folder, content, "config.json")
    kind = class_of(tokenizer_config, config, content.get("tokenizer.json", b""))
    if not content.get("tokenizer.model", b"\n").startswith(b"\n"):
        kind = ""  # Llama 3's file of tiktoken, of which transformers makes no such class
    opens = OPENS.get(kind)
    if "vocab.json" in content and "tokenizer.json" not in content:
        opens = bool(tokenizer_config.get("add_bos_token"))
    return kind, dict(TOKENS.get(kind, {})), opens


def class_of(
    tokenizer_config: Mapping[str, Any], config: Mapping[str, Any], tokenizer_json: bytes
) -> str:
    """A name in TOKENS, or "" where a tokenizer.json is used as it is."""
    declared = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    kind, model_type = str(declared or "").removesuffix("Fast"), str(config.get("model_type"))
    registered = REGISTERED.get(model_type)
    if kind == LLAMA and model_type not in MISDECLARED and b'"ByteLevel"' in tokenizer_json:
        return ""  # Llama 3
    if registered is not None and (not kind or not registered or model_type in MISDECLARED):
        kind = registered
    return kind if kind in TOKENS else ""


def parts_of(hints: Hints) -> dict[str, Any] | None:
    """normalizer, pre_tokenizer, decoder and model of a tokenizer.json, with an empty vocabulary;
    None where they are the file's own."""
    from quantbench.models.formats import gguf_tokenizer

    kind, prefix = hints.kind, hints.prefix
    if kind in CUTS:
        parts = gguf_tokenizer.byte_level([], [], [], CUTS[kind])
        parts["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = bool(prefix)
        return parts
    if kind not in TOKENS:
        return None
    parts = gguf_tokenizer.of_gemma([], [], [])
    if kind != LLAMA:
        parts["model"]["unk_token"] = hints.named["unk_token"]
    if kind == GEMMA:
        return parts
    scheme = "never" if prefix is False else "first"
    if scheme == "first" and kind == LLAMA and hints.legacy:
        scheme = "always"  # also behind each added token
    if prefix is not False or kind == CODE_LLAMA:
        parts["decoder"]["decoders"].append(
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        )
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return parts | {"normalizer": None, "pre_tokenizer": space}


def spaces_of(hints: Hints, data: bytes) -> tuple[bytes, bool, bool]:
    """For the protobuf `data` of a sentencepiece model: the same with the spaces of its class;
    whether a space is put in front behind each added token, too; whether not in front of what
    begins with a space."""
    is_llama = hints.kind in (LLAMA, CODE_LLAMA)
    if not is_llama and hints.kind != GEMMA:
        always = hints.legacy is not False
        return data, always, not always
    # A protobuf that has a field twice means the later one. In normalizer_spec: no
    # precompiled_charsmap; add_dummy_prefix; not remove_extra_whitespaces; escape_whitespaces.
    prefix = is_llama and hints.prefix is not False
    spec = b"\x12\x00" + b"\x18" + bytes([prefix]) + b"\x20\x00" + b"\x28\x01"
    data += b"\x1a" + bytes([len(spec)]) + spec
    return data, hints.kind == LLAMA and bool(hints.legacy), True


def names_in(model: Any) -> dict[str, str]:
    """The special tokens of a sentencepiece model, as a folder of no class has them."""
    ids = {kind: getattr(model, f"{kind}_id")() for kind in ("unk", "bos", "eos")}
    return {f"{kind}_token": model.id_to_piece(id) for kind, id in ids.items() if id >= 0}
