"""Text to ids and back: sentencepiece, Llama 3's tiktoken files, and tokenizer.json.

    tokenizer = load_tokenizer(Path("checkpoints/Llama-2-7b-chat-hf"), vocab_size=32000)
    ids = tokenizer.encode("Hello")            # begins with the id that opens a sequence
    text = stream(tokenizer, after=ids)
    print(text.push(id), end="")               # as each id is generated; text.flush() at the end

What is in a file decides how it is read, not its name: `tokenizer.model` is a sentencepiece
protobuf beside Llama 2 and lines of base64 beside Llama 3. A folder that also has a tokenizer.json
is read through that one, because it alone knows the special tokens that were added later.

All of them share one decoder. Every id stands for some bytes (none for a special token), a text is
those bytes in a row, and sentencepiece's one leading space is dropped. So streaming needs no
look-back, and what it emits adds up to `decode` by construction.

The libraries are imported where they are used: a run loads one of them, and starts faster.
"""

import base64
import binascii
import codecs
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench import files
from quantbench.errors import CheckpointError
from quantbench.text import shown
from quantbench.typed_json import parsed

# Where a tokenizer may lie, best first; original/ is where Hugging Face keeps Meta's Llama 3 files.
FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
# The special tokens that end a text in the families we run, whether or not a config lists them.
ENDINGS = ("</s>", "<|end_of_text|>", "<|eot_id|>")
LLAMA_3_BEGINNING = "<|begin_of_text|>"
SPACE = "\u2581"  # sentencepiece's and Metaspace's visible space, "▁"


def load_tokenizer(folder: Path, vocab_size: int) -> "Tokenizer":
    """The tokenizer of the checkpoint in `folder`, or in the folder of the file `folder`.

    `vocab_size` is how many ids the model has an embedding for. Raises CheckpointError where there
    is no tokenizer, where it cannot be read, or where it makes ids that the model does not have.
    """
    if folder.is_file():
        folder = folder.parent
    path = next((folder / name for name in FILES if os.path.lexists(folder / name)), None)
    if path is None:
        raise CheckpointError(f"no tokenizer in {folder}: looked for {', '.join(FILES)}")
    data, hints = _read(path), Hints.of(folder)
    if path.suffix == ".json":
        tokenizer: Tokenizer = JsonTokenizer(path, data, hints, vocab_size)
    elif TIKTOKEN_LINE.match(data):
        tokenizer = TiktokenTokenizer(path, data, hints)
    elif data.startswith(b"\n"):  # the first field of a sentencepiece protobuf, its pieces
        tokenizer = SentencePieceTokenizer(path, data, hints)
    else:
        raise CheckpointError(
            f"{path} is neither a sentencepiece model nor tiktoken lines (base64, space, rank)"
        )
    if tokenizer.size > vocab_size:
        raise CheckpointError(
            f"{path} has {tokenizer.size} ids, but the model only {vocab_size}:"
            " use the tokenizer that came with this checkpoint"
        )
    tokenizer.chat_template = chat_template(folder)
    return tokenizer


class Tokenizer(ABC):
    """What every tokenizer can do.

    `bos_id` is the id that opens a sequence, None where the model was trained without one;
    `eos_ids` are all ids that end a generation; `size` is one more than the largest id in use;
    `leading_spaces` is how many spaces decoding drops from the front of a text.
    """

    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    size: int
    leading_spaces: int = 0
    chat_template: str | None = None  # the checkpoint's own, in Jinja

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """The ids of `text`, after `bos_id` if there is one and `bos` is true.

        A special token written out in the text is text like any other. What is no Unicode (lone
        surrogates, from undecodable bytes on a command line) becomes U+FFFD.
        """
        well_formed = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        start = [self.bos_id] if bos and self.bos_id is not None else []
        return start + self._encode(well_formed)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Special tokens and ids that nothing is known of leave no trace."""
        text = TextStream(self)
        return "".join([*(text.push(id) for id in ids), text.flush()])

    @abstractmethod
    def token_id(self, piece: str) -> int | None:
        """The id of a special token by its name, such as "<|eot_id|>"; None if there is none."""

    @abstractmethod
    def piece(self, id: int) -> bytes:
        """The bytes that `id` adds to a text: not always whole characters, often none."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """The ids of well-formed `text` alone."""

    def encode_marked(self, text: str) -> list[int]:
        """The ids of `text`, in which special tokens that are written out are special tokens."""
        pieces = sorted(self.special_pieces(), key=len, reverse=True)
        if not pieces:
            return self._encode(text)
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, pieces))})", text):
            special = self.token_id(part) if part in pieces else None
            ids += self._encode(part) if special is None else [special]
        return ids

    def special_pieces(self) -> Collection[str]:
        """The names of the special tokens."""
        return ()

    def _endings(self, hints: "Hints") -> frozenset[int]:
        named = (*ENDINGS, hints.eos_token or "")
        ids = (self.token_id(piece) for piece in named)
        return hints.eos_ids.union(id for id in ids if id is not None)


def stream(tokenizer: Tokenizer, after: Iterable[int] = ()) -> "TextStream":
    """A decoder that emits text as ids arrive.

    `after` are the ids that the new ones continue: their text is not emitted, but it decides
    whether a leading space belongs to the text.
    """
    text = TextStream(tokenizer)
    for id in after:
        text.push(id)
    return text


class TextStream:
    """Text as it comes: never half a character, and all of it together is `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = tokenizer.leading_spaces

    def push(self, id: int) -> str:
        """The text that `id` completes, "" if a character is still open."""
        data = self._tokenizer.piece(id)
        while self._leading_spaces and data:
            if data[:1] != b" ":
                self._leading_spaces = 0
                break
            data = data[1:]
            self._leading_spaces -= 1
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD where the last character never became whole."""
        return self._utf8.decode(b"", final=True)


class SentencePieceTokenizer(Tokenizer):
    """Llama 2, CodeLlama, Mistral, TinyLlama: a sentencepiece model with byte fallback."""

    def __init__(self, path: Path, data: bytes, hints: "Hints") -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise CheckpointError(
                f"{path} is not a whole sentencepiece model; copy or download it again"
            ) from error
        self.size = self._model.vocab_size()
        self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self.eos_ids = self._endings(hints) | ({self._model.eos_id()} - {-1})
        self.leading_spaces = self._count_leading_spaces()

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def token_id(self, piece: str) -> int | None:
        id = self._model.piece_to_id(piece)  # the unknown piece's id where there is none
        is_special = self._model.is_control(id) or self._model.is_unknown(id)
        return id if is_special and self._model.id_to_piece(id) == piece else None

    def special_pieces(self) -> Collection[str]:
        ids = filter(self._model.is_control, range(self.size))
        return [self._model.id_to_piece(id) for id in ids]

    def piece(self, id: int) -> bytes:
        if not 0 <= id < self.size or self._model.is_control(id):
            return b""
        if self._model.is_unknown(id):
            return self._model.decode([id]).encode()
        return _spaced_piece(self._model.id_to_piece(id), self._model.is_byte(id))

    def _count_leading_spaces(self) -> int:
        """None, one or all: a setting inside the model, so it is asked to decode two spaces."""
        one_space = self._model.piece_to_id(SPACE)
        if self._model.is_unknown(one_space):  # nearly every model has the piece
            return 1
        left = len(self._model.decode([one_space, one_space]))
        return {2: 0, 1: 1, 0: sys.maxsize}[left]


TIKTOKEN_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d+)\r?(?:\n|\Z)")
# How Llama 3 cuts a text into words before it merges bytes: English contractions, letters and one
# character before them, up to three digits, punctuation and a space before it, line ends, blanks.
LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Llama 3's 256 special tokens by their place after the ordinary ones. Llama 3.1 gave names to
# three that Llama 3 had reserved (4, 8 and 10) and left all others where they were.
LLAMA_3_SPECIAL_COUNT = 256
LLAMA_3_SPECIAL = {
    0: LLAMA_3_BEGINNING,
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
LONGEST_CUT = 20_000  # characters; tiktoken's regex engine overflows somewhere above 400,000


class TiktokenTokenizer(Tokenizer):
    """Llama 3 as Meta publishes it: a file of byte strings and their merge ranks.

    A rank is also the id, and the 256 special tokens come after the last one.
    """

    def __init__(self, path: Path, data: bytes, hints: "Hints") -> None:
        from tiktoken import Encoding

        ranks = _read_ranks(path, data)
        self._pieces = list(ranks)
        self._special = llama_3_special_tokens(len(ranks))
        self._model = Encoding(
            "llama-3", pat_str=LLAMA_3_SPLIT, mergeable_ranks=ranks, special_tokens={}
        )
        self.size = len(ranks) + len(self._special)
        self.bos_id = self._special[LLAMA_3_BEGINNING]
        self.eos_ids = self._endings(hints)

    def _encode(self, text: str) -> list[int]:
        return [id for part in cuts(text) for id in self._model.encode_ordinary(part)]

    def token_id(self, piece: str) -> int | None:
        return self._special.get(piece)

    def special_pieces(self) -> Collection[str]:
        return self._special

    def piece(self, id: int) -> bytes:
        return self._pieces[id] if 0 <= id < len(self._pieces) else b""


def llama_3_special_tokens(base: int) -> dict[str, int]:
    """The ids of Llama 3.1's 256 special tokens when `base` ordinary ones come before them."""
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(LLAMA_3_SPECIAL_COUNT))
    places = range(LLAMA_3_SPECIAL_COUNT)
    return {LLAMA_3_SPECIAL.get(place) or next(reserved): base + place for place in places}


def cuts(text: str, longest: int = LONGEST_CUT) -> Iterator[str]:
    """Parts of `text` of at most `longest` characters that encode one by one as the whole would.

    LLAMA_3_SPLIT always begins a word at a space that follows something not blank, so that is
    where we cut. Only a run of `longest` characters without such a place is cut as it falls.
    """
    start = 0
    while len(text) - start > longest:
        end = text.rfind(" ", start + 1, start + longest)
        while end > 0 and text[end - 1].isspace():
            end = text.rfind(" ", start + 1, end)
        if end < 0:
            end = start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def _read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """Every line's byte string and rank, lowest rank first."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        match = TIKTOKEN_LINE.fullmatch(line)
        try:
            if match is None:
                raise binascii.Error
            ranks[base64.b64decode(match[1], validate=True)] = int(match[2])
        except ValueError as error:  # no base64, or more digits than Python reads
            raise CheckpointError(
                f"{path} line {number} is not a base64 string, a space and a rank;"
                " copy or download the file again"
            ) from error
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    every_byte = all(bytes([byte]) in ranks for byte in range(256))
    if list(ranks.values()) != list(range(len(data.splitlines()))) or not every_byte:
        raise CheckpointError(
            f"{path} lacks ranks, repeats some or lacks one of the 256 single bytes;"
            " copy or download the file again"
        )
    return ranks


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, read by the `tokenizers` library: either byte-level or sentencepiece-like.

    Special tokens that were added past the model's last embedding (a "[PAD]", CodeLlama's infill
    marks beside its Python model) can never be fed to it, so they are taken for absent.
    """

    def __init__(self, path: Path, data: bytes, hints: "Hints", vocab_size: int) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or older ones warn at forks
        import tokenizers

        try:
            self._model = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises Exception itself, nothing narrower
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{path} is not a tokenizer.json we can read: {reason}"
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True  # encode them as text when text contains them
        added = self._model.get_added_tokens_decoder()
        special = {id: token.content for id, token in added.items() if token.special}
        vocabulary = self._model.get_vocab()
        self.size = 1 + max(
            (id for id in vocabulary.values() if id < vocab_size or id not in special), default=-1
        )
        self._special = {name: id for id, name in special.items() if id < vocab_size}
        self._special_ids = frozenset(special)
        self._set_decoder(path, parsed(data))
        self.bos_id = self._find_bos(hints)
        self.eos_ids = self._endings(hints)

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def token_id(self, piece: str) -> int | None:
        return self._special.get(piece)

    def special_pieces(self) -> Collection[str]:
        return self._special

    def encode_marked(self, text: str) -> list[int]:
        self._model.encode_special_tokens = False  # the library's own rules around a special token
        try:
            return self._encode(text)
        finally:
            self._model.encode_special_tokens = True

    def piece(self, id: int) -> bytes:
        token = self._model.id_to_token(id) if id >= 0 else None
        if token is None or id in self._special_ids:
            return b""
        if not self._byte_level:
            return _spaced_piece(token, self._bytes and BYTE_PIECE.fullmatch(token) is not None)
        if all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        return token.encode()  # an added token, written as it is

    def _set_decoder(self, path: Path, description: dict[str, Any]) -> None:
        """Which of the two ways of writing bytes as text the pieces use, and the space dropped."""
        decoder = description.get("decoder") or {}
        steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        step = {step.get("type"): step for step in steps}
        if "ByteLevel" not in step and step.keys().isdisjoint(("Replace", "Metaspace")):
            raise CheckpointError(
                f"{path} decodes by {', '.join(str(name) for name in step)};"
                " accepted are byte-level and sentencepiece-like tokenizers"
            )
        self._byte_level = "ByteLevel" in step
        self._byte_of = _byte_level_alphabet() if self._byte_level else {}
        self._bytes = "ByteFallback" in step
        self.leading_spaces = step.get("Strip", {}).get("start", 0)
        if "Metaspace" in step:
            self.leading_spaces = int(step["Metaspace"].get("prepend_scheme", "always") != "never")

    def _find_bos(self, hints: "Hints") -> int | None:
        """The configuration's word where it gives one, else what the file's template puts first.

        Early Llama 3 files have no template, yet the model was trained with its beginning.
        """
        if hints.add_bos is False:
            return None
        if hints.add_bos and hints.bos_token in self._special:
            return self._special[hints.bos_token]
        template = self._model.encode("", add_special_tokens=True).ids
        if template and template[0] not in self._endings(hints):
            return template[0]
        return self._special.get(LLAMA_3_BEGINNING)


class ByteTokenizer(Tokenizer):
    """A stand-in for models without a tokenizer (random weights): every UTF-8 byte is its own id.

    It lets a prompt go in and something come out; it is no tokenizer of any real model. Ids wrap
    around: a byte enters as byte mod `vocab_size`, an id leaves as the byte id mod 256. From 256
    ids on, text survives the way there and back. There is no id that opens or ends a text.
    """

    def __init__(self, vocab_size: int) -> None:
        self.size = min(vocab_size, 256)

    def _encode(self, text: str) -> list[int]:
        return [byte % self.size for byte in text.encode()]

    def token_id(self, piece: str) -> int | None:
        return None

    def piece(self, id: int) -> bytes:
        return bytes([id % 256])


@dataclass(frozen=True)
class Hints:
    """What a checkpoint's other files say about its tokenizer."""

    bos_token: str | None
    add_bos: bool | None  # None: not said
    eos_token: str | None
    eos_ids: frozenset[int]

    @classmethod
    def of(cls, folder: Path) -> "Hints":
        """Read from whichever of the three files `folder` has; CheckpointError where one is bad."""
        file = folder / "tokenizer_config.json"
        tokenizer = _read_json(file)
        add_bos = tokenizer.get("add_bos_token")
        if add_bos is not None and not isinstance(add_bos, bool):
            raise CheckpointError(
                f"{file}: add_bos_token is {shown(add_bos)}; accepted is true, false or null"
            )
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            given = _read_json(folder / name).get("eos_token_id")
            listed = given if isinstance(given, list) else [] if given is None else [given]
            if not all(type(id) is int for id in listed):
                raise CheckpointError(
                    f"{folder / name}: eos_token_id is {shown(given)}, not an id or a list of ids"
                )
            ids.update(listed)
        return cls(
            bos_token=_content(file, "bos_token", tokenizer.get("bos_token")),
            add_bos=add_bos,
            eos_token=_content(file, "eos_token", tokenizer.get("eos_token")),
            eos_ids=frozenset(ids),
        )


def chat_template(folder: Path) -> str | None:
    """The Jinja text of chat_template.jinja or of tokenizer_config.json; None if it has neither.

    Raises CheckpointError for a template that is no text.
    """
    path, file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if os.path.lexists(path):
        return _read(path).decode("utf-8", "replace")
    given = _read_json(file).get("chat_template")
    if isinstance(given, list):  # several, by name
        named = [item for item in given if isinstance(item, dict)]
        given = next((i.get("template") for i in named if i.get("name") == "default"), None)
    return _content(file, "chat_template", given)


def _content(file: Path, key: str, token: Any) -> str | None:
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


def _read_json(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        content = parsed(_read(path))
    except ValueError as error:
        raise CheckpointError(files.refusal("cannot read", path, error)) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _spaced_piece(piece: str, is_byte: bool) -> bytes:
    """The bytes of a sentencepiece-like piece: "▁the" is " the", "<0xE2>" one byte."""
    return bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(SPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The character that GPT-2's byte-level pieces write for each byte, and back to the byte.

    Visible Latin-1 characters stand for themselves; the other 68 bytes, in order, take the
    characters from U+0100 on.
    """
    visible: Sequence[int] = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
