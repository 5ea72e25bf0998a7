"""quantbench readme: the tables and pictures of README.md and docs/, from committed data.

quantbench readme            # rewrites every block between two markers
quantbench readme --check    # exit code 1, and a diff, if that would change anything

A block is `<!-- readme: NAME FILE … -->`, and ends at `<!-- end -->`: report/documents.py.
Its NAME is a key of TABLES or PICTURES; its FILE is a log, or JSON that a command wrote into
docs/data/. A picture is drawn anew when its data have changed, since another version of the drawing
library gives other bytes; `--redraw` draws all.
"""

import difflib
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from quantbench import files
from quantbench.cli import Command
from quantbench.errors import LogError, UsageError
from quantbench.report import doc_pictures, doc_tables
from quantbench.report.documents import Block, made, rewritten

DOCUMENTS = ("README.md", "docs/*.md")
STAMP = re.compile(r"<!-- drawn from ([0-9a-f]{16}) -->\n?$")


@click.command(cls=Command)
@click.argument("documents", nargs=-1)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if something would change")
@click.option("--redraw", is_flag=True, help="Draw every picture anew")
def readme(documents: tuple[str, ...], check: bool, redraw: bool) -> None:
    """Rewrite the tables and pictures of DOCUMENTS from the data that they name
    [README.md docs/*.md]."""
    if check and redraw:
        raise UsageError("--check changes nothing, and --redraw draws anew: leave one of them out")
    paths = [Path(name) for name in documents] or _default()
    pictures: dict[Path, str] = {}  # by file, the digest of what it is drawn from
    draw = {}

    def picture(kind: str) -> Block:
        def block(words: Sequence[str]) -> str:
            if len(words) < 3:
                raise UsageError(f"a picture needs data, a file and a title: {kind} {words}")
            source, target, *title = words
            path = Path(target)
            pictures[path], draw[path] = _digest(source), (kind, source)
            shown = os.path.relpath(path, document.parent)
            caption = made(str(path), doc_pictures.CAPTIONS.get(kind, lambda _: ""), source)
            return f"![{' '.join(title).replace('_', ' ')}]({shown})\n\n{caption}".rstrip()

        return block

    blocks = {**doc_tables.TABLES, **{name: picture(name) for name in doc_pictures.PICTURES}}
    new = {}
    for document in paths:
        old = files.read_text("cannot read", document, LogError)
        text = rewritten(str(document), old, blocks)
        if text != old:
            new[document] = (old, text)
    old_pictures = [path for path in pictures if redraw or _stamp(path) != pictures[path]]
    if check:
        for document, texts in new.items():
            before, after = (text.splitlines() for text in texts)
            label = f"{document} as its data have it"
            click.echo(
                "\n".join(difflib.unified_diff(before, after, str(document), label, lineterm=""))
            )
        for path in old_pictures:
            click.echo(f"{path} is not drawn from {draw[path][1]} as that is now")
        if new or old_pictures:
            click.echo("error: stale; quantbench readme rewrites it", err=True)
            sys.exit(1)
        return
    for path in old_pictures:
        files.check_output("picture", str(path), files.is_svg, "SVG")
    said = []
    for path in old_pictures:  # before the documents, which name them
        kind, source = draw[path]
        svg = made(f"picture {path}", doc_pictures.PICTURES[kind], source).rstrip()
        files.write_text("cannot write", path, f"{svg}\n<!-- drawn from {pictures[path]} -->\n")
        said.append(f"Drew {path}")
    for document, (_, text) in new.items():
        files.write_text("cannot write", document, text)
        said.append(f"Rewrote {document}")
    for line in said:  # last: stdout may be closed
        click.echo(line)


def _default() -> list[Path]:
    documents = [path for pattern in DOCUMENTS for path in sorted(Path().glob(pattern))]
    if not documents:
        raise UsageError(f"no {' and no '.join(DOCUMENTS)} here: name the documents")
    return documents


def _digest(source: str) -> str:
    text = files.read_text("cannot read", source, LogError)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stamp(path: Path) -> str | None:
    """The digest at a picture's end; None where there is no picture."""
    if not path.exists():
        return None
    stamp = STAMP.search(files.read_text("cannot read", path, LogError))
    return stamp[1] if stamp else None
