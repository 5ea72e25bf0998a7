"""quantbench latency: prefill and decoding over batch sizes, prompts and ranks, as tables.

    quantbench latency --arm "--quantization none" --arm "--quantization fp6" --output DIR
    quantbench latency --checkpoint_path DIR --sequence_lengths 100,1024 --tp 1,2
    quantbench latency --resume DIR              # what was interrupted goes on
    quantbench latency tables DIR                # print the tables of results again

All arms of a cell take turns: docs/latency.md.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantbench import files
from quantbench.answer import latency as answers
from quantbench.answer.latency import Latencies
from quantbench.bench import ray_tasks, store
from quantbench.bench.answers import Planned
from quantbench.bench.arm import Arm
from quantbench.bench.cell_plan import DECIDED, CellPlan, make_plan, whole_numbers, written
from quantbench.bench.cells import Cells, begin, is_left
from quantbench.bench.process import Process
from quantbench.bench.store import Results, Store
from quantbench.cli import Command, Group, OptionOfOptions
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.log.config import RunConfig, argv
from quantbench.log.options import options
from quantbench.plans.comparing import FILE, new_folder, warn_of_threads
from quantbench.progress import say
from quantbench.report import latency as report
from quantbench.report import latency_pictures
from quantbench.run import environment
from quantbench.text import shown
from quantbench.typed_json import to_json

REPORT, SAMPLES, PICTURE = "report.md", "samples.csv", "latency.svg"
DEFAULTS: dict[str, Any] = {
    "ranks": "1",
    "sequence_lengths": "100",
    "batch_sizes": "1,2,4,8,16,32",
    "decode_length": 8,
    "runs": 16,
    "warmups": 1,
}


@click.group(cls=Group, invoke_without_command=True)
@click.option("--checkpoint_path", "checkpoints", multiple=True, metavar="PATH",
              help="Folder, model.pth, hub id, dummy:NAME, or tiny; several are measured in turn "
              "[tiny]")  # fmt: skip
@click.option("--arm", "texts", cls=OptionOfOptions, multiple=True, metavar="OPTIONS",
              help="Options of generate.py for an arm; the first is the baseline [one arm, of the "
              "options below]")  # fmt: skip
@click.option("--batch_sizes", metavar="LIST", help="Prompts at once [1,2,4,8,16,32]")
@click.option("--sequence_lengths", metavar="LIST", help="Tokens of each prompt [100]")
@click.option("--tp", "ranks", metavar="LIST", help="Ranks that share the model [1]")
@click.option("--decode_length", type=int, help="Tokens generated, prefill's among them [8]")
@click.option("--runs", type=int, help="Runs of each cell that count [16]")
@click.option("--warmups", type=int, help="Runs before these, which do not count [1]")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
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
    **given: Any,
) -> None:
    """Measure latencies of prefill and decoding: batch sizes × prompts × ranks × ARMs."""
    if click.get_current_context().invoked_subcommand:
        return
    if environment.place() is not None:
        raise UsageError(
            "latency starts its ranks itself, as many as --tp says: run it without torchrun"
        )
    asked = {name: value for name in DEFAULTS if (value := given.pop(name)) is not None}
    common = RunConfig(**given)
    folder: Path | None
    if resume:
        folder = Path(resume)
        results, plan = _resumed(folder, output, common, texts, checkpoints, asked)
    else:
        plan = make_plan(common, texts or ("",), checkpoints or ("tiny",), **(DEFAULTS | asked))
        folder = new_folder(output)
        results = begin(plan)
        _leave_out(results, plan, ray)
    measured = _measured(Store(results, folder), plan, timeout, ray)
    text = report.report(measured)
    if folder:  # before stdout, which may be closed
        say(f"Wrote {', '.join(_write(folder, measured, text))} into {folder}")
    click.echo(text, nl=False)
    _check_measured(measured)


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
    measured = answers.load(Path(folders[0]), "tables")
    text = report.report(measured)
    if picture and not latency_pictures.panels(measured):
        raise LogError("--picture: there are no two points of a line to draw")
    if csv_path:
        files.write_text("--csv", csv_path, report.samples(measured))
    if picture:
        files.replace("--picture", picture, lambda path: latency_pictures.draw(measured, path))
    click.echo(text, nl=False)


# ------------------------------------------------------------------------------ what to measure


def _resumed(
    folder: Path,
    output: str | None,
    common: RunConfig,
    texts: Sequence[str],
    checkpoints: Sequence[str],
    asked: dict[str, Any],
) -> tuple[Results, CellPlan]:
    """The results in a folder, to go on with. Raises UsageError where options that are given are
    not those of its plan, or its samples are of another commit or machine."""
    if output is not None and Path(output).absolute() != folder.absolute():
        raise UsageError(f"--resume {folder} writes into that folder: leave out --output {output}")
    results, kept = answers.resumable(folder)
    if texts or common != RunConfig():
        given = {name: getattr(kept, name) for name in DEFAULTS}
        given = {n: written(v) if isinstance(v, list) else v for n, v in given.items()} | asked
        arms = texts or [arm.text for arm in kept.arms]
        plan = make_plan(common, arms, checkpoints or kept.models, **given)
    else:
        flags = {"ranks": "--tp"}
        new: dict[str, Any] = {
            name: whole_numbers(flags.get(name, f"--{name}"), v) if isinstance(v, str) else v
            for name, v in asked.items()
        }
        plan = dataclasses.replace(kept, models=list(checkpoints) or kept.models, **new)
    if difference := kept.difference(plan):
        raise UsageError(f"--resume {folder} is of another plan: {difference}")
    if any(is_left(results, kept, number) for number in range(len(results.arms))):
        store.same_origin(results, f"--resume {folder}")
    return results, kept


def _leave_out(results: Results, plan: CellPlan, ray: str | None) -> None:
    """Give cells that cannot run the reason, before a model is loaded. Raises UsageError, or
    QuantbenchError, with the first reason where that is every cell."""
    if ray is not None:
        ray_tasks.connect(ray).shutdown()
    configs = [cell.config(plan.decode_length) for cell in plan.cells]
    if ray is not None:  # the devices and the memory of other machines are not known here
        configs = [dataclasses.replace(config, device="cpu") for config in configs]
    worker = Process()
    try:
        argvs = [argv(config, said=True) for config in configs]
        runs = worker.answer(list[Planned], "plans", argvs=argvs)
    finally:
        worker.close()
    for arm, run in zip(results.arms, runs, strict=True):
        if run.problem and (run.kind == "usage" or ray is None):
            arm.unable = arm.failed = run.problem.replace("--max_new_tokens", "--decode_length")
    if all(arm.unable for arm in results.arms):
        failure = UsageError if runs[0].kind == "usage" else QuantbenchError
        raise failure(results.arms[0].unable or "")
    if ray is None:  # once for each arm and number of ranks
        some = {
            (cell.arm.name, cell.place.ranks): c
            for cell, c in zip(plan.cells, configs, strict=True)
        }
        warn_of_threads([Arm(name, "", config) for (name, _), config in some.items()])


# ------------------------------------------------------------------------------------ measuring


def _measured(kept: Store, plan: CellPlan, timeout: float | None, ray: str | None) -> Latencies:
    """Every cell that is left. Raises KeyboardInterrupt after Ctrl-C if nothing was measured."""
    if ray is not None:
        ray_tasks.run(kept, plan, ray, say, timeout)
    else:
        Cells(kept, plan, timeout=timeout).run()
    measured = answers.tables(kept.results, plan)
    if measured.ended == "interrupted":
        if not any(cell.samples for table in measured.tables for cell in table.cells):
            raise KeyboardInterrupt
        say(f"Interrupted: --resume {kept.folder} goes on" if kept.folder else "Interrupted")
    return measured


def _write(folder: Path, measured: Latencies, text: str) -> list[str]:
    """The report, every sample, all figures and the picture; the names of the files."""
    files.write_text("--output", folder / REPORT, text)
    files.write_text("--output", folder / SAMPLES, report.samples(measured))
    value = json.dumps(to_json(measured), indent=1) + "\n"
    files.write_text("--output", folder / FILE, value)
    names = [FILE, REPORT, SAMPLES]
    if latency_pictures.panels(measured):
        path = str(folder / PICTURE)
        files.replace("--output", path, lambda path: latency_pictures.draw(measured, path))
        names.append(PICTURE)
    return names


def _check_measured(measured: Latencies) -> None:
    """Raise QuantbenchError, with the first reason, where no cell has figures, or none of a model,
    arm and number of ranks."""
    cells = [cell for table in measured.tables for cell in table.cells]
    if not any(cell.counted for cell in cells):
        reason = next((cell.reason for cell in cells if cell.reason), "nothing was left to do")
        raise QuantbenchError(f"no cell could be measured: {reason}")
    failed, plan = {}, measured.plan
    for key in dict.fromkeys(table.key[:3] for table in measured.tables):
        own = [c for table in measured.tables if table.key[:3] == key for c in table.cells]
        model, arm, ranks = key
        if all(cell.reason for cell in own):
            name = f"{shown(arm)}{f' of {model}' * (len(plan.models) > 1)}"
            failed[f"{name}{f' --tp {ranks}' * (len(plan.ranks) > 1)}"] = own[0].reason
    if failed:
        name, why = next(iter(failed.items()))
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise QuantbenchError(
            f"no cell of {name}{others} could be measured: {why}; the others' tables hold: change "
            "or leave out what failed"
        )
