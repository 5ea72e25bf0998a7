"""Chat: which ids a line of the user adds to what the KV cache holds, by a model's chat template.

    chat = chat_of(tokenizer, "Llama-2-7b-chat-hf")  # the checkpoint's template, else one of these
    ids, start = chat.ask("Hello")
    ...generate from these ids, at position `start`, until one of chat.stop_ids...
    chat.answered(ids_of_the_answer)

The whole conversation is rendered for every line. The ids that it shares with the KV cache, counted
from the first, are not read again, so a turn costs little more than its own length.

A message cannot contain a special token. Llama 2's and the first Mistral's [INST] is ordinary text:
a message that contains "[INST]" imitates the marker.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from quantbench.errors import CheckpointError, UsageError
from quantbench.models.tokenizer import Tokenizer, well_formed
from quantbench.text import one_line

SECONDS = 10  # that a template may take
MOST_OF_REASON = 200  # characters of what a template raised
# The texts that quality is measured on have to be the same on another day.
FIXED_DATE = datetime(2026, 1, 1)


@dataclass(frozen=True)
class ChatTemplate:
    """The chat format of a family of models, for checkpoints that bring none."""

    jinja: str
    markers: tuple[str, ...]  # special tokens that the tokenizer must have
    models: str  # regular expression that matches the names of the models trained on this format


# Base models and instruct models share a tokenizer, so only the name distinguishes them; the
# markers in the tokenizer distinguish the families.
TEMPLATES = {
    # Hugging Face's template for 3.1 adds today's date to a system message. Here it is left out, so
    # that a run gives the same on another day.
    "llama-3": ChatTemplate(
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{{ (m.content | trim) + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        r"instruct|chat",
    ),
    "mistral-v3": ChatTemplate(  # the markers are special tokens
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST]' + (m.content | trim) + '[/INST]' }}"
        "{% else %}{{ (m.content | trim) + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        r"instruct",
    ),
    "mistral-v1": ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (m.content | trim) + ' [/INST]' }}"
        "{% else %}{{ ' ' + (m.content | trim) + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>"),
        r"mi[sx]tral.*instruct",
    ),
    "llama-2": ChatTemplate(  # every turn opens a new sequence
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (m.content | trim) + ' [/INST]' }}"
        "{% else %}{{ ' ' + (m.content | trim) + ' ' + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>"),
        # TinyLlama's chat model and CodeLlama 70B have other formats.
        r"llama[-_ ]?2(?!\d).*chat|codellama-(7|13|34)b-instruct",
    ),
}


class Chat:
    """A conversation without a template: a text that is continued."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tokenizer.eos_ids  # the ids that end an answer
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.turns: list[tuple[str, list[int]]] = []  # lines with the ids of their answers
        self._cached: list[int] = []
        self._asked: tuple[str, list[int]] = ("", [])

    def ask(
        self, line: str, keep: Callable[[int, int], int] = lambda count, read: count
    ) -> tuple[list[int], int]:
        """The ids to read for this line, and the position of the first of them in the caches.

        What the caches hold of the conversation is not read again, so far as they can `keep` it:
        of a number of positions, and of those that were read, how many. Raises UsageError for a
        line that cannot be asked.
        """
        ids = self._conversation(line)
        same = 0
        while same < min(len(ids) - 1, len(self._cached)) and ids[same] == self._cached[same]:
            same += 1
        self._asked, same = (line, ids), keep(same, len(self._cached) + 1)
        return ids[same:], same

    def answered(self, ids: list[int]) -> None:
        """Add the answer to the last line, without the id that ended it."""
        line, question_ids = self._asked
        self.turns.append((line, ids))
        self._cached = question_ids + ids[:-1]  # the last id may have been generated and not read

    def _conversation(self, line: str) -> list[int]:
        """The ids of the whole conversation, up to the answer to `line`."""
        ids: list[int] = []
        for question, answer in [*self.turns, (line, [])]:
            ids += self.tokenizer.encode(question, bos=not ids) + answer
        return ids


class TemplateChat(Chat):
    """A conversation by a template, as transformers renders it.

    A template may rewrite earlier turns, for example to drop their reasoning.
    """

    def __init__(
        self, tokenizer: Tokenizer, jinja: str, splits: bool = False, now: datetime | None = None
    ) -> None:
        """splits: whether what stands between special tokens is encoded part by part, and not by
        the tokenizer's own rules. now: the date that a template may write; a fixed one if not
        given. Raises CheckpointError for a template that is not valid."""
        self._jinja, self._now = jinja, now or FIXED_DATE
        self._special = {id: piece for piece, id in tokenizer.special.items()}
        self._splits = splits
        super().__init__(tokenizer)
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "~"}]
        after = self._encode(self._render(messages, asks=False).rpartition("~")[2])
        ends = [id for id in after if id in self._special][:1]  # the marker that ends an answer
        self.stop_ids = tokenizer.eos_ids.union(ends)

    def _conversation(self, line: str) -> list[int]:
        if marker := next((piece for piece in self._special.values() if piece in line), None):
            raise UsageError(f"{marker} is a special token of this model: leave it out")
        messages = []
        for question, answer in self.turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": self.tokenizer.decode(answer)})
        messages.append({"role": "user", "content": line})
        return self._encode(self._render(messages, asks=True))

    def _encode(self, text: str) -> list[int]:
        text = well_formed(text)
        if self._splits:
            return Tokenizer.encode_marked(self.tokenizer, text)
        return self.tokenizer.encode_marked(text)

    def _render(self, messages: list[dict[str, str]], asks: bool) -> str:
        values = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": asks,
            **self.tokenizer.named,
        }
        request = {"template": self._jinja, "values": values, "now": self._now.isoformat()}
        program = [sys.executable, "-P", str(Path(__file__).with_name("chat_template.py"))]
        try:
            done = subprocess.run(
                program, input=json.dumps(request).encode(), capture_output=True, timeout=SECONDS
            )
            reply = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            reply = {"failed": f"it takes longer than {SECONDS} s"}
        except ValueError:  # killed, most likely for its memory
            reply = {"failed": f"its process ended with {done.returncode}"}
        ((kind, text),) = reply.items()
        if kind == "text":
            return str(text)
        reason = one_line(text[:MOST_OF_REASON])
        if kind == "invalid":
            raise CheckpointError(f"the checkpoint's chat template is not valid: {reason}")
        if kind == "refused":
            raise UsageError(f"the chat template refuses this conversation: {reason}")
        raise UsageError(f"the checkpoint's chat template fails: {reason}")


def chat_of(tokenizer: Tokenizer, model_name: str, now: datetime | None = None) -> Chat:
    """A conversation by the checkpoint's template, else by the one that its name tells, else none.

    now: as for TemplateChat. Raises CheckpointError for a checkpoint whose template is not valid.
    """
    if tokenizer.chat_template:
        return TemplateChat(tokenizer, tokenizer.chat_template, now=now)
    name = family_of(tokenizer, model_name)
    if name is None:
        return Chat(tokenizer)
    return TemplateChat(tokenizer, TEMPLATES[name].jinja, splits=True, now=now)


def family_of(tokenizer: Tokenizer, model_name: str) -> str | None:
    """The name in TEMPLATES of the template that fits the model; None for a base model."""
    for name, template in TEMPLATES.items():
        fits = tokenizer.special.keys() >= set(template.markers)
        if fits and re.search(template.models, model_name, re.IGNORECASE):
            return name
    return None
