"""Chat templates: the markers around a message that an instruct model was trained on.

    chat = chat_of(tokenizer, "Llama-2-7b-chat-hf")  # the checkpoint's own template, in Jinja,
    ids, start = chat.ask("Hello")                   # or where it brings none, one of this file
    ...generate from these ids, at position `start`, until one of chat.stop_ids...
    chat.answered(ids_of_the_answer)

    template = template_for(tokenizer, "Llama-2-7b-chat-hf")      # None for a base model
    ids = template.encode_turn(tokenizer, "Hello", first=True, system="Be brief.")
    ...generate until one of template.stop_ids(tokenizer)...
    ids = template.encode_turn(tokenizer, "And then?", first=False)

A turn's ids are appended to what the cache already holds, so a turn costs only its own length. By
convention the cache holds an answer without the id that ended it. Every later turn begins with that
id. So the cache is the same whether the model ended its answer or a limit cut it off.

Markers that are special tokens are written by id, and no message can contain one. Llama 2's and the
first Mistral's [INST] is ordinary text: a message that contains "[INST]" imitates the marker.
"""

import json
import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from quantbench.errors import CheckpointError, UsageError
from quantbench.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Special:
    """A part of a template that is one special token."""

    piece: str  # its name, such as "<|eot_id|>"


# A part of a template: text with {user} and {system} to fill in, or a special token. Each part is
# encoded separately.
Part = str | Special


@dataclass(frozen=True)
class Template:
    """The chat format of one family of models, as parts in their order."""

    name: str
    first: tuple[Part, ...]  # the first turn, without a system message
    first_with_system: tuple[Part, ...]  # the first turn, with one
    close: tuple[Special, ...]  # the end of an answer
    later: tuple[Part, ...]  # every other turn, after `close`
    models: str  # regular expression that matches the names of the models trained on this format

    def encode_turn(
        self, tokenizer: Tokenizer, user: str, first: bool, system: str | None = None
    ) -> list[int]:
        """The ids to append so that the model answers `user`.

        The first turn begins the sequence, with the system message if one is given. A later turn
        ends the previous answer and ignores `system`. Whitespace around a message is dropped.
        """
        if not first:
            parts = self.close + self.later
        elif system is None:
            parts = self.first
        else:
            parts = self.first_with_system
        values = {"user": user.strip(), "system": (system or "").strip()}
        return [id for part in parts for id in _encode(tokenizer, part, values)]

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The ids that end an answer: those of `close`, and all of the tokenizer's eos_ids."""
        return tokenizer.eos_ids.union(_special_id(tokenizer, part) for part in self.close)

    def fits(self, tokenizer: Tokenizer, model_name: str) -> bool:
        """Whether the tokenizer has every marker and `models` matches the model's name."""
        parts = self.first + self.first_with_system + self.close + self.later
        special = [part.piece for part in parts if isinstance(part, Special)]
        has_markers = all(tokenizer.token_id(piece) is not None for piece in special)
        return has_markers and re.search(self.models, model_name, re.IGNORECASE) is not None


class Chat(ABC):
    """A conversation: which ids a line of the user adds to what the KV cache holds."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids  # the ids that end an answer
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.turns: list[tuple[str, list[int]]] = []  # lines with the ids of their answers
        self._cached: list[int] = []
        self._asked: tuple[str, list[int]] = ("", [])

    def ask(self, line: str) -> tuple[list[int], int]:
        """The ids to read for this line, and the position of the first of them in the caches.

        What the caches hold of the conversation is not read again. Raises UsageError for a line
        that cannot be asked.
        """
        ids = self._conversation(line)
        same = 0
        while same < min(len(ids) - 1, len(self._cached)) and ids[same] == self._cached[same]:
            same += 1
        self._asked = line, ids
        return ids[same:], same

    def answered(self, ids: list[int]) -> None:
        """Note the answer to what was asked, without the id that ended it."""
        line, asked = self._asked
        self.turns.append((line, ids))
        self._cached = asked + ids[:-1]  # the last id may have been generated and not read

    @abstractmethod
    def _conversation(self, line: str) -> list[int]:
        """The ids of the whole conversation, ending where the answer to `line` begins."""


class CheckpointChat(Chat):
    """A conversation by the checkpoint's own template, as transformers renders it.

    A template may rewrite earlier turns, for example to drop their reasoning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises CheckpointError for a template that is not valid Jinja."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise UsageError(f"the chat template refuses this conversation: {message}")

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        environment.globals.update(raise_exception=refuse, strftime_now=time.strftime)
        try:
            self._template = environment.from_string(tokenizer.chat_template or "")
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat template is not valid: {error}") from None
        self._error = jinja2.TemplateError
        self._special = {tokenizer.token_id(piece): piece for piece in tokenizer.special_pieces()}
        super().__init__(tokenizer, tokenizer.eos_ids)
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "~"}]
        after = tokenizer.encode_marked(self._render(messages, asks=False).rpartition("~")[2])
        ends = [id for id in after if id in self._special][:1]  # the marker that ends an answer
        self.stop_ids = tokenizer.eos_ids.union(ends)

    def _conversation(self, line: str) -> list[int]:
        if marker := next((piece for piece in self._special.values() if piece in line), None):
            raise UsageError(f"{marker} is a special token of this model: leave it out")
        messages = []
        for asked, answer in [*self.turns, (line, None)]:
            messages.append({"role": "user", "content": asked})
            if answer is not None:
                content = self.tokenizer.decode(answer)
                messages.append({"role": "assistant", "content": content})
        return self.tokenizer.encode_marked(self._render(messages, asks=True))

    def _render(self, messages: list[dict[str, str]], asks: bool) -> str:
        ends = (self._special[id] for id in self.tokenizer.eos_ids if id in self._special)
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=asks,
                bos_token=self._special.get(self.tokenizer.bos_id, ""),
                eos_token=next(ends, ""),
            )
        except self._error as error:
            raise UsageError(f"the checkpoint's chat template fails: {error}") from None


class MarkerChat(Chat):
    """A conversation by a template of this file or, without one, a text that is continued."""

    def __init__(self, tokenizer: Tokenizer, template: "Template | None") -> None:
        self.template = template
        super().__init__(tokenizer, template.stop_ids(tokenizer) if template else tokenizer.eos_ids)

    def _conversation(self, line: str) -> list[int]:
        ids: list[int] = []
        for asked, answer in [*self.turns, (line, [])]:
            if self.template:
                ids += self.template.encode_turn(self.tokenizer, asked, first=not ids)
            else:
                ids += self.tokenizer.encode(asked, bos=not ids)
            ids += answer
        return ids


def chat_of(tokenizer: Tokenizer, model_name: str) -> Chat:
    """A conversation by the checkpoint's template, else by the one that its name tells, else none.

    Raises CheckpointError for a checkpoint whose template is not valid.
    """
    if tokenizer.chat_template:
        return CheckpointChat(tokenizer)
    return MarkerChat(tokenizer, template_for(tokenizer, model_name))


def template_for(tokenizer: Tokenizer, model_name: str) -> Template | None:
    """The template that the model `model_name` was trained on; None if it is a base model.

    Base models and instruct models share a tokenizer, so only the name distinguishes them. The
    markers in the tokenizer distinguish the families.
    """
    return next((t for t in TEMPLATES if t.fits(tokenizer, model_name)), None)


def _encode(tokenizer: Tokenizer, part: Part, values: dict[str, str]) -> list[int]:
    match part:
        case Special():
            return [_special_id(tokenizer, part)]
        case str():
            return tokenizer.encode(part.format(**values), bos=False)


def _special_id(tokenizer: Tokenizer, part: Special) -> int:
    id = tokenizer.token_id(part.piece)
    assert id is not None, f"{part.piece} is not in this tokenizer; use template_for"
    return id


BOS, EOS = Special("<s>"), Special("</s>")
INST, END_INST = Special("[INST]"), Special("[/INST]")
BEGIN = Special("<|begin_of_text|>")
HEADER, END_HEADER = Special("<|start_header_id|>"), Special("<|end_header_id|>")
END_OF_TURN = Special("<|eot_id|>")

# Llama 2 begins a new sequence with every turn. Its system message is part of the first message.
LLAMA_2 = Template(
    name="llama-2",
    first=(BOS, "[INST] {user} [/INST]"),
    first_with_system=(BOS, "[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{user} [/INST]"),
    close=(EOS,),
    later=(BOS, "[INST] {user} [/INST]"),
    # TinyLlama's chat model and CodeLlama 70B have formats of their own.
    models=r"llama[-_ ]?2(?!\d).*chat|codellama-(7|13|34)b-instruct",
)

# Llama 3 and later. Hugging Face's template for 3.1 adds today's date to the system message. Here
# it is left out, so that a run gives the same on another day.
_USER_3 = (HEADER, "user", END_HEADER, "\n\n{user}", END_OF_TURN)
_ANSWER_3 = (HEADER, "assistant", END_HEADER, "\n\n")
_SYSTEM_3 = (HEADER, "system", END_HEADER, "\n\n{system}", END_OF_TURN)
LLAMA_3 = Template(
    name="llama-3",
    first=(BEGIN, *_USER_3, *_ANSWER_3),
    first_with_system=(BEGIN, *_SYSTEM_3, *_USER_3, *_ANSWER_3),
    close=(END_OF_TURN,),
    later=(*_USER_3, *_ANSWER_3),
    models=r"instruct|chat",
)

# Mistral begins one sequence. Its system message is a paragraph before the first user message.
MISTRAL_1 = Template(
    name="mistral-v1",
    first=(BOS, "[INST] {user} [/INST]"),
    first_with_system=(BOS, "[INST] {system}\n\n{user} [/INST]"),
    close=(EOS,),
    later=("[INST] {user} [/INST]",),
    models=r"mi[sx]tral.*instruct",
)

# Mistral v0.3 and later: the markers are special tokens.
MISTRAL_3 = Template(
    name="mistral-v3",
    first=(BOS, INST, "{user}", END_INST),
    first_with_system=(BOS, INST, "{system}\n\n{user}", END_INST),
    close=(EOS,),
    later=(INST, "{user}", END_INST),
    models=r"instruct",
)

TEMPLATES = (LLAMA_3, MISTRAL_3, MISTRAL_1, LLAMA_2)
