"""The pictures of the documentation: a function each, from a file that is committed to SVG."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantbench.answer.growth import Points
from quantbench.answer.row import Row
from quantbench.bench.answers import ArmFacts
from quantbench.log.about import About
from quantbench.report import html, lines
from quantbench.report import pareto as pareto_picture
from quantbench.report.doc_tables import read


@dataclass(frozen=True)
class Measured:
    """An arm in results.json."""

    facts: ArmFacts | None = None


def growth(path: str) -> str:
    """Decoding as layers, batch and depth grow, as `growth --json PATH` measured it."""
    value = read(Points, path)
    caption = f"{value.about.machine}, {value.about.date}" if value.about else ""
    return _drawn(lambda file: lines.draw(value.points, file, caption))


def pareto(path: str) -> str:
    """Speed, memory and quality, from `ab --output`'s results.json."""
    rows, about = read(list[Row], path, "rows"), read(About, path, "about")
    run = html.first_run(arm.facts for arm in read(list[Measured], path, "arms"))
    title = html.title(run, about)
    return _drawn(lambda file: pareto_picture.draw(rows, [file], title))


def _drawn(draw: Callable[[Path], object]) -> str:
    with tempfile.TemporaryDirectory(prefix="quantbench-") as folder:
        file = Path(folder) / "picture.svg"
        draw(file)
        return file.read_text()


def growth_caption(path: str) -> str:
    """Where the points come from, for the text below the picture."""
    about = read(Points, path).about
    return about.caption() if about else ""


# The data of the others are in a table, too, with its caption, in the same document.
CAPTIONS: Mapping[str, Callable[[str], str]] = {"growth": growth_caption}
PICTURES: Mapping[str, Callable[[str], str]] = {
    "growth": growth,
    "pareto": pareto,
}
