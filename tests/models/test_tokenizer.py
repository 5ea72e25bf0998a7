"""Every kind of tokenizer against the library that defines it, and against Hugging Face."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from quantbench.errors import CheckpointError
from quantbench.models.chat import chat_of
from quantbench.models.tiktoken_file import LLAMA_3_SPLIT, cuts, llama_3_special_tokens
from quantbench.models.tokenizer import ByteTokenizer, TextStream, Tokenizer, load_tokenizer
from tests.models.refused import refusal
from tests.models.tiny_tokenizers import (
    hugging_face_llama,
    llama_2_json,
    llama_3_json,
    sentencepiece_model,
    tiktoken_file,
    tiktoken_ranks,
    write_folder,
)
from tests.programs import python

PLENTY = 1 << 20  # a vocabulary that no tokenizer here fills
KINDS = ("sentencepiece", "no-prefix", "llama-2-json", "tiktoken", "llama-3-json", "bytes")

# What text decoders stumble over: spaces at the ends, characters of two to four bytes, marks that
# combine, joined emoji, no-break and ideographic spaces, controls, sentencepiece's own space.
HARD_TEXTS = (
    "",
    " ",
    "a",
    "Hello World",
    "  two before, two after  ",
    "\n\n\tindented\r\n  x\n",
    "naïve café e\u0301\u0302 \u0301alone",
    "東京 日本語、한국어",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "\u00a0no-break\u3000ideographic\u2028line",
    "a\0b\x1c\x7f",
    "a▁b ▁",
    "it's WE'LL I'D 1234567 3.14...!!\n\n$x_y",
    "<s> </s> <unk> <|eot_id|> [INST] <0x41>",
)
texts = st.one_of(
    st.sampled_from(HARD_TEXTS),
    st.text(max_size=40),
    st.lists(st.sampled_from([*HARD_TEXTS, " ", "  ", "é", "\n"]), max_size=5).map("".join),
)
# Loading is done once; Hypothesis need not reset fixtures that nothing changes.
quick = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp("tokenizers"), sentencepiece_model()
    files = {
        "sentencepiece": {"tokenizer.model": model},
        "no-prefix": {"tokenizer.model": sentencepiece_model(dummy_prefix=False)},
        "llama-2-json": {"tokenizer.json": llama_2_json(model)},
        "tiktoken": {"tokenizer.model": tiktoken_file()},
        "llama-3-json": {"tokenizer.json": llama_3_json()},
    }
    return {kind: write_folder(root / kind, file) for kind, file in files.items()}


@pytest.fixture(scope="module")
def tokenizers(folders) -> dict[str, Tokenizer]:
    loaded = {kind: load_tokenizer(folder, PLENTY) for kind, folder in folders.items()}
    return loaded | {"bytes": ByteTokenizer(256)}


# --- against the libraries ------------------------------------------------------------------------


@quick
@given(text=texts)
@pytest.mark.parametrize("kind", ("sentencepiece", "no-prefix"))
def test_sentencepiece_equals_its_library(kind, text, folders, tokenizers):
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor(model_file=str(folders[kind] / "tokenizer.model"))
    ids = tokenizers[kind].encode(text, bos=False)
    assert ids == library.encode(text)
    assert tokenizers[kind].encode(text) == [library.bos_id(), *ids]
    assert tokenizers[kind].decode(ids) == library.decode(ids)


def test_llama_tokenizers_equal_hugging_face(tmp_path, tokenizers):
    """Those of the model's file, and of the folder it saves. It takes special tokens and spaces
    in front otherwise than Meta does."""
    description = llama_2_json(sentencepiece_model())
    theirs = hugging_face_llama(description, legacy=True, add_bos_token=True)
    theirs.save_pretrained(tmp_path)
    saved = load_tokenizer(tmp_path, PLENTY)
    for text in HARD_TEXTS[:-1]:
        ids = theirs.encode(text)
        assert saved.encode(text) == ids
        assert saved.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        if text and not text.startswith(" "):
            assert tokenizers["sentencepiece"].encode(text) == ids
            assert tokenizers["llama-2-json"].encode(text) == ids


@quick
@given(text=texts)
def test_tokenizer_json_equals_the_sentencepiece_model_it_was_made_from(text, tokenizers):
    by_json, by_model = tokenizers["llama-2-json"], tokenizers["sentencepiece"]
    assert by_json.encode(text) == by_model.encode(text)
    assert by_json.decode(by_model.encode(text)) == by_model.decode(by_model.encode(text))


@quick
@given(text=texts)
def test_tiktoken_equals_hugging_face_conversion(text, tokenizers):
    """The oracle is Hugging Face's converter, with the split pattern that it knows for Llama 3."""
    tiktoken, converted = tokenizers["tiktoken"], tokenizers["llama-3-json"]
    assert tiktoken.encode(text) == converted.encode(text)
    assert tiktoken.decode(tiktoken.encode(text)) == text


def test_tiktoken_special_tokens_have_the_published_ids():
    special = llama_3_special_tokens(128_000)  # Meta's Llama 3 and 3.1 model cards
    assert len(special) == 256
    assert sorted(special.values()) == list(range(128_000, 128_256))
    published = "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 "
    published += "finetune_right_pad_id reserved_special_token_2 start_header_id end_header_id "
    published += "eom_id eot_id python_tag reserved_special_token_3"
    assert sorted(special, key=special.get)[:12] == [f"<|{name}|>" for name in published.split()]
    assert special["<|reserved_special_token_247|>"] == 128_255


# --- tokens that were added -----------------------------------------------------------------------

END, START, MARK = "<|im_end|>", "<|im_start|>", "<extra mark>"
TOKENS = {480: START, 481: END, 482: MARK, 483: "<extra", 484: "\n\n\n"}  # behind the model's 480
PLAIN = (MARK, "<extra", "\n\n\n")  # not special


def decoder(**more: object) -> dict:
    """As tokenizer_config.json has them; more: flags of START and MARK."""
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {
        str(id): {"content": text, **flags, "special": text not in PLAIN}
        | (more if text in (START, MARK) else {})
        for id, text in TOKENS.items()
    }


LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
BESIDE_MODEL = {  # files that add to a tokenizer.model
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": decoder()}},
    "flags": {"tokenizer_config.json": {"added_tokens_decoder": decoder(rstrip=True, lstrip=True)}},
    "words": {"tokenizer_config.json": {"added_tokens_decoder": decoder(single_word=True)}},
    "added_tokens.json": {
        "added_tokens.json": {text: id for id, text in TOKENS.items()},
        "tokenizer_config.json": {"pad_token": START},
        "special_tokens_map.json": {"eos_token": {"content": END}, "unk_token": "<unk>"},
    },
    "additional": {
        "added_tokens.json": {text: id for id, text in TOKENS.items()},
        "tokenizer_config.json": {"additional_special_tokens": [START, END]},
    },
    "legacy": {"tokenizer_config.json": {"added_tokens_decoder": decoder(), "legacy": True}},
    "no prefix": {
        "tokenizer_config.json": {"added_tokens_decoder": decoder(), "add_prefix_space": False}
    },
}
MARKED_TEXTS = (
    *HARD_TEXTS,
    f"{START}user\nHello there{END}\n{START}assistant\n",
    f"{START} two  spaces {END}  {MARK} more<extra{END}{END}",
    f"text {MARK}text{MARK} 東京{START}😀 \n\n\n\nend",
    f"x{MARK}y {START}z",
)


@pytest.mark.parametrize("case", BESIDE_MODEL)
def test_added_tokens_beside_a_sentencepiece_model_equal_hugging_face(case, tmp_path):
    from transformers import AutoTokenizer

    beside = {name: dict(value) for name, value in BESIDE_MODEL[case].items()}
    beside["tokenizer_config.json"] |= LLAMA
    folder = write_folder(tmp_path, {"tokenizer.model": sentencepiece_model(), **beside})
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, PLENTY)
    literal = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    assert ours.size == 485 and ours.special.keys() >= {START, END, "<s>"}
    assert ours.special.keys().isdisjoint(PLAIN)
    for text in MARKED_TEXTS:
        wanted = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_marked(text) == wanted, text
        assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)
        assert ours.encode(text) == literal.encode(text), text


def test_special_tokens_without_a_row_are_absent_and_others_refused(tmp_path):
    config = {"added_tokens_decoder": decoder()}
    files = {"tokenizer.model": sentencepiece_model(), "tokenizer_config.json": config}
    folder = write_folder(tmp_path, files)
    with pytest.raises(CheckpointError, match="but the model only 484"):
        load_tokenizer(folder, 484)
    config["added_tokens_decoder"] = {id: decoder()[id] for id in ("480", "481")}
    write_folder(tmp_path, files)
    tokenizer = load_tokenizer(folder, 481)
    assert (tokenizer.size, tokenizer.special.get(START)) == (481, 480)
    assert END not in tokenizer.special


BYTE_LEVEL = {  # tokenizer_config.json that adds to vocab.json and merges.txt
    "Qwen2Tokenizer": {"added_tokens_decoder": True},
    "Qwen2TokenizerFast": {"eos_token": END},
    "GPT2Tokenizer": {"bos_token": START, "add_bos_token": True},
    "GPT2TokenizerFast": {"add_prefix_space": True},
}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_vocabulary_and_its_merges_equal_hugging_face(name, tmp_path):
    from transformers import AutoTokenizer

    model = json.loads(llama_3_json())["model"]
    count, merges = len(model["vocab"]), model["merges"]
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    config = {"tokenizer_class": name, **BYTE_LEVEL[name]}
    added = {
        str(count + id - 480): token for id, token in zip(TOKENS, decoder().values(), strict=True)
    }
    files = {"vocab.json": model["vocab"], "merges.txt": "\n".join(["#version: 0.2", *lines, ""])}
    if config.get("added_tokens_decoder"):
        config["added_tokens_decoder"] = added
    else:
        files["added_tokens.json"] = {token["content"]: int(id) for id, token in added.items()}
    folder = write_folder(tmp_path, {**files, "tokenizer_config.json": config})
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, PLENTY)
    literal = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    for text in MARKED_TEXTS:
        wanted = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_marked(text) == wanted, text
        assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)
        assert ours.encode(text) == literal.encode(text), text


# tokenizer_config.json beside a tokenizer.json, whether this opens texts, and other files. The
# tokenizer.json has four added tokens, from 256 on.
NAMED_TOKENS = {"bos_token": "<|bos|>", "eos_token": END}
BESIDE_JSON = {
    "names": (NAMED_TOKENS, False, {}),
    "denied": ({**NAMED_TOKENS, "add_bos_token": False}, True, {}),
    "asked for": ({**NAMED_TOKENS, "add_bos_token": True}, False, {}),
    "no names": ({}, True, {}),
    "names in a map": ({}, False, {"special_tokens_map.json": {"eos_token": {"content": END}}}),
    "two words": ({"eos_token": START}, False, {"special_tokens_map.json": {"eos_token": END}}),
    "more tokens": ({}, False, {"added_tokens.json": {"<extra>": 260}}),
    "tokens by id": ({"added_tokens_decoder": {"260": {"content": "<extra>"}}}, False, {}),
    "flags": ({"added_tokens_decoder": {"257": {"content": START, "special": True,
                                                "lstrip": True, "rstrip": True}}}, False, {}),
    "new special": ({"eos_token": "<fresh>"}, False, {}),
    "more special": ({"additional_special_tokens": ["<fresh>"]}, False, {}),
    "names of a model": ({"extra_special_tokens": {"image_token": MARK}, **NAMED_TOKENS}, False,
                         {}),
    "ends of a model": (NAMED_TOKENS, False, {"generation_config.json": {"eos_token_id": 256}}),
}  # fmt: skip
NAMES_IN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    "|{{ pad_token }}|{{ image_token }}|{{ additional_special_tokens }}"
)


@pytest.mark.parametrize("special", (True, False))
@pytest.mark.parametrize("case", BESIDE_JSON)
def test_files_beside_a_tokenizer_json_say_what_they_say_to_hugging_face(case, special, tmp_path):
    """special: whether the tokenizer.json calls its added tokens so."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import AutoTokenizer

    config, opens, files = BESIDE_JSON[case]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    (made.add_special_tokens if special else made.add_tokens)([MARK, START, END, "<|bos|>"])
    if opens:
        template = processors.TemplateProcessing("<|bos|> $A", "$A $B:1", [("<|bos|>", 259)])
        made.post_processor = template
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    own = {"tokenizer.json": made.to_str(), "tokenizer_config.json": config}
    own["config.json"] = {"model_type": "llama"}
    folder = write_folder(tmp_path, {**own, **files, "chat_template.jinja": NAMES_IN_TEMPLATE})
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, PLENTY)
    for text in (*MARKED_TEXTS, "<extra> x <fresh> "):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_marked(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode("a") == theirs.encode("a")
    assert {theirs.eos_token_id} - {None} <= ours.eos_ids
    asked = [{"role": "user", "content": "hi"}]
    expected = theirs.apply_chat_template(asked, return_dict=False)
    assert chat_of(ours, "m").ask("hi")[0] == expected


# --- streaming ------------------------------------------------------------------------------------


@quick
@given(text=texts)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_adds_up_to_decode_and_never_splits_a_character(kind, text, tokenizers):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    incremental = TextStream(tokenizer)
    pieces = [incremental.push(id) for id in ids]
    assert "".join(pieces) + incremental.flush() == tokenizer.decode(ids)
    assert text.count("\ufffd") == "".join(pieces).count("\ufffd")


@quick
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_at_all_can_be_streamed(kind, data, tokenizers):
    """A model may sample anything: halves of characters, special tokens, ids with no piece."""
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 10), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    incremental = TextStream(tokenizer)
    whole = "".join(incremental.push(id) for id in ids) + incremental.flush()
    if kind == "llama-2-json":  # its library makes earlier bytes U+FFFD when a later byte is wrong
        return
    assert whole == tokenizer.decode(ids)
    before, after = TextStream(tokenizer), TextStream(tokenizer, after=ids[:cut])
    start = "".join(before.push(id) for id in ids[:cut])
    assert start + "".join(after.push(id) for id in ids[cut:]) + after.flush() == whole


def test_a_stream_waits_for_the_whole_character(tokenizers):
    tokenizer = tokenizers["tiktoken"]
    incremental = TextStream(tokenizer)
    emoji = tokenizer.encode("😀", bos=False)
    assert [incremental.push(id) for id in emoji] == ["", "", "", "😀"]
    assert incremental.push(emoji[0]) == ""
    assert incremental.flush() == "\ufffd"


# --- special tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", ("<s>", "</s>", "<unk>", "<|eot_id|>", "<|begin_of_text|>"))
def test_text_cannot_name_a_special_token(kind, piece, tokenizers):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(f"a{piece}b {piece}", bos=False)
    assert tokenizer.special.get(piece) not in ids
    assert tokenizer.decode(ids) == f"a{piece}b {piece}"


def test_only_special_tokens_have_a_name_and_they_leave_no_text(tokenizers):
    for tokenizer in tokenizers.values():
        assert not {"the", "▁the", "nothing at all"} & set(tokenizer.special)
    assert tokenizers["llama-2-json"].special.get("</s>") == 2
    for kind, piece in (("sentencepiece", "</s>"), ("tiktoken", "<|eot_id|>")):
        tokenizer = tokenizers[kind]
        ids = [*tokenizer.encode("the"), tokenizer.special[piece]]
        assert tokenizer.decode([*ids, *tokenizer.encode("e", bos=False)[-1:]]) == "thee"


def test_llama_3_ends_at_both_of_its_endings(tokenizers):
    base = len(tiktoken_ranks())
    for kind in ("tiktoken", "llama-3-json"):
        assert tokenizers[kind].bos_id == base
        assert tokenizers[kind].eos_ids == {base + 1, base + 9}
        assert tokenizers[kind].size == base + 256


NINE = {"config.json": {"eos_token_id": 9}}
GENERATION = GenerationConfig(eos_token_id=[9], do_sample=True, temperature=0.6, top_k=20)
EOS = (
    ({"generation_config.json": {"eos_token_id": 7}}, {2, 7}),
    ({"generation_config.json": {"eos_token_id": [7, 8]}}, {2, 7, 8}),
    (NINE, {2, 9}),
    ({"config.json": {"eos_token_id": None}}, {2}),
    (NINE | {"generation_config.json": {"eos_token_id": 7}}, {2, 7, 9}),
    ({"tokenizer_config.json": {"eos_token": "<unk>"}}, {0, 2}),
    ({"tokenizer_config.json": {"eos_token": {"content": "<unk>", "lstrip": False}}}, {0, 2}),
    ({"generation_config.json": json.loads(GENERATION.to_json_string(use_diff=False))}, {2, 9}),
    ({}, {2}),
)


@pytest.mark.parametrize("kind", ("sentencepiece", "llama-2-json"))
@pytest.mark.parametrize(("files", "expected"), EOS)
def test_all_of_a_folders_ends_are_taken(kind, files, expected, folders, tmp_path):
    source = next(folders[kind].glob("tokenizer.*"))
    folder = write_folder(tmp_path, {source.name: source.read_bytes(), **files})
    assert load_tokenizer(folder, PLENTY).eos_ids == expected


BOS = (
    ({}, 1),  # the template in the file
    ({"bos_token": "<s>", "add_bos_token": False}, 1),  # as in transformers the file decides
    ({"bos_token": "<unk>", "add_bos_token": True}, 1),
    ({"bos_token": None, "add_bos_token": True}, 1),
    ({"bos_token": "<unk>"}, 1),
)


@pytest.mark.parametrize("kind", ("sentencepiece", "tiktoken"))
def test_a_configuration_may_deny_the_beginning(kind, folders, tmp_path):
    source = next(folders[kind].glob("tokenizer.*"))
    config = {"add_bos_token": False, "bos_token": "<s>"}
    files = {source.name: source.read_bytes(), "tokenizer_config.json": config}
    assert load_tokenizer(write_folder(tmp_path, files), PLENTY).bos_id is None


@pytest.mark.parametrize(("config", "expected"), BOS)
def test_what_opens_a_text_is_the_configurations_word(config, expected, folders, tmp_path):
    description = (folders["llama-2-json"] / "tokenizer.json").read_bytes()
    files = {"tokenizer.json": description, "tokenizer_config.json": config}
    tokenizer = load_tokenizer(write_folder(tmp_path, files), PLENTY)
    assert tokenizer.bos_id == expected
    opening = "No token opens a text: add_bos_token is false"
    if expected is not None:
        opening = f"Each text starts with {['<unk>', '<s>'][expected]} (id {expected})"
    assert tokenizer.notes == (opening,)
    assert tokenizer.encode("the")[: -len(tokenizer.encode("the", bos=False))] == (
        [] if expected is None else [expected]
    )


# --- files ----------------------------------------------------------------------------------------


def test_the_path_of_a_file_means_its_folder(folders, tmp_path):
    model = (folders["sentencepiece"] / "tokenizer.model").read_bytes()
    folder = write_folder(tmp_path, {"tokenizer.model": model, "model.pth": b"weights"})
    assert load_tokenizer(folder / "model.pth", PLENTY).size == 480


def test_tokenizer_json_comes_before_the_others(folders, tmp_path):
    """It alone knows the tokens that were added to the sentencepiece model later. Those that the
    model has no row for are absent: CodeLlama's Python model has 32000 embeddings, and four infill
    marks past them."""
    model = (folders["sentencepiece"] / "tokenizer.model").read_bytes()
    description = llama_2_json(model)
    description["added_tokens"].append(
        description["added_tokens"][0] | {"id": 480, "content": "<x>"}
    )
    files = {"tokenizer.json": description, "tokenizer.model": model}
    folder = write_folder(tmp_path, files | {"original/tokenizer.model": tiktoken_file()})
    for rows, size, added in ((PLENTY, 481, 480), (481, 481, 480), (480, 480, None)):
        tokenizer = load_tokenizer(folder, rows)
        assert (tokenizer.size, tokenizer.special.get("<x>")) == (size, added)
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder, PLENTY).special.get("<x>") is None
    (folder / "tokenizer.model").unlink()
    assert load_tokenizer(folder, PLENTY).special.get("<|eot_id|>") is not None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytes"])
def test_more_ids_than_the_model_has_is_an_error(kind, folders, tokenizers):
    exact = tokenizers[kind].size
    assert load_tokenizer(folders[kind], exact).size == exact
    too_few = exact - 1
    if kind == "llama-3-json":  # its special tokens alone would only be absent
        too_few = len(tiktoken_ranks()) - 1
    with pytest.raises(CheckpointError, match=f"but the model only {too_few}"):
        load_tokenizer(folders[kind], too_few)


def test_a_missing_tokenizer_names_what_was_looked_for(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="tokenizer.json, tokenizer.model"):
            load_tokenizer(folder, PLENTY)


@pytest.mark.parametrize(
    ("files", "lacks"),
    (
        ({}, "its merges.txt is missing"),
        ({"merges.txt": "a b\n"}, "only those of GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer"),
        ({"vocab.json": {"a": "b"}, "merges.txt": "a b\n"}, "no object of texts and ids"),
    ),
)
def test_a_vocabulary_that_cannot_be_read_says_what_it_lacks(files, lacks, tmp_path):
    line = refusal(
        CheckpointError,
        load_tokenizer,
        write_folder(tmp_path, {"vocab.json": {"a": 0}, **files}),
        9,
    )
    assert lacks in line and line.endswith("download tokenizer.json")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 499723\n"
WORDPIECE = {
    "version": "1.0",
    "added_tokens": [],
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"}
    | {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9},
}
CORRUPT = (
    ("tokenizer.model", b"", "is empty"),
    ("tokenizer.model", POINTER, "Git LFS pointer"),
    ("tokenizer.model", b"\x80\x02 a pickle", "neither a sentencepiece model nor tiktoken"),
    ("tokenizer.model", b"\nno protobuf", "not a whole sentencepiece model"),
    ("tokenizer.model", sentencepiece_model()[:3000], "not a whole sentencepiece model"),
    ("tokenizer.model", b"IQ== 0\nIg== one\n", "line 2 is not a base64 string"),
    ("tokenizer.model", b"IQ== 0\nIg=== 1\n", "line 2 is not a base64 string"),
    ("tokenizer.model", b"IQ== 0\n\nIg== 1\n", "line 2 is not a base64 string"),
    ("tokenizer.model", b"IQ== 0\nIg== 1\n", "lacks ranks"),
    ("tokenizer.model", tiktoken_file().replace(b" 5\n", b" 6\n"), "lacks ranks"),
    ("tokenizer.json", b"{", "not a tokenizer.json"),
    ("tokenizer.json", b"\xff\xfe", "not a tokenizer.json"),
    ("tokenizer.json", b"[]", "not a tokenizer.json"),
    ("tokenizer.json", json.dumps(llama_2_json(sentencepiece_model()))[:999].encode(), "EOF"),
    ("tokenizer.json", json.dumps(WORDPIECE).encode(), "decodes by WordPiece"),
    *(("generation_config.json", content, "") for content in (b"{", b"\xff", b"[1]", b"")),
    ("tokenizer_config.json", b'{"eos_token": 5}', "eos_token"),
    ("tokenizer_config.json", b'{"bos_token": ["<s>"]}', "bos_token"),
    ("tokenizer_config.json", b'{"bos_token": {"content": 5}}', "bos_token"),
    ("tokenizer_config.json", b'{"add_bos_token": "true"}', "add_bos_token"),
    ("tokenizer_config.json", b'{"added_tokens_decoder": []}', "added_tokens_decoder"),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}', "'x'"),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": "a"}}', "takes Added"),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {}}}', "content"),
    ("added_tokens.json", b'{"a": true}', "True"),
    ("added_tokens.json", b'{"a": 1e999}', "inf"),
    ("special_tokens_map.json", b'{"bos_token": 5}', "bos_token"),
    *(
        ("generation_config.json", b'{"eos_token_id": %b}' % value, "eos_token_id")
        for value in (b'"</s>"', b"[true]", b'{"a": 1}')
    ),
)


@pytest.mark.parametrize(("name", "content", "message"), CORRUPT)
def test_a_corrupt_file_is_one_line(name, content, message, tmp_path, capfd):
    """Beside a good tokenizer.model, if it is not that itself."""
    folder = write_folder(tmp_path, {"tokenizer.model": sentencepiece_model(), name: content})
    line = refusal(CheckpointError, load_tokenizer, folder, PLENTY)
    assert message in line and name in line
    assert capfd.readouterr().err == ""


def _replace(pattern: dict) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": "xx"}


def _split(regex: str) -> dict:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


HOSTILE = (  # parts of a tokenizer.json; what is refused; whether at once or with the text
    ({"pre_tokenizer": _split("(x+x+)+y")}, "cannot encode this text: Onig: Regex", False),
    ({"model": {"unk_token": "<no>", "byte_fallback": False}}, "Unk token `<no>`", False),
    (
        {"normalizer": {"type": "Sequence", "normalizers": [_replace({"String": "x"})] * 34}},
        "its normalizer may lengthen a text 1.72e+10 times; accepted is up to 1000",
        True,
    ),
    (
        {"normalizer": {"type": "Sequence", "normalizers": [_replace({"Regex": "x*"})] * 34}},
        "its normalizer may lengthen a text",
        True,
    ),
    (
        {"decoder": {"type": "Sequence", "decoders": [_replace({"String": "x"})] * 34}},
        "its decoder may lengthen a text",
        True,
    ),
)


@pytest.mark.parametrize(("parts", "message", "at_once"), HOSTILE)
def test_what_the_library_cannot_encode_is_one_line(parts, message, at_once, tmp_path, capfd):
    described = llama_2_json(sentencepiece_model())
    model = {**described["model"], **parts.get("model", {})}
    files = {"tokenizer.json": {**described, **parts, "model": model}}
    folder = write_folder(tmp_path, files)
    if at_once:
        line = refusal(CheckpointError, load_tokenizer, folder, PLENTY)
    else:
        tokenizer = load_tokenizer(folder, PLENTY)
        line = refusal(CheckpointError, tokenizer.encode, "x" * 40 + "漢!")
    assert message in line and "tokenizer.json" in line
    assert capfd.readouterr().err == ""


# --- long and odd text ----------------------------------------------------------------------------

ELEMENTS = ("the", "\n\n", "  ", "!!\n", " x", "12345", "'s", "é", "\u3000", "\t", ".", " \n ")


@quick
@given(groups=st.lists(st.lists(st.sampled_from(ELEMENTS), max_size=5).map("".join), max_size=20))
def test_cut_text_encodes_as_the_whole(groups):
    """Every group ends in a place to cut, and no group is as long as a part may be."""
    from tiktoken import Encoding

    whole = Encoding(
        "t", pat_str=LLAMA_3_SPLIT, mergeable_ranks=tiktoken_ranks(), special_tokens={}
    )
    text = "".join(f"{group}z ok" for group in groups)
    parts = list(cuts(text, longest=40))
    assert "".join(parts) == text
    assert all(len(part) <= 40 for part in parts)
    by_part = [id for part in parts for id in whole.encode_ordinary(part)]
    assert by_part == whole.encode_ordinary(text)


@pytest.mark.parametrize("unit", (" ", "^", "a", "\n", " \n", "日"))
def test_tiktoken_survives_a_million_of_anything(unit, tokenizers, capfd):
    text = unit * 1_000_000
    tokenizer = tokenizers["tiktoken"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", KINDS)
def test_undecodable_bytes_of_a_command_line_become_replacement_characters(kind, tokenizers):
    tokenizer = tokenizers[kind]
    text = os.fsdecode(b"a\xffb")
    assert tokenizer.decode(tokenizer.encode(text)) == "a\ufffdb"


def test_bytes_stand_in_for_a_tokenizer():
    tokenizer = ByteTokenizer(32_000)
    assert tokenizer.encode("aé") == [0x61, 0xC3, 0xA9]
    assert tokenizer.decode([0x61, 0xC3 + 256, 0xA9 + 512]) == "aé"
    assert tokenizer.bos_id is None
    assert tokenizer.eos_ids == frozenset()
    small = ByteTokenizer(100)
    assert small.encode("ab") == [97, 98]
    assert small.encode("z") == [122 - 100]
    assert small.size == 100


# --- start-up and noise ---------------------------------------------------------------------------


def test_importing_it_imports_none_of_the_libraries():
    code = (
        "import sys, quantbench.models.tokenizer, quantbench.models.chat;"
        "print({'torch', 'tiktoken', 'tokenizers', 'sentencepiece'} & set(sys.modules))"
    )
    assert python("-c", code, check=True).stdout == "set()\n"


def test_a_fork_after_encoding_prints_no_warning(folders, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    code = (
        "import os, pathlib; from quantbench.models.tokenizer import load_tokenizer\n"
        f"t = load_tokenizer(pathlib.Path({str(folders['llama-3-json'])!r}), 1 << 20)\n"
        "t._model.encode_batch(['the'] * 100)\n"
        "child = os.fork()\n"
        "t.encode('the'); t._model.encode_batch(['the'] * 100)\n"
        "child and os.waitpid(child, 0)"
    )
    assert python("-c", code, check=True).stderr == ""
