"""Quoting a command as one line of text that bash reads back word for word, and splitting it again.

`shlex` does this for every word without control characters, but would leave a newline as it is.
Words with control characters are written in the shell's $'…' form instead.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from quantbench.errors import UsageError


@dataclass(frozen=True)
class Word:
    """One word of a command."""

    text: str
    bare: bool  # whether it was written without any quote or backslash


def join(words: Iterable[str]) -> str:
    """The words as one line, without any character that some program reads as a line's end."""
    return " ".join(map(_quoted, words))


def words(command: str) -> list[Word]:
    """The words that bash would pass to the program, without expansions: `$x`, `*` and `;` stay.

    Raises UsageError for a quote that is not closed.
    """
    pieces: list[re.Match[str]] = []
    while (position := pieces[-1].end() if pieces else 0) < len(command):
        piece = _PIECE.match(command, position)
        if piece is None:
            raise UsageError(f"the quote opened at character {position + 1} is not closed")
        pieces.append(piece)
    result = []
    for is_space, group in groupby(pieces, lambda piece: piece.lastgroup == "space"):
        word = [piece for piece in group if piece.lastgroup != "continued"]
        if word and not is_space:
            bare = all(piece.lastgroup == "plain" for piece in word)
            result.append(Word(_decoded(b"".join(map(_bytes, word))), bare))
    return result


def _bytes(piece: re.Match[str]) -> bytes:
    match piece.lastgroup:
        case "ansi":  # an unknown escape keeps its backslash, as in bash
            return _ANSI.sub(_unescaped, _encoded(piece["ansi"]))
        case "double":
            return _encoded(re.sub(r'\\([$`"\\])', r"\1", piece["double"]))
        case kind:
            return _encoded(piece[str(kind)])


def carries(text: str) -> bool:
    """Whether a command line can hold this text: no NUL, and bytes that decode to the same text."""
    try:
        return "\0" not in text and _decoded(_encoded(text)) == text
    except UsageError:
        return False


_PIECE = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    |\\(?P<continued>\n)
    |\\(?P<escaped>.)
    |\$'(?P<ansi>(?:[^'\\]|\\.)*)'
    |'(?P<single>[^']*)'
    |"(?P<double>(?:[^"\\]|\\.)*)"
    |(?P<plain>[^\s'"\\$]+|\$(?!')|[^\S \t\r\n])""",
    re.VERBOSE | re.DOTALL,
)

# Control characters, the separators Unicode counts as line ends, and bytes that are not UTF-8
# (Python holds those as surrogates).
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ESCAPES = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\t": r"\t", "\r": r"\r"}


def _quoted(word: str) -> str:
    if not _UNPRINTABLE.search(word):
        return shlex.quote(word)
    return "$'" + re.sub(r"[\\'!]|" + _UNPRINTABLE.pattern, _escape, word) + "'"


def _escape(match: re.Match[str]) -> str:
    # Bytes rather than \u: bash writes \u in the locale's encoding. The exclamation mark is in
    # the pattern because an interactive bash may expand it inside $'…'.
    character = match[0]
    return _ESCAPES.get(character) or "".join(f"\\x{byte:02x}" for byte in _encoded(character))


_ANSI = re.compile(
    rb"\\(?:([abeEfnrtv\\'\"?])|([0-7]{1,3})|x([0-9a-fA-F]{1,2})"
    rb"|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|c(.))",
    re.DOTALL,
)
_ANSI_LETTERS = dict(zip(b"abeEfnrtv\\'\"?", b"\a\b\x1b\x1b\f\n\r\t\v\\'\"?", strict=True))


def _unescaped(match: re.Match[bytes]) -> bytes:
    """The bytes of an escape inside $'…'."""
    letter, octal, byte, short, long, control = match.groups()
    if short or long:
        code = int(short or long, 16)
        if code > 0x10FFFF:
            raise UsageError(f"{match[0].decode()} names no character")
        return _encoded(chr(code))
    if letter:
        return bytes([_ANSI_LETTERS[letter[0]]])
    if control:
        return bytes([control.upper()[0] & 0x1F])
    return bytes([(int(octal, 8) if octal else int(byte, 16)) & 0xFF])


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{text[:40]!r} holds half a character, which has no bytes") from None


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
