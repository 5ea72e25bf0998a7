"""A quantized model that is kept on disk between the processes of a comparison.

    loaded = load(plan, folder, report, say)

The first process quantizes the model and writes it into `folder` as --save does, layer by layer;
every later one reads it from there. Beside it lies `model.json` with all that the weights follow
from. Where that is not what it would be now, or a file has another length or another sum, the
folder is written anew. Where it cannot be written, the model is loaded all the same.
"""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from quantbench import files, models, ops, quantize
from quantbench.errors import CheckpointError, KernelError
from quantbench.log.origin import versions
from quantbench.models.formats.base import NotSaved, SavedScheme
from quantbench.models.formats.saved import SavedModel
from quantbench.models.tokenizer import FILES
from quantbench.quantize.spec import FullPrecision
from quantbench.run.loading import Loaded, Report, Say
from quantbench.run.loading import load as load_anew
from quantbench.run.plan import Plan

FACTS = "model.json"
# What turns a checkpoint into quantized numbers.
CODE = (
    *(Path(next(iter(package.__path__))) for package in (models, ops, quantize)),
    Path(__file__).with_name("calibration.py"),
)
SHARD_BYTES = 1 << 20  # hardly more than a layer: what waits to be written counts as memory
RESERVE = 2_000_000_000  # bytes of the disk to leave free
CHUNK = 1 << 23  # bytes that are summed at a time


def load(plan: Plan, folder: Path | None, report: Report, say: Say) -> Loaded:
    """The planned model, from `folder` if it holds it, else as run.loading.load does.

    A model in full precision, or from a checkpoint that --save wrote, is read where it lies. Ranks
    that share a model read and quantize their parts anew.
    """
    if folder is None or not _is_worth_it(plan):
        return load_anew(plan, report, say)
    facts = _facts(plan)
    if _holds(folder, facts):
        try:
            return load_anew(plan, report, say, saved=SavedModel(folder))
        except (CheckpointError, KernelError):  # whatever it is, the original is there
            pass
    if reason := _clear(folder) or _too_small(plan, folder):
        say(f"The quantized model is not kept for the next process: {reason}")
        return load_anew(plan, report, say)
    from quantbench.models.formats.saver import Saver  # a full-precision arm needs none

    try:
        scheme = SavedScheme(str(plan.spec), plan.config.precision)
        saver = Saver(folder, scheme, None, SHARD_BYTES)
        loaded = load_anew(plan, report, say, saver=saver)
        _seal(folder, facts)
        return loaded
    except NotSaved as error:
        say(f"The quantized model is not kept for the next process: {error}")
    _clear(folder)
    return load_anew(plan, report, say)


def _is_worth_it(plan: Plan) -> bool:
    if plan.split is not None:
        return False
    return not isinstance(plan.spec, FullPrecision) and plan.checkpoint.saved is None


# ---------------------------------------------------------------------------------- what it is


def _facts(plan: Plan) -> dict[str, Any]:
    """All that the quantized weights follow from, as JSON."""
    facts = {
        "config": dataclasses.asdict(plan.config),
        "architecture": dataclasses.asdict(plan.architecture),
        "weights": [_stamp(file) for file in plan.checkpoint.files],
        "calibration": [_stamp(file) for file in _calibration_files(plan)],
        "versions": versions(),
        "code": files.digest_of_code(*CODE),
    }
    return cast("dict[str, Any]", json.loads(json.dumps(facts, default=str)))


def _calibration_files(plan: Plan) -> list[Path]:
    text, folder = plan.config.calibration_text, plan.checkpoint.tokenizer_folder
    tokenizer = [folder / name for name in FILES] if folder else []
    return [*([Path(text)] if text else []), *tokenizer]


def _stamp(file: Path) -> list[object]:
    try:
        status = os.stat(file)
    except OSError:
        return [str(file)]
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


# ---------------------------------------------------------------------------------- the folder


def _holds(folder: Path, facts: dict[str, Any]) -> bool:
    """Whether the folder holds the model of these facts, undamaged."""
    try:
        content = json.loads((folder / FACTS).read_text())
        return bool(content["facts"] == facts and content["files"] == _sums(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write what the folder holds, once that is on the disk; NotSaved where that fails."""
    try:
        for file in _files(folder):
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())  # or it would be written while samples are taken
        content = {"facts": facts, "files": _sums(folder)}
        (folder / FACTS).write_text(json.dumps(content) + "\n")
    except OSError as error:
        raise NotSaved(f"{folder}: {error.strerror}") from None


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.iterdir()) if file.name != FACTS)


def _sums(folder: Path) -> dict[str, list[int]]:
    """Per file its length and its checksum. Read in chunks, not mapped: pages of a mapped file
    count as this process's memory."""
    sums = {}
    for path in _files(folder):
        checksum = 0
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                checksum = zlib.adler32(chunk, checksum)
        sums[path.name] = [path.stat().st_size, checksum]
    return sums


def _clear(folder: Path) -> str | None:
    """Remove the folder and make an empty one; the reason where that fails."""
    try:
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None


def _too_small(plan: Plan, folder: Path) -> str | None:
    """Why the disk has no room for it, or None. It takes less than the model in full precision."""
    count = plan.architecture.parameters()
    needed = count * plan.precision.itemsize + RESERVE
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return f"{folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed"
