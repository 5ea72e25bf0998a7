"""The tokenizer in a GGUF file's metadata, as the file that its library reads.

Byte-level BPE ("gpt2") becomes a tokenizer.json, sentencepiece ("llama") a sentencepiece model, so
that models/tokenizer.py has one class for each kind, whatever file it comes from.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.tiktoken_file import LLAMA_3_SPLIT
from quantbench.models.tokenizer_classes import CUTS
from quantbench.models.tokenizer_hints import MERGES, Hints, read_object
from quantbench.text import shown

# tokenizer.ggml.token_type, as sentencepiece numbers them
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = LLAMA_3_SPLIT.replace("{1,3}", "")
# Marks are letters.
_QWEN_3_5 = _QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"
)
# How text is cut before its bytes are merged, by tokenizer.ggml.pre: a pattern, whether
# each digit is a part, and whether text is normalized to NFC.
_CUTS: dict[str, tuple[str | None, bool, bool]] = {
    "default": (None, False, False),
    "gpt-2": (None, False, False),
    "smollm": (None, True, False),
    "olmo": (None, False, True),
    "llama-bpe": (LLAMA_3_SPLIT, False, False),
    "dbrx": (LLAMA_3_SPLIT, False, False),
    "qwen2": (_QWEN_2, False, True),
    "qwen35": (_QWEN_3_5, False, True),
    "gpt-4o": (_GPT_4O, False, False),
    "tekken": (_TEKKEN, False, False),
    "pixtral": (_TEKKEN, False, False),  # later vocabularies of the same kind
}
# Other names that llama.cpp takes for one of these (llama-vocab.cpp), of families that are read.
_SAME = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "midm-2.0"), "llama-bpe"),
    "lfm2": "llama-bpe",
    **dict.fromkeys(("llama4", "kanana2"), "gpt-4o"),
    **dict.fromkeys(("smaug-bpe", "glm4", "chatglm-bpe"), "dbrx"),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez", "f2llmv2"), "qwen2"),
    **dict.fromkeys(("refact", "starcoder", "command-r", "exaone", "minerva-7b"), "smollm"),
    "codeshell": "smollm",
    **dict.fromkeys(("phi-2", "gigachat", "a.x-4.0", "mellum", "granite-docling"), "gpt-2"),
    **dict.fromkeys(("mpt", "jais", "trillion", "exaone4"), "gpt-2"),
}
# A token's own text is not merged from bytes.
_WHOLE_FIRST = ("llama-bpe", "tekken", "pixtral", "gpt-4o")
_OPENS = _WHOLE_FIRST[:3]  # with a token that opens a sequence, unless the file denies it

NO_PATTERN = (
    "The GGUF file lacks tokenizer.ggml.pre, the pattern by which text is cut: GPT-2's is used, "
    "and ids may differ from the model's; convert or download the model again: newer ones have it"
)


def lacks_pattern(metadata: Mapping[str, Any]) -> bool:
    """Whether a file of byte-level BPE does not name the pattern, as those of early 2024."""
    return metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in metadata


def cut_of(described: Mapping[str, Any]) -> str | None:
    """The name in _CUTS of how a tokenizer.json of byte-level BPE cuts text; None where GGUF has no
    name for it, or the tokenizer is of another kind."""
    model, cutter = described.get("model") or {}, described.get("pre_tokenizer") or {}
    steps = {step.get("type"): step for step in cutter.get("pretokenizers", [cutter])}
    normalizer = described.get("normalizer")
    if (
        model.get("type") != "BPE"
        or not {"ByteLevel"} <= steps.keys() <= {"ByteLevel", "Split", "Digits"}
        or steps["ByteLevel"].get("add_prefix_space")
        or normalizer not in (None, {"type": "NFC"})
    ):
        return None
    pattern = steps["Split"]["pattern"].get("Regex") if "Split" in steps else None
    digits = bool(steps.get("Digits", {}).get("individual_digits"))
    cut, whole = (pattern, digits, normalizer is not None), bool(model.get("ignore_merges"))
    names = (name for name in _CUTS if name != "default" and (name in _WHOLE_FIRST) == whole)
    return next((name for name in names if _CUTS[name] == cut), None)


def of_vocabulary(folder: Path, content: Mapping[str, bytes], hints: Hints) -> bytes:
    """The tokenizer.json of a folder with vocab.json and merges.txt. Raises CheckpointError."""
    vocabulary, lacks = read_object(folder, content, "vocab.json"), None
    if MERGES not in content:
        lacks = f"its {MERGES} is missing"
    elif hints.kind not in CUTS:
        lacks = f"only those of {', '.join(CUTS)} are read without that file"
    if not all(type(id) is int and id >= 0 for id in vocabulary.values()):
        lacks = "its vocab.json is no object of texts and ids"
    if lacks:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and {lacks}; download tokenizer.json"
        )
    lines = content[MERGES].decode("utf-8", "replace").splitlines()
    merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    tokens = list(vocabulary)
    tokenizer = byte_level(tokens, [_NORMAL] * len(tokens), merges, CUTS[hints.kind])
    tokenizer["model"]["vocab"] = vocabulary
    return json.dumps(tokenizer).encode()


def tokenizer_files(file: Path, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a folder from which models/tokenizer.py makes the tokenizer; none where the
    metadata says that there is none.

    file: the GGUF file, for messages. Raises CheckpointError for a kind that is not read, or
    metadata that cannot be one. metadata: of types that gguf_file.py checked.
    """

    def get(key: str, default: Any, fits: Callable[[Any], bool] = lambda value: True) -> Any:
        value = metadata.get(f"tokenizer.{key}", default)
        if value is not None and not fits(value):
            raise CheckpointError(f"{file}: tokenizer.{key} is {shown(value)}: not accepted")
        return value

    kind = metadata.get("tokenizer.ggml.model")
    if kind == "none":
        return {}
    pre = metadata.get("tokenizer.ggml.pre", "default")
    pre = _SAME.get(pre, pre)
    tokens = get("ggml.tokens", [])
    if not tokens:
        raise CheckpointError(f"{file} holds no tokenizer.ggml.tokens")

    def numbers(value: Any) -> bool:
        return len(value) == len(tokens)

    def kinds(value: Any) -> bool:
        return numbers(value) and {*value} <= {*range(_BYTE + 1)}  # 0 says nothing

    ids = {
        name: get(f"ggml.{name}_token_id", None, range(len(tokens)).__contains__)
        for name in ("bos", "eos", "eot", "eom", "unknown")
    }
    opens = get("ggml.add_bos_token", kind != "gpt2" or pre in _OPENS)
    bos, eos = (None if ids[name] is None else tokens[ids[name]] for name in ("bos", "eos"))
    template = get("chat_template", None)
    notes = {"bos_token": bos, "add_bos_token": opens, "eos_token": eos, "chat_template": template}
    notes["legacy"] = True  # llama.cpp puts a space behind each special token, too
    ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    types = list(get("ggml.token_type", [_NORMAL] * len(tokens), kinds))
    if _UNKNOWN not in types and ids["unknown"] is not None:
        types[ids["unknown"]] = _UNKNOWN
    same = twins(tokens)  # no format of tokenizers has a piece twice, or an empty one
    types = [
        _UNUSED if id in same else types[id] or _NORMAL if piece else _CONTROL
        for id, piece in enumerate(tokens)
    ]
    tokens = [
        f"[DUPLICATE_{id}]" if id in same else piece or f"[EMPTY_{id}]"
        for id, piece in enumerate(tokens)
    ]
    for id in ids.values():  # some files call them ordinary pieces
        if id is not None and types[id] in (_NORMAL, _UNUSED):
            types[id] = _CONTROL
    if kind == "gpt2":
        if pre not in _CUTS:
            raise CheckpointError(
                f"{file}: tokenizer.ggml.pre {shown(pre)} is not read; "
                f"{', '.join((*_CUTS, *_SAME))} are"
            )
        merges = get("ggml.merges", [])
        name, content = "tokenizer.json", byte_level(tokens, types, merges, pre)
        data = json.dumps(content | _opening(bos if opens else None, ids["bos"])).encode()
    elif kind == "gemma4":
        content = of_gemma(tokens, types, get("ggml.merges", []))
        content |= _opening(bos if opens else None, ids["bos"])
        name, data = "tokenizer.json", json.dumps(content).encode()
    elif kind == "llama":
        scores = get("ggml.scores", [0.0] * len(tokens), numbers)
        prefix = get("ggml.add_space_prefix", True)
        name, data = "tokenizer.model", _sentencepiece(tokens, types, scores, bos, eos, prefix)
    else:
        raise CheckpointError(
            f"{file}: tokenizer.ggml.model {shown(kind)} is not read; gpt2, llama and gemma4 are"
        )
    return {
        name: data,
        "tokenizer_config.json": json.dumps(notes).encode(),
        "generation_config.json": json.dumps({"eos_token_id": ends}).encode(),
    }


def twins(tokens: Sequence[str]) -> dict[int, int]:
    """Each id whose piece a later id has, too, and the last such id, which llama.cpp encodes to."""
    last = {piece: id for id, piece in enumerate(tokens)}
    return {id: last[piece] for id, piece in enumerate(tokens) if piece and last[piece] != id}


def byte_level(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pre: str
) -> dict[str, Any]:
    """The content of a tokenizer.json (https://huggingface.co/docs/tokenizers)."""
    pattern, digits, composed = _CUTS[pre]
    cuts: list[dict[str, Any]] = []
    if digits:
        cuts.append({"type": "Digits", "individual_digits": True})
    if pattern:
        regex = {"Regex": pattern}
        cuts.append({"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False})
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cuts.append({**bytes_, "use_regex": pattern is None})
    return {
        "version": "1.0",
        "added_tokens": _added(tokens, types),
        "normalizer": {"type": "NFC"} if composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "decoder": {**bytes_, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": pre in _WHOLE_FIRST,
        },
    }


def _opening(bos: str | None, id: int | None) -> dict[str, Any]:
    """The part of a tokenizer.json that puts a token in front of each text."""
    if bos is None:
        return {}
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    both = [first, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"Sequence": {"id": "B", "type_id": 1}}]
    special = {bos: {"id": bos, "ids": [id], "tokens": [bos]}}
    return {
        "post_processor": {
            **{"type": "TemplateProcessing", "special_tokens": special},
            **{"single": both, "pair": both + second},
        }
    }


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": id, "content": token, **flags, "special": types[id] != _USER_DEFINED}
        for id, token in enumerate(tokens)
        if types[id] in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]


def of_gemma(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> dict[str, Any]:
    """As `byte_level`, of Gemma's BPE: of letters, with spaces as U+2581, and of bytes where a
    letter is no piece. llama.cpp's converter calls some added tokens normal: those that no merge
    makes."""
    merged = {merge[:1] + merge[1:].replace(" ", "", 1) for merge in merges}
    types = [
        _USER_DEFINED if kind == _NORMAL and len(token) > 1 and token not in merged else kind
        for token, kind in zip(tokens, types, strict=True)
    ]
    space, text = {"String": " "}, {"type": "Replace", "content": "\u2581"}
    unknown = tokens[types.index(_UNKNOWN)] if _UNKNOWN in types else None
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": _added(tokens, types),
        "normalizer": {**text, "pattern": space},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious",
                          "invert": False},
        "decoder": {"type": "Sequence",
                    "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": merges,
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }  # fmt: skip


def _sentencepiece(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    bos: str | None,
    eos: str | None,
    prefix: bool,
) -> bytes:
    """A sentencepiece model: a ModelProto, by the numbers of sentencepiece_model.proto."""
    pieces = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind == _USER_DEFINED:  # sentencepiece escapes their spaces, GGUF does not
            token = token.replace(" ", "\u2581")
        text = token.encode()
        content = b"\n" + _varint(len(text)) + text + struct.pack("<BfBB", 0x15, score, 0x18, kind)
        pieces.append(b"\n" + _varint(len(content)) + content)
    numbers = (3, 2), (4, len(tokens)), (35, _BYTE in types)  # BPE; its size; byte fallback
    unknown = tokens[types.index(_UNKNOWN)] if _UNKNOWN in types else None
    # The library finds the unknown piece, BOS, EOS and the padding, which none is, by these.
    names = ((45, unknown), (46, bos), (47, eos), (48, None))
    trainer = b"".join(_number(field, value) for field, value in numbers)
    trainer += b"".join(_message(field, (name or "").encode()) for field, name in names)
    normalizer = _message(1, b"identity") + b"".join(
        _number(field, value) for field, value in ((3, prefix), (4, False), (5, True))
    )  # a space in front; runs of spaces kept; spaces written as U+2581
    return b"".join(pieces) + _message(2, trainer) + _message(3, normalizer)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
