"""A quantized model that is kept on disk between the processes of a comparison.

    loaded = load(plan, folder, report, say)

The first process quantizes the model and writes it into `folder` as --save does, layer by layer;
every later one reads it from there. Beside it lies `model.json` with all that the weights follow
from, and a stamp of each file. Where these are not what they would be now, the folder is written
anew. Where it cannot be written, the model is loaded all the same.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path

from quantbench import files, models, ops, quantize, unfinished
from quantbench.errors import CheckpointError, KernelError, LogError
from quantbench.log.origin import versions
from quantbench.models.formats.base import NotSaved
from quantbench.models.formats.saved import SavedModel
from quantbench.models.tokenizer import FILES
from quantbench.progress import Report, Say
from quantbench.quantize.spec import FullPrecision
from quantbench.run.loading import Loaded, saved_scheme
from quantbench.run.loading import load as load_anew
from quantbench.run.plan import Plan

FACTS = unfinished.FACTS
# What turns a checkpoint into quantized numbers.
CODE = (
    *(Path(next(iter(package.__path__))) for package in (models, ops, quantize)),
    *map(Path(__file__).with_name, ("calibration.py", "awq.py", "calibration.txt")),
)
SHARD_BYTES = 1 << 20  # hardly more than a layer: what waits to be written counts as memory
RESERVE = 2_000_000_000  # bytes of the disk to leave free


def load(plan: Plan, folder: Path | None, report: Report, say: Say) -> Loaded:
    """The planned model, from `folder` if it holds it, else as run.loading.load does.

    A model in full precision, or from a checkpoint that --save wrote, is read where it lies. Ranks
    that share a model read and quantize their parts anew.
    """
    lies_there = isinstance(plan.spec, FullPrecision) or plan.checkpoint.saved is not None
    if folder is None or lies_there or plan.split is not None:
        return load_anew(plan, report, say)
    known, written = facts(plan), None

    def contents() -> object:
        """What FACTS holds when the folder is whole."""
        stamps = [_stamp(file) for file in sorted(folder.glob("*")) if file.name != FACTS]
        return {"facts": known, "files": stamps}

    with contextlib.suppress(OSError, ValueError):
        written = json.loads(files.read_ours(folder / FACTS))
    if written == contents():
        # Whatever is wrong with it, the original is there.
        with contextlib.suppress(CheckpointError, KernelError):
            return load_anew(plan, report, say, saved=SavedModel(folder))
    from quantbench.models.formats.saver import Saver  # a full-precision arm needs none

    try:
        _make_empty(folder, plan.architecture.parameters() * plan.precision.itemsize + RESERVE)
        scheme = saved_scheme(plan.spec, plan.config.precision)
        loaded = load_anew(plan, report, say, saver=Saver(folder, scheme, None, SHARD_BYTES))
        for file in folder.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())  # or it would be written while samples are taken
        files.write_text("", folder / FACTS, json.dumps(contents()) + "\n", follow=False)
        return loaded
    except (CheckpointError, LogError, OSError) as error:
        reason = f"{folder}: {error.strerror}" if isinstance(error, OSError) else str(error)
        say(f"The quantized model is not kept for the next process: {reason}")
    with contextlib.suppress(CheckpointError, OSError):
        unfinished.remove(folder)
    return load_anew(plan, report, say)


def facts(plan: Plan) -> object:
    """All that the quantized weights follow from, as JSON."""
    tokenizer, text = plan.checkpoint.tokenizer_folder, plan.config.calibration_text
    calibration = [tokenizer / name for name in FILES] if tokenizer else []
    calibration += [Path(text)] if text else []
    facts = {
        "config": dataclasses.asdict(plan.config),
        "architecture": dataclasses.asdict(plan.architecture),
        "files": [_stamp(file) for file in (*plan.checkpoint.files, *calibration)],
        "versions": versions(),
        "code": files.digest_of_code(*CODE),
    }
    return json.loads(json.dumps(facts, default=str))


def _stamp(file: Path) -> list[object]:
    try:
        status = os.stat(file)
    except OSError:
        return [str(file)]
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def _make_empty(folder: Path, needed: int) -> None:
    """Make the folder anew. Raises NotSaved where the disk has less than the bytes needed: it takes
    less than the model in full precision."""
    unfinished.remove(folder)
    folder.mkdir(parents=True)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise NotSaved(
            f"{folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed"
        )
