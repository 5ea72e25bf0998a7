"""Bars as SVG, the same to the byte wherever they are drawn: a check compares them."""

from collections.abc import Sequence
from html import escape

LABEL, WIDTH, VALUE = 210, 420, 60  # pixels: the words, the longest bar, the number behind it
LINE, TITLE, MARGIN = 20, 30, 10
COLOURS = {True: "#2c7fb8", False: "#d95f0e"}  # at least as fast as full precision, or slower


def chart(groups: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """Of each group a title and its bars, (label, speed-up); a line stands at 1."""
    drawn: list[str] = []
    y = MARGIN
    for title, bars in groups:
        if not bars:
            continue
        unit = WIDTH / max(1.0, *(value for _, value in bars))
        y += TITLE
        drawn.append(f'<text x="{MARGIN}" y="{y - 10}" font-weight="bold">{escape(title)}</text>')
        top = y
        for label, value in bars:
            middle = y + LINE - 6
            drawn += [
                f'<text x="{LABEL - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>',
                f'<rect x="{LABEL}" y="{y + 3}" width="{value * unit:.1f}" height="{LINE - 6}" '
                f'fill="{COLOURS[value >= 1]}"/>',
                f'<text x="{LABEL + value * unit + 6:.1f}" y="{middle}">{value:.2f} ×</text>',
            ]
            y += LINE
        x = LABEL + unit
        drawn.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y}" stroke="#444"/>')
    width, height = LABEL + WIDTH + VALUE, y + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    )
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, background, *drawn, "</svg>"]) + "\n"
