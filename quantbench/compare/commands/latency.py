"""quantbench latency: prefill and decoding over batch sizes, prompts and ranks, as tables.

    quantbench latency --arm "--quantization none" --arm "--quantization fp6" --output DIR
    quantbench latency --checkpoint_path DIR --sequence_lengths 100,1024 --tp 1,2
    quantbench latency --resume DIR              # what was interrupted goes on
    quantbench latency tables DIR                # print the tables of results again

Each model, arm and number of ranks is loaded once, in a process of its own: docs/latency.md.
"""

from pathlib import Path
from typing import Any

import click

from quantbench import files
from quantbench.cli import Command, Group, OptionOfOptions
from quantbench.compare import latency_sweeps
from quantbench.compare.sampling.latency_plan import DECIDED
from quantbench.compare.sampling.latency_results import LatencyResults
from quantbench.errors import LogError, UsageError
from quantbench.log.config import RunConfig
from quantbench.log.options import options
from quantbench.progress import say
from quantbench.report import latency_pictures, latency_report


@click.group(cls=Group, invoke_without_command=True)
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
    output: str | None,
    resume: str | None,
    ray: str | None,
    **given: Any,
) -> None:
    """Measure latencies of prefill and decoding: batch sizes × prompts × ranks × ARMs."""
    if click.get_current_context().invoked_subcommand:
        return
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
    text = latency_report.report(results)
    if folder:  # before stdout, which may be closed
        written = latency_sweeps.write(folder, results, text)
        say(f"Wrote {', '.join(written)} into {folder}")
    click.echo(text, nl=False)
    latency_sweeps.check_measured(results)


@latency.command(cls=Command)
@click.argument("folders", metavar="DIR", nargs=-1)
@click.option("--csv", "csv_path", metavar="PATH", help="Write every sample here")
@click.option("--picture", metavar="PATH", help="Draw latency against throughput, and scaling, SVG")
def tables(folders: tuple[str, ...], csv_path: str | None, picture: str | None) -> None:
    """Print the Markdown tables of the results in DIR, which latency --output wrote."""
    if len(folders) != 1:
        raise UsageError(f"tables takes one results folder; given: {len(folders)}")
    files.check_outputs([
        files.Output("--csv", csv_path, files.begins_with(b"model,arm,"), "table of samples"),
        files.Output("--picture", picture, files.is_svg, "SVG"),
    ])  # fmt: skip
    results = LatencyResults.load(Path(folders[0]), "tables")
    text = latency_report.report(results)
    if picture and not latency_pictures.panels(results):
        raise LogError("--picture: there are no two points of a line to draw")
    if csv_path:
        files.write_text("--csv", csv_path, latency_report.samples(results))
    if picture:
        files.replace("--picture", picture, lambda path: latency_pictures.draw(results, path))
    click.echo(text, nl=False)
