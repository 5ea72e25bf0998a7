"""quantbench readme: the tables of README.md and docs/, from committed data.

quantbench readme            # rewrites every block between two markers
quantbench readme --check    # exit code 1: something would change, or figures are of changed code

A block is `<!-- readme: NAME FILE … -->`, and ends at `<!-- end -->`: documents/documents.py.
Its NAME is a key of BLOCKS; its FILE is a log, or JSON that a command wrote into docs/data/.
"""

import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from quantbench import command_files as all_commands
from quantbench import files
from quantbench.cli import Command
from quantbench.documents.documents import BEGIN, rewritten
from quantbench.documents.tables import TABLES
from quantbench.errors import LogError, UsageError
from quantbench.help_text import OWN, examples, sections
from quantbench.log.origin import knows
from quantbench.progress import say
from quantbench.report.columns import table

DOCUMENTS = ("README.md", "docs/*.md")
COMMIT = re.compile(r'"(?:git_)?commit": "([0-9a-f]{7,})(-dirty)?"')


@click.command(cls=Command)
@click.argument("documents", nargs=-1)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if something would change")
def readme(documents: tuple[str, ...], check: bool) -> None:
    """Rewrite the tables of DOCUMENTS from the data that they name [README.md docs/*.md]."""
    new, measured = {}, set[tuple[str, str, str]]()
    every = [path for pattern in DOCUMENTS for path in sorted(Path().glob(pattern))]
    if not (documents or every):
        raise UsageError(f"no {' and no '.join(DOCUMENTS)} here: name the documents")
    for document in map(Path, documents) if documents else every:
        old = files.read_text("cannot read", document, LogError)
        text = rewritten(str(document), old, BLOCKS)
        if text != old:
            new[document] = (old, text)
        measured |= set(_commits(text))
    if check:
        for document, texts in new.items():
            before, after = (text.splitlines() for text in texts)
            label = f"{document} as its data have it"
            click.echo(
                "\n".join(difflib.unified_diff(before, after, str(document), label, lineterm=""))
            )
        changed = sorted((path, digits) for path, digits, dirty in measured if dirty)
        for path, digits in changed:
            why = f"{path} is of commit {digits[:7]} with changes"
            say(f"error: {why}; commit them, and run its command again")
        for path, digits, dirty in sorted(measured):
            if not dirty and not knows(digits):  # as when a branch was squashed since
                say(f"note: {path} is of commit {digits[:7]}, which git does not know")
        if new:
            say("error: stale; quantbench readme rewrites it")
        sys.exit(bool(new or changed))
    for document, (_, text) in new.items():
        files.write_text("cannot write", document, text)
    for document in new:  # last: stdout may be closed
        click.echo(f"Rewrote {document}")


def _commits(document: str) -> Iterator[tuple[str, str, str]]:
    """The data that a document names: file, commit, and "-dirty" where the code had changes."""
    for path in [word for block in BEGIN.finditer(document) for word in block["words"].split()]:
        if path.endswith(".json"):
            for digits, dirty in COMMIT.findall(files.read_text("cannot read", path, LogError)):
                yield path, digits, dirty


# --------------------------------------------------------------------------------- the commands


def commands(words: Sequence[str]) -> str:
    """commands: every command, its own options, and its examples."""
    parts: list[str] = []
    for name in sorted(all_commands.command_files().keys() - {"generate"}):
        parts += _described(all_commands.command(name), "quantbench")
    return "\n\n".join(parts)


def _described(command: click.Command, parent: str) -> Iterator[str]:
    name = f"{parent} {command.name}"
    context = click.Context(command, info_name=name)
    yield f"## {name}\n\n{' '.join((command.help or '').split())}"
    groups = sections(command.params)
    own = [(f"`{given}`", text) for given, text in groups.pop(OWN, []) if given != "--debug"]
    words = [word for word in command.collect_usage_pieces(context) if word != "[OPTIONS]"]
    if words:
        yield f"Takes {' '.join(words)}."
    if own:
        yield table(("option", "meaning"), own)
    if groups:
        yield f"And of [generate's options](options.md): {', '.join(groups)}."
    if lines := examples(command.callback) if parent == "quantbench" else []:
        yield "\n".join(f"    {line}" for line in lines)
    if isinstance(command, click.Group):
        for sub in command.commands.values():
            yield from _described(sub, name)


BLOCKS = {**TABLES, "commands": commands}
