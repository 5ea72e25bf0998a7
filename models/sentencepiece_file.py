"""tokenizer.model of sentencepiece: Llama 2, CodeLlama, Mistral, TinyLlama, Gemma."""

import itertools
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.tokenizer import Tokenizer
from quantbench.models.tokenizer_hints import Added, Hints


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model with byte fallback, and what other files of the folder add to it."""

    def __init__(self, path: Path, data: bytes, hints: Hints, vocab_size: int) -> None:
        self._always, self._skips = True, False
        if hints.kind is not None:
            from quantbench.models.tokenizer_classes import names_in, spaces_of

            data, self._always, self._skips = spaces_of(hints, data)
        self._model = model = _processor(path, data)
        self._data, self._path = data, path
        added = {
            id: token for id, token in hints.added.items() if id < vocab_size or not token.special
        }
        ids = range(model.vocab_size())
        for name in hints.special:
            id, new = model.piece_to_id(name), 1 + max([*added, len(ids) - 1])
            if model.id_to_piece(id) == name:
                added.setdefault(id, Added(name, special=True))
            elif new < vocab_size and all(name != token.content for token in added.values()):
                added[new] = Added(name, special=True)
        control = {id for id in ids if model.is_control(id) or model.is_unknown(id)}
        marks = {id: Added(model.id_to_piece(id), special=True) for id in control} | added
        self.special = {token.content: id for id, token in marks.items() if token.special}
        self.size = 1 + max([*marks, len(ids) - 1])
        self._added = {id: token for id, token in added.items() if id not in control}
        self._ids = {token.content: id for id, token in marks.items()}
        self._words = {token.content for token in marks.values() if token.single_word}
        self._plain_marks = _pattern(token for token in marks.values() if not token.special)
        self._marks = self._plain_marks if hints.splits else _pattern(marks.values())
        self.named = self.named if hints.kind != "" else names_in(model)
        # As in transformers 5, none opens a text unless tokenizer_config.json asks for it; without
        # that file as in Meta's and Mistral's own programs.
        opens = (hints.kind is None or hints.add_bos or hints.opens) and model.bos_id() >= 0
        self.bos_id = self._find_bos(hints, model.bos_id() if opens else None)
        self.eos_ids = self._endings(hints) | ({model.eos_id()} - {-1})

    @cached_property
    def _inner(self) -> Any:
        """The model without a space in front: normalizer_spec.add_dummy_prefix is false."""
        return _processor(self._path, self._data + b"\x1a\x02\x18\x00")

    def _ids_of(self, text: str, is_first: bool) -> list[int]:
        """The ids of the text's beginning, or of what follows an added token."""
        skips = not is_first or (self._skips and text.startswith((" ", "\u2581")))
        return list((self._inner if skips else self._model).encode(text))

    def _encode(self, text: str) -> list[int]:
        return self._split(text, self._plain_marks)

    def encode_marked(self, text: str) -> list[int]:
        return self._split(text, self._marks)

    def _split(self, text: str, marks: re.Pattern[str] | None) -> list[int]:
        """The ids of `text`, in which added tokens are cut out first."""
        ids, end = list[int](), 0
        for match in marks.finditer(text) if marks else ():
            if (group := match.lastindex) is None or not self._is_whole(match, group):
                continue
            if match.start() > end:
                ids += self._ids_of(text[end : match.start()], self._always or end == 0)
            ids.append(self._ids[match[group]])
            end = match.end()
        return ids + self._ids_of(text[end:], self._always or end == 0)

    def _is_whole(self, match: re.Match[str], group: int) -> bool:
        """Whether the token found is no part of a longer word, if it must not be."""
        start, end = match.span(group)
        before, after = match.string[start - 1 : start], match.string[end : end + 1]
        return match[group] not in self._words or not re.search(r"\w", before + after)

    def _decode(self, ids: list[int]) -> str:
        text = ""
        for is_added, group in itertools.groupby(ids, self._added.__contains__):
            if is_added:
                tokens = [self._added[id] for id in group]
                plain = (token.content for token in tokens if not token.special)
                text += "".join(plain).replace("\u2581", " ")
            else:
                pieces = range(self._model.vocab_size())  # sentencepiece has a text for <unk>
                known = [id for id in group if id in pieces and not self._model.is_unknown(id)]
                text += (self._inner if text else self._model).decode(known)
        return text


def _processor(path: Path, data: bytes) -> Any:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(data)
        model.id_to_piece([*range(model.vocab_size())])  # all of them UTF-8
    except (RuntimeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is not a whole sentencepiece model; copy or download it again"
        ) from error
    return model


def _pattern(tokens: Iterable[Added]) -> re.Pattern[str] | None:
    """What finds these tokens in a text, longest first, each as a group; None: there are none."""
    patterns = []
    for token in sorted(tokens, key=lambda token: len(token.content), reverse=True):
        text = f"({re.escape(token.content)})"
        patterns.append(r"\s*" * token.lstrip + text + r"\s*" * token.rstrip)
    return re.compile("|".join(patterns)) if patterns else None
