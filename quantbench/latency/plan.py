"""A sweep of `latency`: what is measured, what cannot run, what --resume goes on with; and which of
its tables `metrics` compares."""

import dataclasses
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from quantbench.bench import store
from quantbench.bench.answers import Runnable
from quantbench.bench.process import Process
from quantbench.bench.store import Results, Store
from quantbench.cli import ended_by
from quantbench.compare.comparing import warn_of_threads
from quantbench.errors import QuantbenchError, UsageError
from quantbench.latency import answer as answers
from quantbench.latency import ray_tasks
from quantbench.latency.answer import Latencies
from quantbench.latency.cell_plan import CellPlan, make_plan, numbers
from quantbench.latency.cells import Cells, left
from quantbench.latency.metrics import Side, TableComparison, compare
from quantbench.log.config import RunConfig, argv
from quantbench.progress import say
from quantbench.text import shown

DEFAULTS: dict[str, Any] = {
    "ranks": "1",
    "sequence_lengths": "100",
    "batch_sizes": "1,2,4,8,16,32",
    "decode_length": 8,
    "runs": 16,
    "warmups": 1,
}


def resumed(
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
    models = list(checkpoints) or kept.models
    if texts or common != RunConfig():
        given = {name: getattr(kept, name) for name in DEFAULTS} | asked
        plan = make_plan(common, texts or [arm.text for arm in kept.arms], models, **given)
    else:
        plan = dataclasses.replace(kept, models=models, **numbers(asked))
    if difference := kept.difference(plan):
        raise UsageError(f"--resume {folder} is of another plan: {difference}")
    if left(results):
        store.same_origin(results, f"--resume {folder}")
    return results, kept


def leave_out(results: Results, plan: CellPlan, ray: str | None) -> None:
    """Give cells that cannot run the reason, before a model is loaded. Raises UsageError, or
    QuantbenchError, with the first reason where that is every cell."""
    if ray is not None:
        ray_tasks.connect(ray).shutdown()
    configs = [arm.config for arm in results.arms]
    if ray is not None:  # the devices and the memory of other machines are not known here
        configs = [dataclasses.replace(config, device="cpu") for config in configs]
    argvs = [argv(config, said=True) for config in configs]
    with closing(Process()) as worker:
        runs = worker.answer(list[Runnable], "plans", argvs=argvs)
    for arm, run in zip(results.arms, runs, strict=True):
        if run.problem and (run.kind == "usage" or ray is None):
            arm.unable = arm.failed = run.problem.replace("--max_new_tokens", "--decode_length")
    if all(arm.unable for arm in results.arms):
        failure = UsageError if runs[0].kind == "usage" else QuantbenchError
        raise failure(results.arms[0].unable or "")
    if ray is None:  # once for each arm and number of ranks
        some = {(cell.arm.name, cell.ranks): c for cell, c in zip(plan.cells, configs, strict=True)}
        warn_of_threads([(name, config) for (name, _), config in some.items()])


def measure(kept: Store, plan: CellPlan, timeout: float | None, ray: str | None) -> Latencies:
    """Every cell that is left. Raises KeyboardInterrupt after Ctrl-C if nothing was measured."""
    if ray is not None:
        ray_tasks.run(kept, plan, ray, say, timeout)
    else:
        Cells(kept, plan, timeout=timeout).run()
    measured = answers.tables(kept.results, plan)
    if measured.ended == "interrupted":
        if not any(cell.samples for table in measured.tables for cell in table.cells):
            raise KeyboardInterrupt
        say(ended_by() + (f"; --resume {kept.folder} goes on" if kept.folder else ""))
    return measured


def check_measured(measured: Latencies) -> None:
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


# ------------------------------------------------------------------------ which tables, in metrics


def sides(option: str, text: str, ranks: int | None) -> list[Side]:
    """The tables of one arm of a folder. Raises UsageError, one line."""
    whole = os.path.isdir(text) or ":" not in text
    folder, colon, arm = (text, "", "") if whole else text.rpartition(":")
    measured = answers.load(Path(folder), option)
    plan, arms = measured.plan, [planned.name for planned in measured.plan.arms]
    if not colon and len(arms) == 1:
        arm = arms[0]
    if arm not in arms:
        given = f"there is no arm {shown(arm)}" if colon else "it has several arms"
        raise UsageError(f"{option} {folder}: {given}; give {folder}:ARM, one of {_listed(arms)}")
    chosen = [
        Side(folder, table, plan.decode_length, plan.runs)
        for table in measured.tables
        if table.arm == arm and ranks in (None, table.ranks)
    ]
    if not chosen:
        there = sorted({table.ranks for table in measured.tables if table.arm == arm})
        what = f"of {ranks} ranks" if ranks else "measured"
        raise UsageError(
            f"{option} {text}: no table {what}; there are tables of {_listed(there)} ranks"
        )
    return chosen


def pairs(baselines: Sequence[Side], targets: Sequence[Side]) -> list[TableComparison]:
    """The tables of the same model, ranks and sequence length. A model or a number of ranks that
    is the only one on its side may differ from the other's."""
    if {(s.folder, s.table.key) for s in baselines} == {(s.folder, s.table.key) for s in targets}:
        raise UsageError("--baseline and --target are the same tables: give another arm or folder")
    lengths = [{side.decode_length for side in some} for some in (baselines, targets)]
    if lengths[0] != lengths[1]:
        raise UsageError(
            f"the baseline decodes {_listed(lengths[0])} tokens and the target "
            f"{_listed(lengths[1])}: not the same work"
        )
    single = [
        all(len({side.table.key[place] for side in some}) == 1 for some in (baselines, targets))
        for place in (0, 2)
    ]

    def key(side: Side) -> tuple[object, ...]:
        table = side.table
        model = None if single[0] else table.checkpoint
        return model, None if single[1] else table.ranks, table.sequence_length

    by_key = {key(side): side for side in targets}
    found = [compare(side, by_key[key(side)]) for side in baselines if key(side) in by_key]
    if not found:
        both = [sorted({side.table.sequence_length for side in s}) for s in (baselines, targets)]
        raise UsageError(
            "no table of the baseline has one of the same model, ranks and sequence length in the "
            f"target: sequence lengths {_listed(both[0])} and {_listed(both[1])}"
        )
    return found


def _listed(names: Sequence[object] | set[int]) -> str:
    return ", ".join(map(str, names)) or "none"
