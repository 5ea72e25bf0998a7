"""A sweep of `quantbench latency` from its options to its files.

results, folder = begun(output, common, arms, checkpoints, batch_sizes="1,2")
measure(results, folder, timeout=None)
write(folder, results, report)
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantbench import files
from quantbench.bench.process import WorkerFailed
from quantbench.compare.sampling import latency_ray, latency_sweep
from quantbench.compare.sampling.latency_answers import Possible
from quantbench.compare.sampling.latency_plan import LatencyPlan, make_plan, whole_numbers
from quantbench.compare.sampling.latency_results import LatencyResults
from quantbench.compare.sampling.latency_sweep import Sweep
from quantbench.compare.sampling.results import FILE
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.log.about import about, machine
from quantbench.log.config import RunConfig
from quantbench.progress import say
from quantbench.report import latency_pictures, latency_report
from quantbench.run import environment
from quantbench.text import shown

REPORT, SAMPLES, PICTURE = "report.md", "samples.csv", "latency.svg"
SAVING = 0.005  # largest share of the time that saving the results may take
DEFAULTS = {
    "ranks": "1",
    "sequence_lengths": "100",
    "batch_sizes": "1,2,4,8,16,32",
    "decode_length": 8,
    "runs": 10,
    "warmups": 1,
}


# ---------------------------------------------------------------------------------- what to measure


def begun(
    output: str | None,
    common: RunConfig,
    texts: Sequence[str],
    checkpoints: Sequence[str],
    ray: str | None = None,
    **asked: Any,
) -> tuple[LatencyResults, Path | None]:
    """New results, and the folder of --output. texts: of arms. asked: of DEFAULTS, those given.

    Raises UsageError, one line, for options that nothing can be measured with.
    """
    arms = texts or ("",)
    plan = make_plan(common, arms, checkpoints or ("tiny",), **{**DEFAULTS, **asked})
    folder = _new_folder(output) if output else None
    _check(plan, ray)
    results = LatencyResults(plan, about=about())
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LogError(f"--output {folder}: {error.strerror}") from None
        results.save(folder)
    return results, folder


def resumed(
    resume: str,
    output: str | None,
    common: RunConfig,
    texts: Sequence[str],
    checkpoints: Sequence[str],
    ray: str | None = None,
    **asked: Any,
) -> tuple[LatencyResults, Path]:
    """The results in a folder, to go on with. Options that are given have to be those of its plan.

    Raises UsageError where they are not, or where another machine measured a part of a table.
    """
    folder = Path(resume)
    if output is not None and Path(output).absolute() != folder.absolute():
        raise UsageError(f"--resume {resume} writes into that folder: leave out --output {output}")
    results = LatencyResults.load(folder)
    kept = results.plan
    if texts or common != RunConfig():
        given: dict[str, Any] = {name: _text(getattr(kept, name)) for name in DEFAULTS} | asked
        arms = texts or [arm.text for arm in kept.arms]
        plan = make_plan(common, arms, checkpoints or kept.models, **given)
    else:
        plan = dataclasses.replace(kept, **_values(asked))
        plan = dataclasses.replace(plan, models=list(checkpoints) or kept.models)
    if difference := kept.difference(plan):
        raise UsageError(f"--resume {folder} is of another plan: {difference}")
    if ray is None:
        _refuse_other_machine(results, folder)
    if any(map(results.left, plan.loads)):
        _check(plan, ray)
    return results, folder


def _text(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _values(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        name: whole_numbers("--tp" if name == "ranks" else f"--{name}", value)
        if isinstance(value, str)
        else value
        for name, value in asked.items()
    }


def _refuse_other_machine(results: LatencyResults, folder: Path) -> None:
    here = machine()
    for load in results.plan.loads:
        for length, _ in results.left(load):
            table = results.table(*load.key, length)
            if table and table.cells and table.carried and table.carried.machine != here:
                raise UsageError(
                    f"--resume {folder}: a part of a table was measured on "
                    f"{table.carried.machine}, and this is {here}: resume it there"
                )


def _new_folder(path: str) -> Path:
    folder = Path(path)
    files.check_folder("--output", folder)
    if (folder / FILE).exists():
        raise UsageError(f"--output {path} holds results: --resume {path} goes on with them")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output {path} is neither new nor an empty folder")
    return folder


def _check(plan: LatencyPlan, ray: str | None) -> None:
    """Ask a worker whether the ranks can share the models, and print what it warns of.

    Raises UsageError where they cannot, and what is wrong with a model where it is with every arm.
    """
    if environment.place() is not None:
        raise UsageError(
            "latency starts its ranks itself, as many as --tp says: run it without torchrun"
        )
    if ray is not None:
        latency_ray.connect(ray).shutdown()
    # The devices of other machines are not known here.
    elsewhere = ["--device", "cpu"] if ray is not None else []
    worker, warnings = latency_sweep.start(1), dict[str, None]()
    try:
        for model in plan.models:
            failures = []
            for arm in plan.arms:
                argv = [*arm.argv, "--checkpoint_path", model, *elsewhere]
                try:
                    possible = worker.answer(Possible, "check", argv=argv, ranks=plan.ranks)
                    warnings |= dict.fromkeys(possible.warnings)
                except WorkerFailed as error:
                    if isinstance(error, UsageError) or error.kind == "dead":
                        raise
                    failures.append(error)
            if len(failures) == len(plan.arms):
                raise QuantbenchError(str(failures[0]))
    finally:
        worker.close()
    for line in warnings if ray is None else ():
        say(line)


# ---------------------------------------------------------------------------------- measuring


def measure(
    results: LatencyResults, folder: Path | None, timeout: float | None, ray: str | None = None
) -> None:
    """Every cell that is left. Raises KeyboardInterrupt after Ctrl-C if nothing was measured."""
    keep = _keeper(results, folder)
    try:
        if ray is not None:
            latency_ray.run(results, ray, keep, say, timeout)
        else:
            Sweep(results, keep, say, latency_sweep.start, timeout).run()
    finally:
        if folder:
            results.save(folder)
    if results.ended == "interrupted":
        if not any(cell.samples for table in results.tables for cell in table.cells):
            raise KeyboardInterrupt
        say(f"Interrupted: --resume {folder} goes on" if folder else "Interrupted")


def _keeper(results: LatencyResults, folder: Path | None) -> Callable[[], None]:
    """Saves the results, as often as that takes no more than a small share of the time."""
    next_time = 0.0

    def keep() -> None:
        nonlocal next_time
        started = time.perf_counter()
        if folder is None or started < next_time:
            return
        results.save(folder)
        ended = time.perf_counter()
        next_time = ended + (ended - started) / SAVING

    return keep


def check_measured(results: LatencyResults) -> None:
    """Raise QuantbenchError, with the first reason, where no cell has figures, or none of a model,
    arm and number of ranks."""
    cells = [cell for table in results.tables for cell in table.cells]
    if not any(cell.counted for cell in cells):
        reason = next((cell.reason for cell in cells if cell.reason), "nothing was left to do")
        raise QuantbenchError(f"no cell could be measured: {reason}")
    failed = {}
    for load in results.plan.loads:
        own = [
            cell for table in results.tables if table.key[:3] == load.key for cell in table.cells
        ]
        reasons = [cell.reason for cell in own if cell.reason]
        if reasons and not any(cell.counted for cell in own) and not results.left(load):
            ranks = f" --tp {load.ranks}" if len(results.plan.ranks) > 1 else ""
            model = f" of {load.model}" if len(results.plan.models) > 1 else ""
            failed[f"{shown(load.arm.name)}{model}{ranks}"] = reasons[0]
    if failed:
        name, reason = next(iter(failed.items()))
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise QuantbenchError(
            f"no cell of {name}{others} could be measured: {reason}; the others' tables hold: "
            "change or leave out what failed"
        )


def write(folder: Path, results: LatencyResults, report: str) -> list[str]:
    """The report, every sample and the picture; the names of the files."""
    files.write_text("--output", folder / REPORT, report)
    files.write_text("--output", folder / SAMPLES, latency_report.samples(results))
    names = [FILE, REPORT, SAMPLES]
    if latency_pictures.panels(results):
        path = str(folder / PICTURE)
        files.replace("--output", path, lambda path: latency_pictures.draw(results, path))
        names.append(PICTURE)
    return names
