"""Quoting a command as one line of text that bash reads back word for word, and splitting it again.

`shlex` does this for every word without control characters, but would leave a newline as it is.
Words with control characters are written in the shell's $'…' form instead.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

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
    result: list[Word] = []
    text, bare, inside = bytearray(), True, False  # state of the word that is being read
    position = 0
    while position < len(command):
        piece = _PIECE.match(command, position)
        if piece is None:
            raise UsageError(f"the quote opened at character {position + 1} is not closed")
        position = piece.end()
        match piece.lastgroup:
            case "space":
                if inside:
                    result.append(_word(text, bare))
                text, bare, inside = bytearray(), True, False
                continue
            case "continued":
                continue
            case "ansi":
                text += _unescaped(piece["ansi"])
            case "double":
                text += _encoded(re.sub(r'\\([$`"\\])', r"\1", piece["double"]))
            case kind:
                text += _encoded(piece[str(kind)])
        bare = bare and piece.lastgroup == "plain"
        inside = True
    if inside:
        result.append(_word(text, bare))
    return result


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
    r"\\(?:([abeEfnrtv\\'\"?])|([0-7]{1,3})|x([0-9a-fA-F]{1,2})"
    r"|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|c(.))",
    re.DOTALL,
)
_ANSI_LETTERS = dict(zip("abeEfnrtv\\'\"?", b"\a\b\x1b\x1b\f\n\r\t\v\\'\"?", strict=True))


def _unescaped(text: str) -> bytes:
    """The inside of $'…' as bytes; an unknown escape keeps its backslash, as in bash."""
    result, position = bytearray(), 0
    for match in _ANSI.finditer(text):
        result += _encoded(text[position : match.start()])
        position = match.end()
        letter, octal, byte, short, long, control = match.groups()
        if letter:
            result += bytes([_ANSI_LETTERS[letter]])
        elif octal or byte:
            result += bytes([(int(octal, 8) if octal else int(byte, 16)) & 0xFF])
        elif control:
            result += bytes([ord(control.upper()) & 0x1F])
        else:
            code = int(short or long, 16)
            if code > 0x10FFFF:
                raise UsageError(f"{match[0]} names no character")
            result += _encoded(chr(code))
    return bytes(result) + _encoded(text[position:])


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{text[:40]!r} holds half a character, which has no bytes") from None


def _decoded(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "surrogateescape")


def _word(text: bytearray, bare: bool) -> Word:
    return Word(_decoded(text), bare)
