"""Text to ids and back: sentencepiece, tokenizer.json, and (tiktoken_file.py) Llama 3's files.

    tokenizer = load_tokenizer(Path("checkpoints/Llama-2-7b-chat-hf"), vocab_size=32000)
    ids = tokenizer.encode("Hello")            # the first id opens a sequence
    text = TextStream(tokenizer, after=ids)
    print(text.push(id), end="")               # as each id is generated; text.flush() at the end

What is in a file decides how it is read, not its name: `tokenizer.model` is a sentencepiece
protobuf beside Llama 2 and lines of base64 beside Llama 3. A folder that also has a tokenizer.json
is read through that one, because it alone knows the special tokens that were added later.

The libraries are imported where they are used: a run loads one of them, and starts faster.
"""

import contextlib
import dataclasses
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.models.config_checks import TRUTH
from quantbench.text import plain, shown
from quantbench.typed_json import from_json, parsed

# Where a tokenizer may lie, best first; original/ is where Hugging Face keeps Meta's Llama 3 files.
FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model", "vocab.json")
MERGES = "merges.txt"  # beside vocab.json
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_ADDED, _NAMES = "added_tokens.json", "special_tokens_map.json"
BESIDE = (MERGES, _CONFIG, _ADDED, _NAMES, "generation_config.json", _TEMPLATE)
_ENDS = ("generation_config.json", "config.json")  # have the ids that end a generation
# The special tokens that end a text in the families we run, whether or not a config lists them.
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
ENDINGS = ("</s>", "<|end_of_text|>", "<|eot_id|>")
LLAMA_3_BEGINNING = "<|begin_of_text|>"
UNFINISHED = "\ufffd"  # in the place of bytes that are no whole character

MOST_GROWTH = 1000  # times as many characters: what replacing may make of a text

MANY_SCRIPTS = "Größe 12,345.678 — naïve Ελληνικά русский 日本語 한국어 العربية 🙂"


def load_tokenizer(folder: Path, vocab_size: int) -> "Tokenizer":
    """The tokenizer of the checkpoint in `folder`, or in the folder of the file `folder`.

    `vocab_size` is how many ids the model has an embedding for. Raises CheckpointError where there
    is no tokenizer, where it cannot be read, or where it makes ids that the model does not have.
    """
    folder = folder.parent if folder.is_file() else folder
    best = next((name for name in FILES if os.path.lexists(folder / name)), None)
    if best is None:
        raise CheckpointError(f"no tokenizer in {folder}: looked for {', '.join(FILES)}")
    names = (name for name in (best, *BESIDE, "config.json") if os.path.lexists(folder / name))
    return tokenizer_of(folder, {name: _read(folder / name) for name in names}, vocab_size)


def tokenizer_of(folder: Path, content: Mapping[str, bytes], vocab_size: int) -> "Tokenizer":
    """As `load_tokenizer`, of files with this content, by their names in `folder`."""
    from quantbench.models import tiktoken_file  # which has a child of Tokenizer

    name = next(name for name in FILES if name in content)
    path, data, hints = folder / name, content[name], Hints.of(folder, content)
    if name == "vocab.json":
        from quantbench.models.formats.gguf_tokenizer import of_vocabulary

        data = of_vocabulary(folder, content, hints)
    if path.suffix == ".json":
        tokenizer: Tokenizer = JsonTokenizer(path, data, hints, vocab_size)
    elif tiktoken_file.LINE.match(data):
        tokenizer = tiktoken_file.TiktokenTokenizer(path, data, hints)
    elif data.startswith(b"\n"):  # the first field of a sentencepiece protobuf, its pieces
        tokenizer = SentencePieceTokenizer(path, data, hints, vocab_size)
    else:
        raise CheckpointError(
            f"{path} is neither a sentencepiece model nor tiktoken lines (base64, space, rank)"
        )
    if tokenizer.size > vocab_size:
        raise CheckpointError(
            f"{path} has {tokenizer.size} ids, but the model only {vocab_size}:"
            " use the tokenizer that came with this checkpoint"
        )
    tokenizer.chat_template = hints.chat_template
    tokenizer.named = hints.names_of(tokenizer)
    tokenizer.notes = (_opening(tokenizer, hints),)
    return tokenizer


def _opening(tokenizer: "Tokenizer", hints: "Hints") -> str:
    """Which token each text begins with, in a sentence without a full stop."""
    id = tokenizer.bos_id
    if id is not None:
        name = next((name for name, other in tokenizer.special.items() if other == id), "a token")
        return f"Each text begins with {plain(name)} (id {id})"
    if hints.add_bos is False:
        return "No token opens a text: add_bos_token is false"
    return "No token opens a text: the tokenizer's file names none"


class Tokenizer(ABC):
    """Text to ids and back, by the library that defines the file's format."""

    bos_id: int | None = None  # opens a sequence; None where the model was trained without one
    eos_ids: frozenset[int] = frozenset()  # all that end a generation
    size: int  # one more than the largest id in use
    special: Mapping[str, int] = {}  # ids of the special tokens by their names, as "<|eot_id|>"
    chat_template: str | None = None  # the checkpoint's own, in Jinja
    named: Mapping[str, str] = {}  # special tokens as a chat template sees them: bos_token, …
    notes: tuple[str, ...] = ()  # how texts are read, in sentences; a command prints them once

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """The ids of `text`, after `bos_id` if there is one and `bos` is true.

        A special token written out in the text is text like any other.
        """
        start = [self.bos_id] if bos and self.bos_id is not None else []
        return start + self._encode(well_formed(text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Special tokens and ids that nothing is known of leave no trace."""
        return self._decode([id for id in ids if 0 <= id < self.size])

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """The ids of well-formed `text` alone."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """The text of ids below `size`."""

    def encode_marked(self, text: str) -> list[int]:
        """The ids of `text`, in which special tokens that are written out are special tokens."""
        names = sorted(self.special, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        special = self.special
        return [
            id
            for part in parts
            for id in ([special[part]] if part in special else self._encode(part))
        ]

    def _find_bos(self, hints: "Hints", usual: int | None) -> int | None:
        """The configuration's word where it gives one, else `usual`, which the file puts first."""
        if hints.add_bos is False:
            return None
        if hints.add_bos and hints.bos_token in self.special:
            return self.special[hints.bos_token]
        return usual

    def _endings(self, hints: "Hints") -> frozenset[int]:
        named = (*ENDINGS, hints.eos_token)
        return hints.eos_ids.union(self.special[name] for name in named if name in self.special)


def well_formed(text: str) -> str:
    """The text with U+FFFD in the place of what is no Unicode: lone surrogates, which stand for
    bytes of a command line that cannot be decoded."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def other_encoding(
    one: Tokenizer, other: Tokenizer, lines: Iterable[str]
) -> tuple[str, list[int], list[int]] | None:
    """The first of `lines`, and of a text in many scripts, that two tokenizers encode differently:
    what it is, in words, and its tokens."""
    for line in (MANY_SCRIPTS, *lines):
        ids = one.encode(line), other.encode(line)
        if ids[0] != ids[1]:
            return f"tokenizer's encoding of {shown(line, 40)}", *ids
    return None


class TextStream:
    """Text as it comes: never half a character, and all of it together is `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, after: Iterable[int] = ()) -> None:
        """after: the ids that the new ones continue. Their text is not emitted, but it decides
        whether a leading space belongs to the text."""
        self.tokenizer, self.ids = tokenizer, list(after)
        self._emitted = len(self.tokenizer.decode(self.ids).rstrip(UNFINISHED))  # characters

    def push(self, id: int) -> str:
        """The text that `id` completes, "" if a character is still open."""
        self.ids.append(id)
        text = self.tokenizer.decode(self.ids)
        return "" if text.endswith(UNFINISHED) else self._rest(text)

    def flush(self) -> str:
        """What is left at the end: U+FFFD where the last character never became whole."""
        return self._rest(self.tokenizer.decode(self.ids))

    def _rest(self, text: str) -> str:
        rest = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return rest


class SentencePieceTokenizer(Tokenizer):
    """Llama 2, CodeLlama, Mistral, TinyLlama: a sentencepiece model with byte fallback, and the
    tokens that other files of the folder add to it."""

    def __init__(self, path: Path, data: bytes, hints: "Hints", vocab_size: int) -> None:
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
            if (found := match.lastindex) is None or not self._is_whole(match, found):
                continue
            if match.start() > end:
                part = text[end : match.start()]
                ids += self._part(legacy or end == 0).encode(part)
            ids.append(self._ids[match[found]])
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
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} is not a whole sentencepiece model; copy or download it again"
        ) from error
    return model


def _pattern(tokens: Iterable["Added"]) -> re.Pattern[str] | None:
    """What finds these tokens in a text, longest first, each as a group; None: there are none."""
    found = []
    for token in sorted(tokens, key=lambda token: len(token.content), reverse=True):
        text = f"({re.escape(token.content)})"
        found.append(r"\s*" * token.lstrip + text + r"\s*" * token.rstrip)
    return re.compile("|".join(found)) if found else None


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, read by the `tokenizers` library: either byte-level or sentencepiece-like.

    Special tokens that were added past the model's last embedding (a "[PAD]", CodeLlama's infill
    marks beside its Python model) can never be fed to it, so they are taken for absent.
    """

    def __init__(self, path: Path, data: bytes, hints: "Hints", vocab_size: int) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or older ones warn at forks
        import tokenizers

        self._path = path
        with _library(f"{path} is not a tokenizer.json we can read"):
            self._model = tokenizers.Tokenizer.from_str(data.decode())
        described = parsed(data)
        for part in ("normalizer", "decoder"):
            if (growth := _growth(described.get(part) or {})) > MOST_GROWTH:
                raise CheckpointError(
                    f"{path}: its {part} may make a text {growth:.3g} times as long; accepted is "
                    f"up to {MOST_GROWTH}"
                )
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
        self.bos_id = self._find_bos(hints, usual)
        self.eos_ids = self._endings(hints)

    def _encode(self, text: str) -> list[int]:
        with _library(f"{self._path} cannot encode this text"):
            return self._model.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        with _library(f"{self._path} cannot decode these ids", quiet=False):
            return self._model.decode(ids, skip_special_tokens=True)

    def encode_marked(self, text: str) -> list[int]:
        self._model.encode_special_tokens = False  # the library's own rules around a special token
        try:
            return self._encode(text)
        finally:
            self._model.encode_special_tokens = True


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
        kept = os.dup(2)
    except OSError:  # closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _growth(step: Mapping[str, Any]) -> float:
    """How many times as long a normalizer's or decoder's replacements may make a text. Tables of
    characters (Precompiled) are not counted: only the library can read them."""
    growth = 1.0
    for inner in step.get("normalizers") or step.get("decoders") or []:
        growth *= _growth(inner)
    if step.get("type") == "Replace":
        found, content = step["pattern"].get("String"), len(step["content"])
        growth *= max(1.0, content / len(found) if found else content + 1)
    return growth


class ByteTokenizer(Tokenizer):
    """A stand-in for models without a tokenizer (random weights): every UTF-8 byte is its own id.

    Ids wrap around: a byte enters as byte mod `vocab_size`, an id leaves as the byte id mod 256.
    From 256 ids on, text survives the way there and back.
    """

    def __init__(self, vocab_size: int) -> None:
        self.size = min(vocab_size, 256)

    def _encode(self, text: str) -> list[int]:
        return [byte % self.size for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        return self._decode([id % 256 for id in ids])

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@dataclass(frozen=True)
class Added:
    """A token that is cut out of a text before the rest is encoded."""

    content: str
    special: bool = False
    # Whether it takes white space before and after it along, and is no part of a longer word.
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False  # whether it is looked for in normalized text


@dataclass(frozen=True)
class Hints:
    """What a checkpoint's other files say about its tokenizer."""

    bos_token: str | None
    add_bos: bool | None  # None: not said
    eos_token: str | None
    eos_ids: frozenset[int]
    chat_template: str | None  # in Jinja; None: there is none
    named: Mapping[str, str | None]  # those of NAMED that the files have
    added: Mapping[int, Added]  # tokens that were added to the vocabulary, by id
    special: tuple[str, ...]  # tokens that the files call special
    prefix: bool | None  # whether a space is put in front of a text; None: as the vocabulary says
    legacy: bool  # whether also behind each added token, as transformers did until 2023

    def names_of(self, tokenizer: Tokenizer) -> dict[str, str]:
        """Special tokens by the names of NAMED: the file's own words, or, where it has neither a
        beginning nor an end, those of the ids."""
        if not self.named.keys().isdisjoint(("bos_token", "eos_token")):
            return {name: piece for name, piece in self.named.items() if piece is not None}
        pieces = {id: piece for piece, id in tokenizer.special.items()}
        ends = [pieces[id] for id in sorted(tokenizer.eos_ids) if id in pieces]
        bos = None if tokenizer.bos_id is None else pieces.get(tokenizer.bos_id)
        names = {"bos_token": bos, "eos_token": next(iter(ends), None), **self.named}
        return {name: piece for name, piece in names.items() if piece is not None}

    @classmethod
    def of(cls, folder: Path, content: Mapping[str, bytes]) -> "Hints":
        """From those of four files that there are. Raises CheckpointError for a bad one."""
        file = folder / _CONFIG
        tokenizer, ids = read_object(folder, content, _CONFIG), set[int]()
        if (add_bos := tokenizer.get("add_bos_token")) is not None:
            TRUTH.check(file, "add_bos_token", add_bos)
        for name in _ENDS:
            given = read_object(folder, content, name).get("eos_token_id")
            listed = given if isinstance(given, list) else [] if given is None else [given]
            if not all(type(id) is int for id in listed):
                raise CheckpointError(
                    f"{folder / name}: eos_token_id is {shown(given)}, not an id or a list of ids"
                )
            ids.update(listed)
        decoder, of_map = tokenizer.get("added_tokens_decoder"), dict[str, Any]()
        if decoder is None:  # as older versions of transformers wrote it
            of_map = read_object(folder, content, _NAMES)
        names, where = {**tokenizer, **of_map}, folder / _NAMES
        named = {
            key: _text(where if key in of_map else file, key, names[key])
            for key in NAMED
            if key in names
        }
        more = [names.get(f"{kind}_special_tokens") for kind in ("additional", "extra")]
        listed = [token for tokens in more if isinstance(tokens, list) for token in tokens]
        special = [_text(file, "additional_special_tokens", token) for token in listed]
        special = [text for text in (*named.values(), *special) if text]
        template = tokenizer.get("chat_template")
        if _TEMPLATE in content:
            template = content[_TEMPLATE].decode("utf-8", "replace")
        elif isinstance(template, list):  # several, by name
            items = [item for item in template if isinstance(item, dict)]
            template = next((i.get("template") for i in items if i.get("name") == "default"), None)
        return cls(
            named.get("bos_token"),
            add_bos,
            named.get("eos_token"),
            frozenset(ids),
            _text(file, "chat_template", template),
            named,
            _added(folder, content, decoder, special),
            tuple(special),
            tokenizer.get("add_prefix_space"),
            bool(tokenizer.get("legacy")),
        )


def _added(
    folder: Path, content: Mapping[str, bytes], decoder: Any, special: Collection[str]
) -> dict[int, Added]:
    """The tokens of added_tokens_decoder; where that is None, those of added_tokens.json. special:
    those that are, whatever the files say of each."""
    where = f"{folder / _CONFIG}: added_tokens_decoder"
    if decoder is None:
        where, given = f"{folder / _ADDED}", read_object(folder, content, _ADDED)
        decoder = {
            id: {"content": text, "normalized": text not in special} for text, id in given.items()
        }
    added = {}
    try:
        for id, token in decoder.items():
            if not (str(id).isdecimal() and len(str(id)) < 10):
                raise ValueError(f"its id {shown(id)} is no whole number")
            one = from_json(Added, token)
            added[int(id)] = dataclasses.replace(one, special=one.special or one.content in special)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is no object of ids and tokens: {error}") from None
    return {id: token for id, token in added.items() if token.content}


def _text(file: Path, key: str, token: Any) -> str | None:
    """A special token's text: written plainly, or as an object with its flags."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(
            f"{file}: {key} is {shown(token)}; accepted is a text, or an object with its content"
        )
    return text


def _read(path: Path) -> bytes:
    data = files.read_bytes("cannot read", path, CheckpointError)
    if not data:
        raise CheckpointError(f"{path} is empty; copy or download it again")
    if data.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is only a Git LFS pointer; run `git lfs pull` in its folder")
    return data


def read_object(folder: Path, content: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = parsed(content.get(name, "{}"))
    except ValueError as error:
        raise CheckpointError(files.refusal("cannot read", folder / name, error)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder / name} holds a {type(value).__name__}, not a JSON object")
    return value
