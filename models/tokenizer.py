"""Text to ids and back: which kind of file a checkpoint's tokenizer is, and what all kinds can do.

    tokenizer = load_tokenizer(Path("checkpoints/Llama-2-7b-chat-hf"), vocab_size=32000)
    ids = tokenizer.encode("Hello")            # the first id opens a sequence
    text = TextStream(tokenizer, after=ids)
    print(text.push(id), end="")               # as each id is generated; text.flush() at the end

What is in a file decides how it is read, not its name: `tokenizer.model` is a sentencepiece
protobuf (sentencepiece_file.py) beside Llama 2 and lines of base64 (tiktoken_file.py) beside Llama
3. A folder that also has a tokenizer.json (tokenizer_json.py) is read through that one, because it
alone knows the special tokens that were added later. Mistral's tekken.json (tekken_file.py) is read
where there is no other. Each kind is imported when a file is one.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.models.tokenizer_hints import BESIDE, Hints
from quantbench.text import plain, shown

# Where a tokenizer may lie, best first; original/ is where Hugging Face keeps Meta's Llama 3 files.
FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model", "vocab.json",
         "tekken.json")  # fmt: skip
ENDINGS = ("</s>", "<|end_of_text|>", "<|eot_id|>")
LLAMA_3_BEGINNING = "<|begin_of_text|>"
UNFINISHED = "\ufffd"  # in the place of bytes that are no whole character
# A byte string in base64 and its rank.
TIKTOKEN_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d+)\r?(?:\n|\Z)")

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
    name = next(name for name in FILES if name in content)
    path, data, hints = folder / name, content[name], Hints.of(folder, content)
    if name == "vocab.json":
        from quantbench.models.formats.gguf_tokenizer import of_vocabulary

        data = of_vocabulary(folder, content, hints)
    tokenizer: Tokenizer
    if name == "tekken.json":
        from quantbench.models.tekken_file import TekkenTokenizer

        tokenizer = TekkenTokenizer(path, data, hints)
    elif path.suffix == ".json":
        from quantbench.models.tokenizer_json import JsonTokenizer

        tokenizer = JsonTokenizer(path, data, hints, vocab_size)
    elif TIKTOKEN_LINE.match(data):
        from quantbench.models.tiktoken_file import TiktokenTokenizer

        tokenizer = TiktokenTokenizer(path, data, hints)
    elif data.startswith(b"\n"):  # the first field of a sentencepiece protobuf, its pieces
        from quantbench.models.sentencepiece_file import SentencePieceTokenizer

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


def _opening(tokenizer: "Tokenizer", hints: Hints) -> str:
    """The token that starts each text, in a sentence without a full stop."""
    if (id := tokenizer.bos_id) is not None:
        name = {id: name for name, id in tokenizer.special.items()}.get(id, "a token")
        return f"Each text starts with {plain(name)} (id {id})"
    why = "add_bos_token is false" if hints.add_bos is False else "its files ask for none"
    return f"No token opens a text: {why}"


class Tokenizer(ABC):
    """Text to ids and back, by the library that defines the file's format."""

    bos_id: int | None = None  # opens a sequence; None where the model was trained without one
    eos_ids: frozenset[int] = frozenset()  # all that end a generation
    size: int  # one more than the largest id in use
    same: Mapping[int, int] = {}  # ids that decode as another one, of the same text
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
        return self._decode([self.same.get(id, id) for id in ids if 0 <= id < self.size])

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

    def _find_bos(self, hints: Hints, usual: int | None) -> int | None:
        """The configuration's word where it gives one, else `usual`, which the file puts first."""
        if hints.add_bos is False:
            return None
        if hints.add_bos and hints.bos_token in self.special:
            return self.special[hints.bos_token]
        return usual

    def _endings(self, hints: Hints) -> frozenset[int]:
        named = (*ENDINGS, hints.eos_token)
        return hints.eos_ids.union(self.special[name] for name in named if name in self.special)


def well_formed(text: str) -> str:
    """The text with U+FFFD in the place of what is no Unicode: lone surrogates, which stand for
    bytes of a command line that cannot be decoded."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def other_encoding(
    first: Tokenizer, second: Tokenizer, lines: Iterable[str]
) -> tuple[str, list[int], list[int]] | None:
    """The first of `lines`, and of a text in many scripts, that two tokenizers encode differently:
    what it is, in words, and its tokens."""
    for line in (MANY_SCRIPTS, *lines):
        ids = first.encode(line), second.encode(line)
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


def _read(path: Path) -> bytes:
    data = files.read_bytes("cannot read", path, CheckpointError)
    if not data:
        raise CheckpointError(f"{path} is empty; copy or download it again")
    if data.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is only a Git LFS pointer; run `git lfs pull` in its folder")
    return data
