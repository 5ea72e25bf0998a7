"""Checks of a run's options that need no torch, so that a mistake is reported at once.

    check(config)           # raises UsageError, LogError or CheckpointError, one line
    check_options(config)   # the same without the outputs, for commands that write others

Outputs are examined, not changed: a run that fails later leaves them as they were.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from quantbench import environment, files
from quantbench.errors import CheckpointError, UsageError
from quantbench.log import log
from quantbench.log.config import RunConfig, Unsaid, refuse_former
from quantbench.quantize.grammar import Quantization
from quantbench.quantize.spec import CALIBRATED, Selection, parse, refuse_format

EXPERTS = ("expert_placement", "expert_policy", "expert_prefetch", "expert_folder")
FILES = ("write_result", "output_json_path", "profile", "memory_profile")
INPUTS = ("checkpoint_path", "calibration_text", "expert_placement")
# Options that the first one refuses: with it they would have no effect, or contradict it.
APART = "--{option} goes without it: leave out --{other}"
ALONE = "--{option} runs in one process: leave out --tp {config.tp}"
OWN_FORM = "--expert_memory keeps experts in its own form: leave out --format"
SPECULATION = "--speculate {config.speculate} is for one"
CONFLICTS = (
    ("interactive", "prompt prefill_size output_json_path profile memory_profile dry_run", APART),
    ("interactive", "context_depth", "--interactive starts with empty caches: leave out --{other}"),
    ("interactive", "batch_size", "--interactive holds one conversation: leave --{other} at 1"),
    ("interactive", "tp", ALONE),
    ("dry_run", "output_json_path profile memory_profile save", APART),
    ("dry_run", "tp", ALONE),
    ("expert_memory", "format", OWN_FORM),
    ("expert_memory", "tp", "--expert_memory is for one process: leave out --tp"),
    ("prefill_size", "prompt", "--prefill_size is a random prompt: leave it out, or --prompt"),
    ("speculate", "batch_size", SPECULATION + " row: leave out --{other}"),
    ("speculate", "tp", SPECULATION + " process: leave out --{other}"),
    ("speculate", "expert_memory", SPECULATION + " memory: leave out --{other}"),
)
# Options that only some schemes take: whether a scheme does, and the message for the others.
OF_SCHEMES: Mapping[str, tuple[Callable[[Quantization], bool], str]] = {
    "calibration_text": (
        lambda spec: spec.calibrated,
        "--calibration_text: {} is not calibrated; names that end in "
        + ", ".join(f"-{way}" for way in CALIBRATED)
        + " are, and autoquant",
    ),
    "min_sqnr": (
        lambda spec: isinstance(spec, Selection),
        "--min_sqnr is for --quantization autoquant; given: {}",
    ),
}


def check(config: RunConfig) -> None:
    """Raise UsageError for options that contradict each other, LogError or CheckpointError for an
    output that cannot be written."""
    check_options(config)
    if config.interactive and sys.stdin is None:
        raise UsageError("--interactive reads lines from stdin, which is closed: redirect it")
    if not (config.interactive or config.dry_run):
        _check_outputs(config)


def check_options(config: RunConfig) -> None:
    """Check all but the outputs. Raises UsageError, or LogError for a folder that cannot be
    written."""
    refuse_former(config)
    spec = parse(config.quantization)
    for name in unused(config):
        raise UsageError(OF_SCHEMES[name][1].format(spec))
    _check_ranks(config)
    for option, others, message in CONFLICTS:
        for second in filter(config.differs, others.split() if config.differs(option) else ()):
            raise UsageError(message.format(option=option, other=second, config=config))
    if config.differs("format"):
        if not config.save:
            raise UsageError(f"--format {config.format} is what --save DIR writes: give --save")
        if not isinstance(config.quantization, Unsaid):  # else the checkpoint decides
            refuse_format(spec, config.format)
    _check_experts(config)
    _check_speculation(config)
    check_inputs(config)


def unused(config: RunConfig) -> list[str]:
    """The options of OF_SCHEMES that are given, and that the scheme does not take."""
    spec = parse(config.quantization)
    return [
        name for name, (takes, _) in OF_SCHEMES.items() if config.differs(name) and not takes(spec)
    ]


def check_inputs(config: RunConfig) -> None:
    """Raise UsageError for a text that cannot be read."""
    if config.calibration_text:
        files.read_text("--calibration_text", config.calibration_text)


def refuse_random_weights(checkpoint_path: str, judges: str) -> None:
    """Raise UsageError for dummy:NAME. judges: what is judged by the text that a model predicts."""
    if checkpoint_path.startswith("dummy:"):
        raise UsageError(
            f"--checkpoint_path {checkpoint_path}: random weights predict no text, by which "
            f"{judges} are judged; give trained ones"
        )


def _check_ranks(config: RunConfig) -> None:
    where = environment.place()
    if where is not None and config.tp != 1:
        raise UsageError(
            f"--tp {config.tp}: torchrun has started {where.size} ranks; leave out --tp"
        )
    if where is not None and config.expert_memory is not None:
        raise UsageError("--expert_memory is for one process: leave out --tp")


def _check_speculation(config: RunConfig) -> None:
    kind = config.speculate
    if kind == "draft" and config.draft_checkpoint is None:
        raise UsageError("--speculate draft: --draft_checkpoint names the model that drafts")
    takers = {"draft_checkpoint": ("draft",), "draft_quantization": ("self", "draft")}
    for name, kinds in takers.items():
        if getattr(config, name) is not None and kind not in kinds:
            raise UsageError(f"--{name} is for --speculate {' or '.join(kinds)}")
    if config.draft_quantization is not None:
        parse(config.draft_quantization, "--draft_quantization")


def _check_experts(config: RunConfig) -> None:
    options = [name for name in EXPERTS if config.differs(name)]
    if config.expert_memory is None and options:
        raise UsageError(
            f"--{options[0]}: there is no second tier of memory: --expert_memory says how many "
            "experts the fast one holds"
        )
    if config.differs("expert_prefetch"):
        raise UsageError(
            f"--expert_prefetch {config.expert_prefetch}: copies always overlap with computing, "
            "and the next layer's experts are no longer guessed; leave it out"
        )
    if config.expert_folder is not None:
        files.check_folder("--expert_folder", config.expert_folder)


def _check_outputs(config: RunConfig) -> None:
    outputs = {name: getattr(config, name) for name in FILES if getattr(config, name)}
    if config.write_result == "none":
        del outputs["write_result"]
    for path in outputs.values():
        log.check_writable(path)
    if config.save:
        check_save(config.save)
    _refuse_coinciding(config, outputs)
    log.check(config.write_result)
    if config.output_json_path:
        log.check_json_kind(config.output_json_path)
    for name in ("profile", "memory_profile"):
        files.Output(f"--{name}", getattr(config, name), _is_trace, "trace").check()


def _refuse_coinciding(config: RunConfig, outputs: dict[str, str]) -> None:
    named = {f"--{name}": getattr(config, name) for name in INPUTS}
    inputs = {name: path for name, path in named.items() if path and os.path.lexists(path)}
    files.refuse_coinciding({f"--{name}": path for name, path in outputs.items()}, inputs)
    for option in ("save", "expert_folder"):
        folder = getattr(config, option)
        for name, path in outputs.items() if folder else ():
            files.refuse_folder(f"--{name}", path, f"--{option}", folder)
            if option == "save" and Path(path).resolve().is_relative_to(Path(folder).resolve()):
                raise UsageError(f"--{name} {path} is in the folder of --save, which holds a model")


def _is_trace(head: bytes) -> bool:
    """Whether a file begins as a trace of torch's profiler, compressed or not, or as a memory
    snapshot of CUDA."""
    trace = files.is_json(head) and (b'"schemaVersion"' in head or b'"traceEvents"' in head)
    return trace or head.startswith((b"\x1f\x8b", b"\x80"))


def check_save(folder: str) -> None:
    """Raise CheckpointError or LogError unless a model can be saved there: the folder must be new,
    or empty, or hold an unfinished save."""
    path = Path(folder)
    with files.named("--save", folder, CheckpointError):
        if os.path.lexists(folder):
            from quantbench import unfinished

            unfinished.check(path)
            return
    files.check_folder("--save", folder)
