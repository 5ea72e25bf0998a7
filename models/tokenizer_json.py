"""tokenizer.json, by the library that defines it."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantbench.errors import CheckpointError
from quantbench.models.tokenizer import LLAMA_3_BEGINNING, Tokenizer
from quantbench.models.tokenizer_hints import Added, Hints
from quantbench.typed_json import parsed

MOST_GROWTH = 1000  # times: what replacements may lengthen a text


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, read by the `tokenizers` library: either byte-level or sentencepiece-like.

    Special tokens that were added past the model's last embedding (a "[PAD]", CodeLlama's infill
    marks beside its Python model) can never be fed to it, so they are taken for absent.
    """

    def __init__(self, path: Path, data: bytes, hints: Hints, vocab_size: int) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or older ones warn at forks
        import tokenizers

        self._path = path
        with _library(f"{path} is not a tokenizer.json we can read"):
            self._model = tokenizers.Tokenizer.from_str(data.decode())
        described = parsed(data)
        if hints.kind and (described.get("model") or {}).get("type") == "BPE":
            described |= self._rebuild(hints, tokenizers.Tokenizer)
        for part in ("normalizer", "decoder"):
            if (growth := _growth(described.get(part) or {})) > MOST_GROWTH:
                raise CheckpointError(
                    f"{path}: its {part} may lengthen a text {growth:.3g} times; accepted is "
                    f"up to {MOST_GROWTH}"
                )
        self._add(hints)
        self._splits = hints.splits
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True  # encode them as text when text contains them
        added = self._model.get_added_tokens_decoder()
        special = {id: token.content for id, token in added.items() if token.special}
        vocabulary = self._model.get_vocab()
        self.size = 1 + max(
            (id for id in vocabulary.values() if id < vocab_size or id not in special), default=-1
        )
        self.special = {name: id for id, name in special.items() if id < vocab_size}
        decoder = described.get("decoder") or {}
        steps = {step.get("type") for step in decoder.get("decoders", [decoder])}
        if steps.isdisjoint(("ByteLevel", "Replace", "Metaspace")):
            raise CheckpointError(
                f"{path} decodes by {', '.join(map(str, steps))}; accepted are byte-level and "
                "sentencepiece-like tokenizers"
            )
        with _library(f"{path} cannot encode an empty text"):
            template = self._model.encode("", add_special_tokens=True).ids
        opens = template and template[0] not in self._endings(hints)
        # Early Llama 3 files have no template, yet the model was trained with its beginning.
        usual = template[0] if opens else self.special.get(LLAMA_3_BEGINNING)
        # Whatever add_bos_token says: as in transformers the file decides, or the class.
        by_class = {True: self.special.get(hints.bos_token or ""), False: None, None: usual}
        self.bos_id = by_class[hints.opens]
        self.eos_ids = self._endings(hints)

    def _rebuild(self, hints: Hints, library: Any) -> dict[str, Any]:
        """Give the model the parts of its class in transformers; they are returned."""
        from quantbench.models.tokenizer_classes import parts_of

        if (parts := parts_of(hints)) is None:
            return {}
        made = library.from_str(json.dumps(parts | {"added_tokens": []}))
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            setattr(self._model, name, getattr(made, name))
        for name in ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges"):
            setattr(self._model.model, name, getattr(made.model, name))
        return parts

    def _add(self, hints: Hints) -> None:
        """Add the tokens that the folder's other files add; make special those they call so."""
        from tokenizers import AddedToken

        known = self._model.get_added_tokens_decoder()
        wanted = [hints.added[id] for id in sorted(hints.added)]
        listed = {token.content: token for token in known.values()} | {
            token.content: token for token in wanted
        }
        for text in dict.fromkeys(hints.special):
            token = listed.get(text)
            if token is None:
                wanted.append(Added(text, special=True))
            elif not token.special:
                wanted.append(Added(**flags_of(token) | {"special": True}))
        for token in wanted:
            self._model.add_tokens([AddedToken(**flags_of(token))])

    def _encode(self, text: str) -> list[int]:
        with _library(f"{self._path} cannot encode this text"):
            return self._model.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        with _library(f"{self._path} cannot decode these ids", quiet=False):
            return self._model.decode(ids, skip_special_tokens=True)

    def encode_marked(self, text: str) -> list[int]:
        # The library's own rules around a special token.
        self._model.encode_special_tokens = self._splits
        try:
            return self._encode(text)
        finally:
            self._model.encode_special_tokens = True


def flags_of(token: Any) -> dict[str, Any]:
    return {field.name: getattr(token, field.name) for field in dataclasses.fields(Added)}


@contextlib.contextmanager
def _library(refusal: str, quiet: bool = True) -> Iterator[None]:
    """Turn what the tokenizers library raises into a CheckpointError: `refusal` and its reason.

    The library's panics are BaseExceptions, and write a stack to descriptor 2 first. quiet: not
    even that; two system calls, too many for each new token.
    """
    stderr = _without_stderr() if quiet else contextlib.nullcontext()
    try:
        with stderr:
            yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{refusal}: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _growth(step: Mapping[str, Any]) -> float:
    """How many times as long a normalizer's or decoder's replacements may make a text. Tables of
    characters (Precompiled) are not counted: only the library can read them."""
    growth = 1.0
    for inner in step.get("normalizers") or step.get("decoders") or []:
        growth *= _growth(inner)
    if step.get("type") == "Replace":
        replaced, content = step["pattern"].get("String"), len(step["content"])
        growth *= max(1.0, content / len(replaced) if replaced else content + 1)
    return growth
