"""quantbench latency: prefill and decoding over batch sizes, prompts and ranks, as tables.

    quantbench latency --arm "--quantization none" --arm "--quantization fp6" --output DIR
    quantbench latency --checkpoint_path DIR --sequence_lengths 100,1024 --tp 1,2
    quantbench latency --resume DIR              # what was interrupted goes on
    quantbench latency check report.md           # does each table render as it stands
    quantbench latency tables DIR --style legacy  # write the tables of results anew

Each model, arm and number of ranks is loaded once, in a process of its own: docs/latency.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantbench import files
from quantbench.cli import Command, OptionOfOptions, say
from quantbench.compare import latency_sweeps
from quantbench.compare.figures.latency import STYLES, Style
from quantbench.compare.figures.latency_checks import findings
from quantbench.compare.output import latency_pictures, latency_report
from quantbench.compare.output.latency_tables import LONGEST, Document, MarkdownTable, read
from quantbench.compare.sampling.latency_plan import DECIDED
from quantbench.compare.sampling.latency_results import LatencyResults
from quantbench.compare.subcommands import WithSubcommands
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.log.config import RunConfig, options
from quantbench.text import counted, shown, size


@click.command(cls=WithSubcommands)
@click.option("--checkpoint_path", "checkpoints", multiple=True, metavar="PATH",
              help="Folder, model.pth, hub id, dummy:NAME, or tiny; several are measured in turn "
              "[tiny]")  # fmt: skip
@click.option("--arm", "texts", cls=OptionOfOptions, multiple=True, metavar="OPTIONS",
              help="Options of generate.py for an arm [one arm, of the options below]")  # fmt: skip
@click.option("--batch_sizes", metavar="LIST", help="Prompts at once [1,2,4,8,16,32]")
@click.option("--sequence_lengths", metavar="LIST", help="Tokens of each prompt [100]")
@click.option("--tp", "ranks", metavar="LIST", help="Ranks that share the model [1]")
@click.option("--decode_length", type=int, help="Tokens generated, prefill's among them [8]")
@click.option("--runs", type=int, help="Runs of each cell that count [10]")
@click.option("--warmups", type=int, help="Runs before these, which do not count [1]")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="Give a cell up that takes longer [no limit]")  # fmt: skip
@click.option("--style", default="correct", metavar="correct|legacy",
              help="Tables' style; legacy is text-generation-inference's [correct]")  # fmt: skip
@click.option("--output", metavar="DIR",
              help="Put report, samples, picture and results.json here, a new folder")  # fmt: skip
@click.option("--resume", metavar="DIR", help="Go on with what --output DIR left")
@click.option("--ray", metavar="ADDRESS",
              help="Measure on a Ray cluster: a task for each model, arm and --tp")  # fmt: skip
@options(without=(*DECIDED, "temperature", "top_k"))
def latency(
    checkpoints: tuple[str, ...],
    texts: tuple[str, ...],
    timeout: float | None,
    style: str,
    output: str | None,
    resume: str | None,
    ray: str | None,
    **given: Any,
) -> None:
    """Measure latencies of prefill and decoding: batch sizes × prompts × ranks × ARMs."""
    chosen = _style(style)
    lists = ("batch_sizes", "sequence_lengths", "ranks", "decode_length", "runs", "warmups")
    asked = {name: value for name in lists if (value := given.pop(name)) is not None}
    common = RunConfig(**given)
    folder: Path | None
    if resume:
        results, folder = latency_sweeps.resumed(
            resume, output, common, texts, checkpoints, ray, **asked
        )
    else:
        results, folder = latency_sweeps.begun(output, common, texts, checkpoints, ray, **asked)
    latency_sweeps.measure(results, folder, timeout, ray)
    text = latency_report.report(results, chosen)
    if folder:  # before stdout, which may be closed
        written = latency_sweeps.write(folder, results, text)
        say(f"Wrote {', '.join(written)} into {folder}")
    click.echo(text, nl=False)
    latency_sweeps.check_measured(results)


def _style(text: str) -> Style:
    chosen = next((name for name in STYLES if name == text), None)
    if chosen is None:
        raise UsageError(f"--style takes {' or '.join(STYLES)}; given: {shown(text)}")
    return chosen


@latency.subcommand
@click.command(cls=Command)
@click.argument("paths", metavar="FILE...", nargs=-1)
def check(paths: tuple[str, ...]) -> None:
    """Read the latency tables in each Markdown FILE, ours or text-generation-inference's.

    Each is read, and written again. Exit code 1 where a table is not intact: it cannot be read, or
    would be written otherwise than it stands; and where a file has none. What does not agree within
    the tables is listed by line, and leaves the exit code alone.
    """
    if not paths:
        raise UsageError("check takes one or more files with latency tables; none is given")
    documents = {path: _document(path) for path in dict.fromkeys(paths)}
    empty = [path for path, document in documents.items() if not document.tables]
    if empty:
        raise QuantbenchError(
            f"{empty[0]}: there is no latency table in it; one begins with | Step or | Parameter"
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
        said = [*_states(document), *((f.line, f.text) for f in disagree)]
        for line, text in sorted(said, key=lambda pair: pair[0]):
            click.echo(f"  line {line}: {text}")
    tables = [at for document in documents.values() for at in document.tables]
    if len(documents) > 1:
        click.echo(f"{counted(len(documents), 'file')}: {_verdict(tables)}")
    click.echo(f"{counted(disagreements, 'line')} with figures that do not agree")
    if not all(at.renders for at in tables):
        raise click.exceptions.Exit(1)


@latency.subcommand
@click.command(cls=Command)
@click.argument("folders", metavar="DIR", nargs=-1)
@click.option(
    "--style", default="correct", metavar="correct|legacy", help="Style of the tables [correct]"
)
@click.option("--csv", "csv_path", metavar="PATH", help="Write every sample here")
@click.option("--picture", metavar="PATH", help="Draw latency against throughput, and scaling, SVG")
def tables(folders: tuple[str, ...], style: str, csv_path: str | None, picture: str | None) -> None:
    """Print the Markdown tables of the results in DIR, which latency --output wrote.

    legacy: as text-generation-inference's benchmark has them, its percentiles and rates included.
    """
    if len(folders) != 1:
        raise UsageError(f"tables takes one results folder; given: {len(folders)}")
    chosen = _style(style)
    files.check_outputs([
        files.Output("--csv", csv_path, files.begins_with(b"model,arm,"), "table of samples"),
        files.Output("--picture", picture, files.is_svg, "SVG"),
    ])  # fmt: skip
    results = LatencyResults.load(Path(folders[0]), "tables")
    text = latency_report.report(results, chosen)
    if picture and not latency_pictures.panels(results):
        raise LogError("--picture: there are no two points of a line to draw")
    if csv_path:
        files.write_text("--csv", csv_path, latency_report.samples(results))
    if picture:
        files.replace("--picture", picture, lambda path: latency_pictures.draw(results, path))
    click.echo(text, nl=False)


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
    return f"{counted(len(tables), 'table')}, of which {good} {'is' if good == 1 else 'are'} intact"


def _states(document: Document) -> list[tuple[int, str]]:
    """The line at which each table begins, and what the table is or why it does not render."""
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
