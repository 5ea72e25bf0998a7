"""python -m compare latency: latency tables over batch size and sequence length, and their check.

python -m compare latency check report.md   # does each table render as it stands, do figures agree
python -m compare latency tables DIR --style legacy  # write the tables of measured results anew
"""

from collections.abc import Sequence
from pathlib import Path

import click

import files
from cli import Command, Group
from compare.figures.latency import STYLES
from compare.figures.latency_checks import findings
from compare.output import latency_pictures, latency_report
from compare.output.latency_tables import LONGEST, Document, MarkdownTable, read
from compare.sampling.latency_results import LatencyResults
from errors import LogError, QuantbenchError, UsageError
from text import counted, shown, size


@click.group(cls=Group)
def latency() -> None:
    """Latency tables of prefill and decoding."""


@latency.command(cls=Command)
@click.argument("paths", metavar="FILE...", nargs=-1)
def check(paths: tuple[str, ...]) -> None:
    """Read the latency tables in each Markdown FILE, ours or text-generation-inference's.

    Exit code 1 where a table does not render byte for byte as it stands, or a file has none. What
    does not agree within the tables is listed by line, and leaves the exit code alone.
    """
    if not paths:
        raise UsageError("check takes one or more files with latency tables; none is given")
    documents = {path: _document(path) for path in dict.fromkeys(paths)}
    empty = [path for path, document in documents.items() if not document.tables]
    if empty:
        raise QuantbenchError(
            f"{empty[0]}: there is no latency table in it; they begin with | Step or | Parameter"
        )
    lengths = {
        at.table.number("Decode Length")
        for document in documents.values()
        for at in document.tables
        if at.table is not None and at.table.kind == "parameters"
    }
    common = lengths.pop() if len(lengths) == 1 else None
    disagreements = 0
    for path, document in documents.items():
        disagree = findings(document, common)
        disagreements += len(disagree)
        click.echo(f"{path}: {_verdict(document.tables)}")
        for line, text in sorted([*_states(document), *((f.line, f.text) for f in disagree)]):
            click.echo(f"  line {line}: {text}")
    tables = [at for document in documents.values() for at in document.tables]
    if len(documents) > 1:
        click.echo(f"{counted(len(documents), 'file')}: {_verdict(tables)}")
    click.echo(f"{counted(disagreements, 'line')} with figures that do not agree")
    if not all(at.renders for at in tables):
        raise click.exceptions.Exit(1)


@latency.command(cls=Command)
@click.argument("folders", metavar="DIR", nargs=-1)
@click.option("--style", default="correct", metavar="correct|legacy", help="[correct]")
@click.option("--csv", "csv_path", metavar="PATH", help="Write every sample here")
@click.option("--picture", metavar="PATH", help="Draw latency against throughput, and scaling, SVG")
def tables(folders: tuple[str, ...], style: str, csv_path: str | None, picture: str | None) -> None:
    """Print the Markdown tables of the results in DIR, which latency --output wrote.

    legacy: as text-generation-inference's benchmark has them, its percentiles and rates included.
    """
    if len(folders) != 1:
        raise UsageError(f"tables takes one results folder; given: {len(folders)}")
    chosen = next((name for name in STYLES if name == style), None)
    if chosen is None:
        raise UsageError(f"--style takes {' or '.join(STYLES)}; given: {shown(style)}")
    files.check_output("--csv", csv_path, _is_samples, "table of samples")
    files.check_output("--picture", picture, files.is_svg, "SVG")
    results = LatencyResults.load(Path(folders[0]), "tables")
    text = latency_report.report(results, chosen)
    if csv_path:
        files.write_text("--csv", csv_path, latency_report.samples(results))
    if picture:
        if not latency_pictures.panels(results):
            raise LogError("--picture: there are no two points of a line to draw")
        files.replace("--picture", picture, lambda path: latency_pictures.draw(results, path))
    click.echo(text, nl=False)


def _is_samples(head: bytes) -> bool:
    return head.startswith(b"model,arm,")


def _document(path: str) -> Document:
    data = files.read_bytes("cannot read", path, QuantbenchError)
    if len(data) > LONGEST:
        raise QuantbenchError(
            f"cannot read {path}: {size(len(data))} are more than the {size(LONGEST)} of a report"
        )
    with files.named("cannot read", path, QuantbenchError):
        return read(data.decode("utf-8"))


def _verdict(tables: Sequence[MarkdownTable]) -> str:
    good = sum(at.renders for at in tables)
    return f"{counted(len(tables), 'table')}, of which {good} re-render byte for byte"


def _states(document: Document) -> list[tuple[int, str]]:
    """Of every table: what it is, or why it does not render."""
    lines = [(line, "a table of another kind, not read") for line in document.others]
    for at in document.tables:
        if at.table is None:
            lines.append((at.line, f"a table that cannot be read: {at.problem}"))
            continue
        what = f"{at.table.kind}, {counted(len(at.table.rows or at.table.parameters), 'row')}"
        if at.table.kind != "parameters":
            what += f", {at.table.style} style"
        lines.append((at.line, what))
        if at.difference:
            line, stands, ours = at.difference
            lines.append((line, f"{shown(stands, 200)} would be written {shown(ours, 200)}"))
    return lines
