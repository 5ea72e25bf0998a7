"""Chat templates as data: the markers around a message that an instruct model was trained on.

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

import re
from dataclasses import dataclass

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
