"""Text for people: aligned columns, sizes with a unit, values shortened for a message."""

import re
import sys
import unicodedata
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any

LONGEST_VALUE = 80  # characters of a value in a message
LONGEST_NAME = 200  # characters of a name that somebody else gave
CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode's categories
LONGEST_LINE = 800  # characters of a whole message
NAMES = {"name", "arm", "machine", "model"}  # keys of JSON files whose values are names
# Controls that a terminal may have: the layout of a text, and what joins or parts letters.
LAYOUT = "\n\t\u00ad\u200b\u200c\u200d\u2060\ufeff"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def aligned(rows: Sequence[Sequence[str]], left: Collection[int], widest: int = 10_000) -> str:
    """A line for each row, in columns. Those numbered in `left` are aligned left, the rest right.

    A cell longer than `widest` characters does not widen its column. Rows may lack cells at their
    end.
    """
    columns = zip_longest(*rows, fillvalue="")
    widths = [max((len(c) for c in column if len(c) <= widest), default=0) for column in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    )


def joined(names: Sequence[str]) -> str:
    """The names in one line; a name may have commas of its own."""
    return ("; " if any(", " in name for name in names) else ", ").join(names)


def size(count: float) -> str:
    """A number of bytes in GB (1e9 bytes) or MB (1e6 bytes), with two decimals."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.2f} {name}"


def bytes_in(text: str, least: float = 1) -> float:
    """The bytes in 8GB, 8 GB, 7.5GiB or 8e9, from `least` to 1e18. Raises ValueError for anything
    else."""
    match = re.fullmatch(r"\s*([0-9.]{1,40}(?:[eE][0-9]{1,3})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{shown(text)} is no size")
    count = float(match[1]) * UNITS[match[2].upper()]
    if not least <= count < 1e18:
        raise ValueError(f"{shown(text)} is no size of a memory")
    return count


def seconds(count: float) -> str:
    """Seconds, or milliseconds below one second, with three digits."""
    return f"{count:.3g} s" if count >= 1 else f"{1e3 * count:.3g} ms"


def key(spelling: str) -> str:
    """An option's name from any spelling: --top-k and --top_k are top_k."""
    return spelling.removeprefix("--").replace("-", "_")


def counted(count: int, noun: str) -> str:
    """The number with its noun: "1 line", "2 lines"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shown(value: object, longest: int = LONGEST_VALUE) -> str:
    """A value as a message shows it: its repr, cut to about `longest` characters."""
    if isinstance(value, str | bytes) and len(value) > longest:
        text = repr(value[:longest])
        return f"{text[: longest - 20]}… ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 20]}… ({len(text)} characters)"


def plain(text: str, kept: str = "", longest: int = LONGEST_NAME) -> str:
    """A name or text that others wrote, as it is printed: a control character as \\xNN, and at most
    about `longest` characters. kept: control characters that stay."""
    if len(text) > longest:
        text = f"{text[: longest - 30]}… ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(c if c in kept or not is_control(c) else _escaped(c) for c in text)


def printed(text: str) -> str:
    """A text of any length as a terminal gets it: lines, tabs, and no other control character."""
    return plain(text, LAYOUT, sys.maxsize)


def cleaned(value: Any, but: Collection[str] = (), longest: int = LONGEST_LINE) -> Any:
    """Parsed JSON that others wrote, whose texts will be printed: each is one line of at most about
    `longest` characters, a name of LONGEST_NAME. but: keys whose values are left alone."""
    if isinstance(value, str):
        return plain(value, longest=longest)
    if isinstance(value, list):
        return [cleaned(item, but, longest) for item in value]
    if isinstance(value, dict):
        most = {key: LONGEST_NAME if key in NAMES else longest for key in value}
        return {
            plain(key): item if key in but else cleaned(item, but, most[key])
            for key, item in value.items()
        }
    return value


def is_control(c: str) -> bool:
    """Whether a terminal may obey this character, or change the order of others for it."""
    return unicodedata.category(c) in CONTROLS


def _escaped(c: str) -> str:
    return c.encode("unicode_escape").decode() if ord(c) > 0xFF else f"\\x{ord(c):02x}"


def one_line(message: str) -> str:
    """A message without line ends and control characters, and without the middle of a long one."""
    if len(message) > 4 * LONGEST_LINE:
        message = f"{message[: 2 * LONGEST_LINE]} … {message[-LONGEST_LINE:]}"
    words = " ".join(message.split())
    words = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    if len(words) <= LONGEST_LINE:
        return words
    return f"{words[: LONGEST_LINE // 2]} … {words[-LONGEST_LINE // 4 :]}"
