"""Chat templates as data: what instruct models were trained to see around a message.

    template = template_for(tokenizer, "Llama-2-7b-chat-hf")      # None for a base model
    ids = template.encode_turn(tokenizer, "Hello", first=True, system="Be brief.")
    ...generate until one of template.stop_ids(tokenizer)...
    ids = template.encode_turn(tokenizer, "And then?", first=False)

A turn's ids are appended to what the cache already holds, so several turns cost no more than their
own length. The convention: the cache holds an answer up to, but without, the id that ended it.
Every later turn starts by closing the answer before it, whether the model had closed it or the
answer was cut at a limit, so both leave the same cache.

Markers that are special tokens are written by id, and a message can never contain one. Llama 2's
and the first Mistral's [INST] are ordinary text; there a message that says "[INST]" is believed.
"""

import re
from dataclasses import dataclass

from models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Special:
    """A part of a template that is one special token, by its name."""

    piece: str


# Text with {user} and {system} to fill in; parts beside each other are encoded one by one.
Part = str | Special


@dataclass(frozen=True)
class Template:
    """One family's format. Each field lists the parts in order."""

    name: str
    first: tuple[Part, ...]
    first_with_system: tuple[Part, ...]
    close: tuple[Special, ...]  # ends an answer
    later: tuple[Part, ...]  # a turn that is not the first, after `close`
    models: str  # a pattern in the names of the models trained on it

    def encode_turn(
        self, tokenizer: Tokenizer, user: str, first: bool, system: str | None = None
    ) -> list[int]:
        """The ids to append so that the model answers `user`.

        The first turn opens the sequence and says `system`, if given; a later one closes the
        answer before it, and passes over `system`. Blanks around a message are dropped.
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
        """The ids that end an answer: the template's own and all that end a text."""
        return tokenizer.eos_ids.union(_special_id(tokenizer, part) for part in self.close)

    def fits(self, tokenizer: Tokenizer, model_name: str) -> bool:
        """Whether the tokenizer has every marker and the name is that of a model trained on it."""
        parts = self.first + self.first_with_system + self.close + self.later
        special = [part.piece for part in parts if isinstance(part, Special)]
        has_markers = all(tokenizer.token_id(piece) is not None for piece in special)
        return has_markers and re.search(self.models, model_name, re.IGNORECASE) is not None


def template_for(tokenizer: Tokenizer, model_name: str) -> Template | None:
    """The template that the model `model_name` was trained on; None if it is a base model.

    Base models share their tokenizer with the instruct ones, so the name has to tell them apart;
    the markers in the tokenizer then tell the families apart.
    """
    return next((one for one in TEMPLATES if one.fits(tokenizer, model_name)), None)


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

# Llama 2 opens every exchange anew, and hides the system message in the first user message.
LLAMA_2 = Template(
    name="llama-2",
    first=(BOS, "[INST] {user} [/INST]"),
    first_with_system=(BOS, "[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{user} [/INST]"),
    close=(EOS,),
    later=(BOS, "[INST] {user} [/INST]"),
    # TinyLlama's chat model and CodeLlama 70B have formats of their own.
    models=r"llama[-_ ]?2(?!\d).*chat|codellama-(7|13|34)b-instruct",
)

# Llama 3 and later. Hugging Face's template for 3.1 adds today's date to the system message; ours
# does not, so that a run can be repeated tomorrow.
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

# Mistral opens once. Its system message is a paragraph before the first user message.
MISTRAL_1 = Template(
    name="mistral-v1",
    first=(BOS, "[INST] {user} [/INST]"),
    first_with_system=(BOS, "[INST] {system}\n\n{user} [/INST]"),
    close=(EOS,),
    later=("[INST] {user} [/INST]",),
    models=r"mi[sx]tral.*instruct",
)

# From v0.3 on the markers are special tokens.
MISTRAL_3 = Template(
    name="mistral-v3",
    first=(BOS, INST, "{user}", END_INST),
    first_with_system=(BOS, INST, "{system}\n\n{user}", END_INST),
    close=(EOS,),
    later=(INST, "{user}", END_INST),
    models=r"instruct",
)

TEMPLATES = (LLAMA_3, MISTRAL_3, MISTRAL_1, LLAMA_2)
