"""quantbench readme: the tables of README.md and docs/, from committed data.

quantbench readme            # rewrites every block between two markers
quantbench readme --check    # exit code 1, and a diff, if that would change anything

A block is `<!-- readme: NAME FILE … -->`, and ends at `<!-- end -->`: report/documents.py.
Its NAME is a key of TABLES; its FILE is a log, or JSON that a command wrote into docs/data/.
"""

import difflib
import sys
from pathlib import Path

import click

from quantbench import files
from quantbench.cli import Command
from quantbench.errors import LogError, UsageError
from quantbench.report.doc_tables import TABLES
from quantbench.report.documents import rewritten

DOCUMENTS = ("README.md", "docs/*.md")


@click.command(cls=Command)
@click.argument("documents", nargs=-1)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if something would change")
def readme(documents: tuple[str, ...], check: bool) -> None:
    """Rewrite the tables of DOCUMENTS from the data that they name [README.md docs/*.md]."""
    new = {}
    for document in [Path(name) for name in documents] or _default():
        old = files.read_text("cannot read", document, LogError)
        text = rewritten(str(document), old, TABLES)
        if text != old:
            new[document] = (old, text)
    if check:
        for document, texts in new.items():
            before, after = (text.splitlines() for text in texts)
            label = f"{document} as its data have it"
            click.echo(
                "\n".join(difflib.unified_diff(before, after, str(document), label, lineterm=""))
            )
        if new:
            click.echo("error: stale; quantbench readme rewrites it", err=True)
            sys.exit(1)
        return
    for document, (_, text) in new.items():
        files.write_text("cannot write", document, text)
    for document in new:  # last: stdout may be closed
        click.echo(f"Rewrote {document}")


def _default() -> list[Path]:
    documents = [path for pattern in DOCUMENTS for path in sorted(Path().glob(pattern))]
    if not documents:
        raise UsageError(f"no {' and no '.join(DOCUMENTS)} here: name the documents")
    return documents
