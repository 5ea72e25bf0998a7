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
        self._model = model = _processor(path, data)
        self._data, self._path, self._hints = data, path, hints
        added = {
            id: token for id, token in hints.added.items() if id < vocab_size or not token.special
        }
        for name in hints.special:
            if model.id_to_piece(id := model.piece_to_id(name)) == name:
                added.setdefault(id, Added(name, special=True))
        ids = range(model.vocab_size())
        control = {id for id in ids if model.is_control(id) or model.is_unknown(id)}
        marks = {id: Added(model.id_to_piece(id), special=True) for id in control} | added
        self.special = {token.content: id for id, token in marks.items() if token.special}
        self.size = 1 + max([*marks, len(ids) - 1])
        self._added = {id: token for id, token in added.items() if id not in control}
        self._ids = {token.content: id for id, token in marks.items()}
        self._words = {token.content for token in marks.values() if token.single_word}
        self._marks = _pattern(marks.values())
        self._plain_marks = _pattern(token for token in marks.values() if not token.special)
        bos = model.bos_id()
        self.bos_id = self._find_bos(hints, bos if bos >= 0 else None)
        self.eos_ids = self._endings(hints) | ({model.eos_id()} - {-1})

    @cached_property
    def _inner(self) -> Any:
        """The model without a space in front: normalizer_spec.add_dummy_prefix is false. Of a field
        that a protobuf has twice, the later one counts."""
        return _processor(self._path, self._data + b"\x1a\x02\x18\x00")

    def _part(self, is_first: bool) -> Any:
        """The model for the text's beginning, or for what follows an added token."""
        return self._model if is_first and self._hints.prefix is not False else self._inner

    def _encode(self, text: str) -> list[int]:
        return self._split(text, self._plain_marks)

    def encode_marked(self, text: str) -> list[int]:
        return self._split(text, self._marks)

    def _split(self, text: str, marks: re.Pattern[str] | None) -> list[int]:
        """The ids of `text`, in which added tokens are cut out first."""
        ids, end, legacy = list[int](), 0, self._hints.legacy
        for match in marks.finditer(text) if marks else ():
            if (group := match.lastindex) is None or not self._is_whole(match, group):
                continue
            if match.start() > end:
                part = text[end : match.start()]
                ids += self._part(legacy or end == 0).encode(part)
            ids.append(self._ids[match[group]])
            end = match.end()
        return ids + self._part(legacy or end == 0).encode(text[end:])

    def _is_whole(self, match: re.Match[str], group: int) -> bool:
        """Whether the token found is no part of a longer word, if it must not be."""
        start, end = match.span(group)
        before, after = match.string[start - 1 : start], match.string[end : end + 1]
        return match[group] not in self._words or not re.search(r"\w", before + after)

    def _decode(self, ids: list[int]) -> str:
        if not self._added:
            return self._part(True).decode(ids)
        text = ""
        for is_added, group in itertools.groupby(ids, self._added.__contains__):
            if is_added:
                tokens = [self._added[id] for id in group]
                plain = (token.content for token in tokens if not token.special)
                text += "".join(plain).replace("\u2581", " ")
            else:
                known = [id for id in group if id < self._model.vocab_size()]
                text += self._part(not text).decode(known)
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
