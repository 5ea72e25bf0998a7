"""Checks of a run's options that need no torch, so that a mistake is reported at once.

    check(config)       # raises UsageError, LogError or CheckpointError, one line

Outputs are examined, not changed: a run that fails later leaves them as they were.
"""

import os
from pathlib import Path

import files
from benchlog import log
from benchlog.config import RunConfig
from benchlog.record import held_name
from errors import CheckpointError, UsageError
from models.checkpoints.names import SAVED
from quantize.spec import Selection, Spec, parse
from run.launch import place

DEFAULT = RunConfig()
EXPERTS = ("expert_placement", "expert_policy", "expert_prefetch", "expert_folder")
FILES = ("write_result", "output_json_path", "profile", "memory_profile")
# Options that would have no effect if the first one is given, and are refused therefore.
IGNORED = {
    "interactive": (
        *("prompt", "prefill_size", "context_depth", "output_json_path"),
        *("profile", "memory_profile", "dry_run"),
    ),
    "dry_run": ("output_json_path", "profile", "memory_profile", "save"),
    "prefill_size": ("prompt",),
}
# The beginning of the message for a pair of options, if it is not "--A goes without it: leave out".
INSTEAD = {
    ("interactive", "context_depth"): "--interactive begins at the beginning: leave out",
    ("prefill_size", "prompt"): "--prefill_size is a random prompt: leave it out, or",
}


def check(config: RunConfig) -> Spec | Selection:
    """Check the options of a run; returns the scheme that --quantization names.

    Raises UsageError for options that contradict each other, LogError or CheckpointError for an
    output that cannot be written.
    """
    spec = parse(config.quantization)
    scheme = str(spec)
    _refuse_ignored(config)
    _check_ranks(config)
    _check_experts(config)
    if config.interactive and config.batch_size != 1:
        raise UsageError("--interactive holds one conversation: leave --batch_size at 1")
    if config.calibration_text and not scheme.startswith("autoquant") and "wanda" not in scheme:
        raise UsageError(
            f"--calibration_text: {scheme} is not calibrated; sparse-marlin-wanda and autoquant are"
        )
    if config.min_sqnr != DEFAULT.min_sqnr and not scheme.startswith("autoquant"):
        raise UsageError(f"--min_sqnr is for --quantization autoquant; given: {scheme}")
    if config.calibration_text:
        files.read_text("--calibration_text", config.calibration_text)
    if config.write_result != "none" and config.write_result.lower() == "none":
        raise UsageError(
            f"--write_result {config.write_result}: none is written small; for a file of that name "
            f"give ./{config.write_result}"
        )
    if not (config.interactive or config.dry_run):
        _check_outputs(config)
    return spec


def _check_ranks(config: RunConfig) -> None:
    where = place()
    if where is not None and config.tp != 1:
        raise UsageError(
            f"--tp {config.tp}: torchrun has started {where.size} ranks; leave out --tp"
        )
    if config.tp == 1:
        return
    for option in ("interactive", "dry_run"):
        if getattr(config, option):
            raise UsageError(f"--{option} runs in one process: leave out --tp {config.tp}")


def _check_experts(config: RunConfig) -> None:
    given = [name for name in EXPERTS if getattr(config, name) != getattr(DEFAULT, name)]
    if config.expert_memory is None and given:
        raise UsageError(
            f"--{given[0]}: there is no second tier of memory: --expert_memory says how many "
            "experts the fast one holds"
        )
    if config.expert_memory is not None and config.tp > 1:
        raise UsageError("--expert_memory is for one process: leave out --tp")


def check_name(config: RunConfig, name: str) -> None:
    """Raise UsageError for a model whose name no log line can hold: its result would be lost."""
    if not (config.interactive or config.dry_run) and not held_name(name):
        raise UsageError(
            f"--checkpoint_path: the model is named {name!r}, which no log line can hold; rename "
            "its folder, or make a link to it"
        )


def _refuse_ignored(config: RunConfig) -> None:
    for option, ignored in IGNORED.items():
        if getattr(config, option) == getattr(DEFAULT, option):
            continue
        for name in ignored:
            if getattr(config, name) != getattr(DEFAULT, name):
                because = INSTEAD.get((option, name), f"--{option} goes without it: leave out")
                raise UsageError(f"{because} --{name}")


def _check_outputs(config: RunConfig) -> None:
    given = {name: getattr(config, name) for name in FILES if getattr(config, name)}
    if config.write_result == "none":
        del given["write_result"]
    for path in given.values():
        log.check_writable(path)
    if config.save:
        check_save(config.save)
    _refuse_coinciding(config, given)
    if "write_result" in given:
        log.check_kind(config.write_result)
    if config.output_json_path:
        log.check_json_kind(config.output_json_path)
    for name in ("profile", "memory_profile"):
        files.check_output(f"--{name}", getattr(config, name), _is_trace, "trace")


def _refuse_coinciding(config: RunConfig, given: dict[str, str]) -> None:
    """Raise UsageError if two options name the same file, by another spelling or a link, too."""
    inputs = ("checkpoint_path", "calibration_text")
    named = given | {name: path for name in inputs if (path := getattr(config, name))}
    seen: dict[object, str] = {}
    for name, path in named.items():
        first = seen.setdefault(_identity(path), name)
        if first != name:
            raise UsageError(f"--{first} and --{name} name the same file, {path}")
    for name, path in given.items():
        folder = config.save and os.path.realpath(config.save)
        if folder and Path(os.path.realpath(path)).is_relative_to(folder):
            raise UsageError(f"--{name} {path} lies in the folder of --save, which holds a model")


def _identity(path: str) -> object:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def _is_trace(head: bytes) -> bool:
    """Whether a file begins as a trace of torch's profiler, compressed or not, or as a memory
    snapshot of CUDA."""
    trace = files.is_json(head) and (b'"schemaVersion"' in head or b'"traceEvents"' in head)
    return trace or head.startswith((b"\x1f\x8b", b"\x80"))


def check_save(folder: str) -> None:
    """Raise CheckpointError unless a model can be saved there: the folder must be new, or empty, or
    hold an unfinished save."""
    path = Path(folder)
    with files.named("--save", folder, CheckpointError):
        if os.path.islink(folder) or path.exists():
            if any(path.iterdir()) and not (path / f"{SAVED}.unfinished").is_file():
                raise CheckpointError(f"--save {folder}: the folder is not empty; give a new one")
            return
        parent = next(place for place in Path(os.path.abspath(folder)).parents if place.exists())
        files.require_writable(parent / "new")
