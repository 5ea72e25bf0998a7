"""Text for people: columns that align, sizes in words, values cut to what a line can hold."""

from collections.abc import Collection, Sequence

LONGEST_VALUE = 80  # characters of a value in a message
LONGEST_LINE = 800  # characters of a whole message


def aligned(rows: Sequence[Sequence[str]], left: Collection[int], widest: int = 10_000) -> str:
    """A line for each row, its cells in columns: those numbered in `left` begin together, the
    others end together.

    A cell longer than `widest` does not widen its column. Rows may lack cells at their end.
    """
    columns = range(max(map(len, rows), default=0))
    widths = [
        max((len(row[i]) for row in rows if i < len(row) and len(row[i]) <= widest), default=0)
        for i in columns
    ]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    )


def size(count: float) -> str:
    """Bytes in the unit that keeps the number readable; 1 GB is 1e9 bytes, as in the log."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.2f} {name}"


def counted(count: int, noun: str) -> str:
    """1 line, 2 lines."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shown(value: object, longest: int = LONGEST_VALUE) -> str:
    """A value for a message of one line: a long one would bury the reason."""
    if isinstance(value, str | bytes) and len(value) > longest:
        text = repr(value[:longest])
        return f"{text[: longest - 20]}… ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 20]}… ({len(text)} characters)"


def one_line(message: str) -> str:
    """A message without line ends or control characters; the middle of a very long one left out."""
    if len(message) > 4 * LONGEST_LINE:
        message = f"{message[: 2 * LONGEST_LINE]} … {message[-LONGEST_LINE:]}"
    words = " ".join(message.split())
    words = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    if len(words) <= LONGEST_LINE:
        return words
    return f"{words[: LONGEST_LINE // 2]} … {words[-LONGEST_LINE // 4 :]}"
