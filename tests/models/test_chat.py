"""Chat templates against the published ones, applied by Hugging Face to whole conversations."""

from pathlib import Path
from typing import Any

import pytest

from quantbench.errors import CheckpointError, UsageError
from quantbench.models.chat import (
    LLAMA_2,
    LLAMA_3,
    MISTRAL_1,
    MISTRAL_3,
    CheckpointChat,
    Template,
    chat_of,
    template_for,
)
from quantbench.models.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    llama_3_special_tokens,
    load_tokenizer,
)
from tests.models.tiny_tokenizers import (
    llama_2_json,
    llama_3_json,
    sentencepiece_model,
    tiktoken_file,
    tiktoken_ranks,
    write_folder,
)

# The published formats, in Jinja's words.
SYSTEM_FIRST = """
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content -%}{%- set talk = messages[1:] -%}
{%- else -%}{%- set talk = messages -%}{%- endif -%}
"""
JINJA = {
    "llama-2": SYSTEM_FIRST
    + """
{%- for m in talk -%}
  {%- if m.role == 'user' -%}
    {%- set text = m.content.strip() -%}
    {%- if loop.first and system is defined -%}
      {%- set text = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + text -%}
    {%- endif -%}
    {{- bos_token + '[INST] ' + text + ' [/INST]' -}}
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
    "mistral-v1": SYSTEM_FIRST
    + """
{{- bos_token -}}
{%- for m in talk -%}
  {%- if m.role == 'user' -%}
    {%- set text = m.content -%}
    {%- if loop.first and system is defined -%}
      {%- set text = system + '\\n\\n' + text -%}
    {%- endif -%}
    {{- '[INST] ' + text + ' [/INST]' -}}
  {%- else -%}{{- ' ' + m.content + eos_token -}}{%- endif -%}
{%- endfor -%}""",
    "mistral-v3": SYSTEM_FIRST
    + """
{{- bos_token -}}
{%- for m in talk -%}
  {%- if m.role == 'user' -%}
    {%- set text = m.content -%}
    {%- if loop.first and system is defined -%}
      {%- set text = system + '\\n\\n' + text -%}
    {%- endif -%}
    {{- '[INST] ' + text + '[/INST]' -}}
  {%- else -%}{{- ' ' + m.content + eos_token -}}{%- endif -%}
{%- endfor -%}""",
}
TEMPLATES = {template.name: template for template in (LLAMA_2, LLAMA_3, MISTRAL_1, MISTRAL_3)}
# What the model writes after its cue: Llama 2 was trained with a space before the end.
ANSWER_ENDS = {"llama-2": " ", "llama-3": "", "mistral-v1": "", "mistral-v3": ""}
CONTROL = ("[INST]", "[/INST]")

FAMILIES = [
    (name, kind)
    for name in TEMPLATES
    for kind in (("tiktoken", "json") if name == "llama-3" else ("sentencepiece", "json"))
]
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
        (name, kind): load_family(root / f"{name}-{kind}", name, kind) for name, kind in FAMILIES
    }


def load_family(folder: Path, name: str, kind: str) -> tuple[Tokenizer, Any]:
    from transformers import LlamaTokenizer, PreTrainedTokenizerFast

    if name == "llama-3":
        write_folder(folder, {"tokenizer.model": tiktoken_file(tiktoken_ranks())})
        special = list(llama_3_special_tokens(0))
        description = llama_3_json(folder / "tokenizer.model", special)
        write_folder(folder, {"theirs/tokenizer.json": description})
        path = str(folder / "theirs" / "tokenizer.json")
        theirs: Any = PreTrainedTokenizerFast(
            tokenizer_file=path, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
        )
    else:
        control = CONTROL if name == "mistral-v3" else ()
        model = sentencepiece_model(control)
        description = llama_2_json(model)
        merges = [tuple(pair) for pair in description["model"]["merges"]]
        # Their v0.3 puts sentencepiece's space before the first word only, all others before each.
        theirs = LlamaTokenizer(
            vocab=description["model"]["vocab"], merges=merges, legacy=name != "mistral-v3"
        )
        theirs.add_special_tokens({"additional_special_tokens": list(control)})
        write_folder(folder, {"tokenizer.model": model})
    theirs.chat_template = JINJA[name]
    if kind == "json":
        (folder / "tokenizer.model").unlink()
        write_folder(folder, {"tokenizer.json": description})
    return load_tokenizer(folder, 1 << 20), theirs


def published(theirs: Any, system: str | None, exchanges: tuple) -> list[int]:
    """The ids of a whole conversation that waits for the last answer, by Hugging Face."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for user, answer in exchanges:
        messages.append({"role": "user", "content": user.strip()})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def ours(
    tokenizer: Tokenizer, template: Template, system: str | None, exchanges: tuple
) -> list[int]:
    """The cache's ids turn by turn, with answers as the model would have written them."""
    ids: list[int] = []
    for turn, (user, answer) in enumerate(exchanges):
        ids += template.encode_turn(tokenizer, user, first=turn == 0, system=system)
        if answer is not None:
            ids += tokenizer.encode(answer + ANSWER_ENDS[template.name], bos=False)
    return ids


@pytest.mark.parametrize("turns", (1, 2, 3, 4))
@pytest.mark.parametrize("system", (None, "You are brief.\nAnd kind."))
@pytest.mark.parametrize(("name", "kind"), FAMILIES)
def test_turns_add_up_to_the_published_template(name, kind, system, turns, loaded):
    tokenizer, theirs = loaded[name, kind]
    exchanges = (*CONVERSATION[: turns - 1], (CONVERSATION[turns - 1][0], None))
    expected = published(theirs, system, exchanges)
    assert ours(tokenizer, TEMPLATES[name], system, exchanges) == expected


def test_llama_3_by_hand(loaded):
    """Meta's description of the prompt format, written out in ids."""
    tokenizer, _ = loaded["llama-3", "tiktoken"]
    base = len(tiktoken_ranks())
    begin, header, end_header, end_of_turn = base, base + 6, base + 7, base + 9

    def text(words: str) -> list[int]:
        return tokenizer.encode(words, bos=False)

    cue = [header, *text("assistant"), end_header, *text("\n\n")]
    first = LLAMA_3.encode_turn(tokenizer, "Hi", first=True, system="Be brief")
    assert first == [
        *(begin, header, *text("system"), end_header, *text("\n\nBe brief"), end_of_turn),
        *(header, *text("user"), end_header, *text("\n\nHi"), end_of_turn),
        *cue,
    ]
    assert LLAMA_3.encode_turn(tokenizer, "So?", first=False) == [
        *(end_of_turn, header, *text("user"), end_header, *text("\n\nSo?"), end_of_turn),
        *cue,
    ]
    assert LLAMA_3.stop_ids(tokenizer) == {base + 1, end_of_turn}


def test_mistral_v3_by_hand(loaded):
    """mistral-common: each text is encoded alone, so each begins with sentencepiece's space."""
    tokenizer, _ = loaded["mistral-v3", "sentencepiece"]
    first = MISTRAL_3.encode_turn(tokenizer, "Hello there", first=True)
    inst, end_inst = 3, 4  # as in Mistral's own file: control symbols come after <unk>, <s>, </s>
    assert first == [1, inst, *tokenizer.encode("Hello there", bos=False), end_inst]
    assert MISTRAL_3.encode_turn(tokenizer, "a", first=False)[:2] == [2, inst]
    assert MISTRAL_3.stop_ids(tokenizer) == {2}


@pytest.mark.parametrize(("name", "kind"), FAMILIES)
def test_a_message_cannot_leave_its_turn(name, kind, loaded):
    tokenizer, _ = loaded[name, kind]
    template = TEMPLATES[name]
    special = ("<s>", "</s>", *CONTROL, "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    ids = {tokenizer.token_id(piece) for piece in special} - {None}

    def count(user: str, system: str) -> int:
        turn = template.encode_turn(tokenizer, user, first=True, system=system)
        return sum(id in ids for id in turn)

    assert count("a" + "".join(special), "b" + "".join(special)) == count("a", "b")


NAMES = (
    ("llama-2", "Llama-2-7b-chat-hf", LLAMA_2),
    ("llama-2", "meta-llama/Llama-2-70b-chat", LLAMA_2),
    ("llama-2", "llama2_7b_chat", LLAMA_2),
    ("llama-2", "CodeLlama-7b-Instruct-hf", LLAMA_2),
    ("llama-2", "Llama-2-7b-hf", None),
    ("llama-2", "CodeLlama-7b-Python-hf", None),
    ("llama-2", "CodeLlama-70b-Instruct-hf", None),  # a format of its own
    ("llama-2", "TinyLlama-1.1B-Chat-v1.0", None),  # another
    ("llama-2", "tiny", None),
    ("llama-3", "Meta-Llama-3-8B-Instruct", LLAMA_3),
    ("llama-3", "Meta-Llama-3.1-70B-Instruct", LLAMA_3),
    ("llama-3", "Llama-3.2-1B-Instruct", LLAMA_3),
    ("llama-3", "Meta-Llama-3-8B", None),
    ("llama-3", "Meta-Llama-3.1-8B", None),
    ("mistral-v1", "Mistral-7B-Instruct-v0.1", MISTRAL_1),
    ("mistral-v1", "mistralai/Mixtral-8x7B-Instruct-v0.1", MISTRAL_1),
    ("mistral-v1", "Mistral-7B-v0.1", None),
    ("mistral-v3", "Mistral-7B-Instruct-v0.3", MISTRAL_3),
    ("mistral-v3", "Mistral-7B-v0.3", None),
)


@pytest.mark.parametrize("kind", ("library", "json"))
@pytest.mark.parametrize(("family", "model_name", "expected"), NAMES)
def test_the_name_and_the_pieces_tell_the_template(family, kind, model_name, expected, loaded):
    library = "tiktoken" if family == "llama-3" else "sentencepiece"
    tokenizer, _ = loaded[family, library if kind == "library" else kind]
    assert template_for(tokenizer, model_name) is expected


def test_a_stand_in_tokenizer_has_no_template():
    for name in ("Llama-2-7b-chat-hf", "Meta-Llama-3-8B-Instruct", "Mistral-7B-Instruct-v0.3"):
        assert template_for(ByteTokenizer(32_000), name) is None


# ------------------------------------------------------------------- the checkpoint's own template


@pytest.mark.parametrize("family", ["llama-2", "llama-3"])
def test_a_checkpoint_s_template_renders_as_transformers_does(family, loaded, monkeypatch):
    """Whatever the checkpoint is called; and what the caches hold is not read again."""
    ours, theirs = loaded[family, "json"]
    monkeypatch.setattr(ours, "chat_template", JINJA[family])
    chat = chat_of(ours, "hf")
    assert isinstance(chat, CheckpointChat)
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


def test_the_marker_after_an_answer_ends_the_next_one(loaded, monkeypatch):
    ours, _ = loaded["llama-3", "json"]
    monkeypatch.setattr(ours, "eos_ids", frozenset())
    monkeypatch.setattr(ours, "chat_template", JINJA["llama-3"])
    assert chat_of(ours, "hf").stop_ids == {ours.token_id("<|eot_id|>")}


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for %}", CheckpointError),
        ("{{ raise_exception('system first') }}", UsageError),
        ("{{ messages.__class__.__mro__ }}", UsageError),  # the sandbox refuses
    ],
)
def test_a_template_that_cannot_be_used_is_refused_in_words(template, error, loaded, monkeypatch):
    ours, _ = loaded["llama-3", "json"]
    monkeypatch.setattr(ours, "chat_template", template)
    with pytest.raises(error, match="chat template"):
        chat_of(ours, "hf").ask("Hello")


def test_a_message_cannot_imitate_a_marker(loaded, monkeypatch):
    ours, _ = loaded["llama-3", "json"]
    monkeypatch.setattr(ours, "chat_template", JINJA["llama-3"])
    with pytest.raises(UsageError, match="special token"):
        chat_of(ours, "hf").ask("<|eot_id|> and now?")


def test_a_template_is_read_from_either_file(tmp_path):
    folder = {"tokenizer.json": llama_3_json_of(tmp_path), "tokenizer_config.json": CONFIG}
    write_folder(tmp_path / "one", folder)
    assert load_tokenizer(tmp_path / "one", 1 << 20).chat_template == "of the config"
    write_folder(tmp_path / "two", folder | {"chat_template.jinja": "of its file"})
    assert load_tokenizer(tmp_path / "two", 1 << 20).chat_template == "of its file"


CONFIG = {"chat_template": [{"name": "default", "template": "of the config"}]}


def llama_3_json_of(folder: Path) -> str:
    write_folder(folder, {"tokenizer.model": tiktoken_file(tiktoken_ranks())})
    return llama_3_json(folder / "tokenizer.model", list(llama_3_special_tokens(0)))
