"""quantbench latency: prefill and decoding over batch sizes, prompts and ranks, as tables.

    quantbench latency --arm "--quantization none" --arm "--quantization fp6" --output DIR
    quantbench latency --checkpoint_path DIR --sequence_lengths 100,1024 --tp 1,2
    quantbench latency --resume DIR              # what was interrupted goes on
    quantbench latency tables DIR                # print the tables of results again

All arms of a cell take turns: docs/latency.md.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from quantbench import environment, files
from quantbench.bench.store import Store
from quantbench.cli import Command, Group, OptionOfOptions
from quantbench.compare.comparing import FILE, new_folder
from quantbench.errors import UsageError
from quantbench.latency import answer as answers
from quantbench.latency import tables as report
from quantbench.latency.answer import Latencies
from quantbench.latency.cell_plan import DECIDED, make_plan
from quantbench.latency.cells import begin
from quantbench.latency.plan import DEFAULTS, check_measured, leave_out, measure, resumed
from quantbench.log.config import RunConfig
from quantbench.log.kinds import Number, Whole
from quantbench.log.options import options
from quantbench.progress import say
from quantbench.typed_json import to_json

REPORT, SAMPLES, PICTURE = "report.md", "samples.csv", "latency.svg"


@click.group(cls=Group, invoke_without_command=True)
@click.option("--checkpoint_path", "checkpoints", multiple=True, metavar="PATH",
              help="Folder, GGUF file, model.pth, hub id, dummy:NAME, or tiny; several are "
              "measured one by one [tiny]")  # fmt: skip
@click.option("--arm", "texts", cls=OptionOfOptions, multiple=True, metavar="OPTIONS",
              help="Options of generate.py for an arm; the first is the baseline [one arm, of the "
              "options below]")  # fmt: skip
@click.option("--batch_sizes", metavar="LIST", help="Prompts at once [1,2,4,8,16,32]")
@click.option("--sequence_lengths", metavar="LIST", help="Tokens of each prompt [100]")
@click.option("--tp", "ranks", metavar="LIST", help="Ranks that share the model [1]")
@click.option("--decode_length", type=Whole(1), help="Tokens generated, prefill's among them [8]")
@click.option("--runs", type=Whole(1), help="Runs of each cell that count [16]")
@click.option("--warmups", type=Whole(0), help="Runs before these, which do not count [1]")
@click.option("--timeout", type=Number(positive=True), metavar="SECONDS",
              help="Give a cell up that takes longer [no limit]")  # fmt: skip
@click.option("--output", metavar="DIR",
              help="Put report, samples, picture and results here, a new folder")  # fmt: skip
@click.option("--resume", metavar="DIR", help="Go on with what --output DIR left")
@click.option("--ray", metavar="ADDRESS",
              help="Measure on a Ray cluster: a task for each model and --tp")  # fmt: skip
@options(without=(*DECIDED, "temperature", "top_k"))
def latency(
    checkpoints: tuple[str, ...],
    texts: tuple[str, ...],
    timeout: float | None,
    output: str | None,
    resume: str | None,
    ray: str | None,
    config: RunConfig,
    **given: Any,
) -> None:
    """Measure latencies of prefill and decoding: batch sizes × prompts × ranks × ARMs."""
    if click.get_current_context().invoked_subcommand:
        return
    if environment.place() is not None:
        raise UsageError(
            "latency starts its ranks itself, as many as --tp says: run it without torchrun"
        )
    asked = {name: value for name, value in given.items() if value is not None}
    folder: Path | None
    if resume:
        folder = Path(resume)
        results, plan = resumed(folder, output, config, texts, checkpoints, asked)
    else:
        plan = make_plan(config, texts or ("",), checkpoints or ("tiny",), **(DEFAULTS | asked))
        folder = new_folder(output)
        results = begin(plan)
        leave_out(results, plan, ray)
    kept = Store(results, folder)  # the folder is ours until the report is written
    measured = measure(kept, plan, timeout, ray)
    text = report.report(measured)
    if folder:  # before stdout, which may be closed
        say(f"Wrote {', '.join(_write(folder, measured, text))} into {folder}")
    kept.file.close()
    click.echo(text, nl=False)
    check_measured(measured)


@latency.command(cls=Command)
@click.argument("folders", metavar="DIR", nargs=-1)
def tables(folders: tuple[str, ...]) -> None:
    """Print the Markdown tables of the results in DIR, which latency --output wrote."""
    if len(folders) != 1:
        raise UsageError(f"tables takes one results folder; given: {len(folders)}")
    click.echo(report.report(answers.load(Path(folders[0]), "tables")), nl=False)


def _write(folder: Path, measured: Latencies, text: str) -> list[str]:
    """The report, every sample, all figures and the picture; the names of the files."""
    value = json.dumps(to_json(measured), indent=1) + "\n"
    texts = {FILE: value, REPORT: text, SAMPLES: report.samples(measured)}
    for name, content in texts.items():
        files.write_text("--output", folder / name, content, follow=False)
    names = [*texts]
    if panels := report.panels(measured):
        draw = partial(report.draw, panels)
        files.replace("--output", folder / PICTURE, draw, follow=False)
        names.append(PICTURE)
    return names
