"""Folders as AutoTokenizer of transformers reads them: by the class that they declare, or that
their model_type has."""

import json

import pytest

from quantbench.models.registry import ARCHITECTURES
from quantbench.models.tokenizer import load_tokenizer
from quantbench.models.tokenizer_classes import MISDECLARED, REGISTERED, TOKENS, class_of
from tests.models.test_tokenizer import MARKED_TEXTS, PLENTY, START, decoder
from tests.models.tiny_tokenizers import (
    llama_2_json,
    llama_3_json,
    sentencepiece_model,
    tiktoken_file,
    write_folder,
)

TEXTS = (
    *MARKED_TEXTS,
    " one",
    "  two",
    "▁written out",
    f"{START} x{START}  y",
    "<s> a<s>b</s> c",
    "a <unk> b",
    "e\u0301 <|endoftext|> x",
)
SPACES = {"none": {}, "legacy": {"legacy": True}, "not legacy": {"legacy": False},
          "no space": {"add_prefix_space": False}}  # fmt: skip
LLAMA = {"tokenizer_class": "LlamaTokenizerFast"}
CASES = {  # what tokenizer_config.json says, and model_type of config.json
    **{f"Llama, {name}": ({**LLAMA, **said}, "llama") for name, said in SPACES.items()},
    **{f"Mistral, {name}": ({**LLAMA, **said}, "mistral") for name, said in SPACES.items()},
    "BOS": ({**LLAMA, "add_bos_token": True}, "llama"),
    "another BOS": ({**LLAMA, "add_bos_token": True, "bos_token": "</s>"}, "llama"),
    "a new BOS": ({**LLAMA, "add_bos_token": True, "bos_token": "<new>"}, "llama"),
    "no BOS": ({**LLAMA, "add_bos_token": False}, "llama"),
    "added tokens": ({**LLAMA, "added_tokens_decoder": decoder()}, "llama"),
    "split": ({**LLAMA, "split_special_tokens": True, "added_tokens_decoder": decoder()}, "llama"),
    "Gemma": ({"tokenizer_class": "GemmaTokenizer"}, "gemma3_text"),
    "Gemma's type": ({"add_bos_token": True}, "gemma2"),
    "CodeLlama": ({"tokenizer_class": "CodeLlamaTokenizer", "legacy": True}, "llama"),
    "no class": ({}, "llama"),
    "Phi-3": (LLAMA, "phi3"),
    "Granite": ({"tokenizer_class": "GPT2Tokenizer"}, "granite"),
}
BYTE_LEVEL = {
    "GPT-2": ({"tokenizer_class": "GPT2Tokenizer"}, "llama"),
    "GPT-2, space": ({"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}, "llama"),
    "GPT-2, BOS": ({"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}, "gpt2"),
    "NeoX": ({"tokenizer_class": "GPTNeoXTokenizer"}, "olmoe"),
    "Qwen 2": ({"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen2"),
    "Qwen 2, space": ({"add_prefix_space": True, "eos_token": "<|eot_id|>"}, "qwen2"),
    "Qwen 3": ({"tokenizer_class": "Qwen2Tokenizer", "unk_token": None}, "qwen3"),
    "Qwen 3.5": ({"split_special_tokens": True}, "qwen3_5_text"),
    "Qwen 3 as it is": ({"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen3"),
    "Llama 3": (LLAMA, "llama"),
}


def folders(name: str):
    """The files of the vocabulary, in its forms."""
    if name in CASES:
        model = sentencepiece_model()
        return {"tokenizer.model": model}, {"tokenizer.json": llama_2_json(model)}
    described = json.loads(llama_3_json())
    marks = described["added_tokens"]  # Llama 3's beginning opens a text without a template, too
    described["added_tokens"] = [
        mark | {"content": mark["content"].replace("<|begin_of", "<|start_of")} for mark in marks
    ]
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "special_tokens": {"<|eot_id|>": {"id": "<|eot_id|>", "ids": [marks[9]["id"]],
                                          "tokens": ["<|eot_id|>"]}},
        "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    }  # fmt: skip
    model = described["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    files = {"vocab.json": model["vocab"], "merges.txt": "\n".join(["#version: 0.2", *merges, ""])}
    config, model_type = BYTE_LEVEL[name]
    kind = class_of(config, {"model_type": model_type}, b"")
    # Without its tokenizer.json transformers gives Qwen 3.5 an empty vocabulary, which is wrong.
    return ({"tokenizer.json": described}, *[files] * (kind in TOKENS and "3_5" not in kind
                                                       and kind != "LlamaTokenizer"))  # fmt: skip


@pytest.mark.parametrize("name", CASES | BYTE_LEVEL)
def test_a_folder_is_read_as_its_class_reads_it(name, tmp_path):
    from transformers import AutoTokenizer

    config, model_type = (CASES | BYTE_LEVEL)[name]
    beside = {"tokenizer_config.json": config, "config.json": {"model_type": model_type}}
    beside["chat_template.jinja"] = "{{ messages }}"
    for number, files in enumerate(folders(name)):
        folder = write_folder(tmp_path / str(number), {**files, **beside})
        theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, PLENTY)
        literal = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
        for text in TEXTS:
            ids = theirs.encode(text, add_special_tokens=False)
            assert ours.encode_marked(text) == ids, (text, *files)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
            assert ours.encode(text) == literal.encode(text), (text, *files)
        some = [0, *range(260, 290), 0, 1, 290]  # <unk> among them, and no bytes
        assert ours.decode(some) == theirs.decode(some, skip_special_tokens=True)
        named = theirs.special_tokens_map.items()  # what a template sees
        assert ours.named == {name: piece for name, piece in named if isinstance(piece, str)}


def test_a_file_of_tiktoken_keeps_its_own_names(tmp_path):
    config = {"tokenizer_class": "LlamaTokenizer"}
    files = {"tokenizer.model": tiktoken_file(), "tokenizer_config.json": config}
    tokenizer = load_tokenizer(write_folder(tmp_path, files), PLENTY)
    assert tokenizer.named["bos_token"] == "<|begin_of_text|>"


def test_classes_are_those_of_transformers():
    from transformers.models.auto import tokenization_auto as auto

    picture = ("gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3",
               "qwen3_5", "qwen3_5_moe", "gemma4", "muse_glimmer")  # fmt: skip
    for model_type in (*ARCHITECTURES, *picture, *REGISTERED):
        theirs = auto.TOKENIZER_MAPPING_NAMES.get(model_type)
        if theirs in ("TokenizersBackend", "MistralCommonBackend"):
            theirs = ""
        assert REGISTERED.get(model_type) == theirs, model_type
    wrong = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert {kind for kind in REGISTERED if kind in wrong and REGISTERED[kind]} == {*MISDECLARED}
