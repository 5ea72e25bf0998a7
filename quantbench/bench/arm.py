"""An arm: one way to run a model, made of the options all arms share and its own.

    arms = make_arms(common, ["--quantization none", "--quantization int8wo --kernel reference"])
    arms[1].name        # "int8wo, kernel=reference"

The first is the baseline.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from quantbench.bench.process import Process
from quantbench.bench.store import ArmResult
from quantbench.errors import QuantbenchError, UsageError
from quantbench.log import shell
from quantbench.log.config import NOT_IN_ARMS, NOT_TIMED, RunConfig, Unsaid, argv, option_table
from quantbench.log.options import parse
from quantbench.quality.types import QualityReference, SameModel
from quantbench.quantize import spec
from quantbench.run import checks
from quantbench.text import key, shown

# Arms that differ in these do not do the same work.
MODEL = ("checkpoint_path", "num_layers")
WORK = ("prompt", "prefill_size", "max_new_tokens", "batch_size", "context_depth", "seed")


def make_arms(
    common: RunConfig, texts: Sequence[str], may_differ: Collection[str] = ()
) -> list[ArmResult]:
    """An arm for each text. may_differ: options of MODEL and WORK that arms may have different.
    Raises UsageError, one line, for options that are wrong, and for arms that cannot be compared.
    """
    if not texts:
        raise UsageError(
            'no baseline: give --arm "--quantization none" first, then the arms to compare with '
            "it, or --arms all"
        )
    checks.check_inputs(common)
    arms = read_arms(common, texts)
    if len(arms) == 1:
        raise UsageError(f"one arm, {texts[0]!r}, is nothing to compare: give another --arm")
    refuse_unused(common, [arm.config for arm in arms])
    refuse_identical(arms)
    _refuse_different(arms, [name for name in (*MODEL, *WORK) if name not in may_differ])
    return arms


def read_arms(common: RunConfig, texts: Sequence[str], baseline: bool = True) -> list[ArmResult]:
    """An arm for each text. baseline: whether the first is one. Raises UsageError, one line, for
    options that are wrong."""
    arms = []
    for number, text in enumerate(texts, 1):
        try:
            arms.append(_read_arm(common, text))
        except QuantbenchError as error:
            which = "the baseline, " * (baseline and number == 1)
            raise UsageError(f"arm {number}, {which}{shown(text)}: {error}") from None
    return arms


def other_schemes(
    common: RunConfig, arms: Sequence[ArmResult], schemes: Sequence[str]
) -> list[ArmResult]:
    """An arm for each scheme that none of these arms has. A scheme that does not go with the
    options of all arms is left out."""
    known, others = [same(arm.config) for arm in arms], []
    for scheme in schemes:
        with contextlib.suppress(QuantbenchError):
            arm = _read_arm(common, f"--quantization {scheme}")
            others += [arm] if same(arm.config) not in known else []
    return others


def same(config: RunConfig) -> RunConfig:
    """The config with everything that changes nothing set alike."""
    if config.kv_cache_quantization and config.kv_cache == "dense":
        config = dataclasses.replace(config, kv_cache="int8")
    return config.without(NOT_TIMED)


def _read_arm(common: RunConfig, text: str) -> ArmResult:
    """The arm of a text. Raises QuantbenchError, one line, for options that are wrong."""
    words = [word.text for word in shell.words(text)]
    own = parse(words)
    given = [name for name in NOT_IN_ARMS if own.differs(name)]
    if given:
        raise UsageError(f"--{given[0]} does not belong into an arm")
    config = parse([*argv(common, said=True), *words])
    named = {key(word.partition("=")[0]) for word in words if word.startswith("--")}
    left_out = [name for name in checks.unused(config) if name not in named]
    common, config = common.without(left_out), config.without(left_out)
    checks.check_options(config)
    if not isinstance(config.quantization, Unsaid):
        config = dataclasses.replace(config, quantization=str(spec.parse(config.quantization)))
    return ArmResult(_name(common, config), text, argv(config, said=True))


def refuse_unused(common: RunConfig, configs: Sequence[RunConfig]) -> None:
    """Raise UsageError for an option of all arms that the scheme of none takes."""
    for name in checks.OF_SCHEMES:
        if common.differs(name) and not any(config.differs(name) for config in configs):
            schemes = " and ".join(dict.fromkeys(str(config.quantization) for config in configs))
            raise UsageError(checks.OF_SCHEMES[name][1].format(schemes))


def _name(common: RunConfig, config: RunConfig) -> str:
    parts = [config.quantization]
    for name in option_table():
        value = getattr(config, name)
        if name != "quantization" and value != getattr(common, name):
            parts.append(name if value is True else f"{name}={value}")
    return ", ".join(parts)


def refuse_identical(arms: Sequence[ArmResult]) -> None:
    """Raise UsageError for two arms that are the same run."""
    seen: dict[RunConfig, int] = {}
    for number, arm in enumerate(arms, 1):
        first = seen.setdefault(same(arm.config), number)
        if first != number:
            raise UsageError(
                f"arms {first} and {number} are the same run, {arms[first - 1].name!r} and "
                f"{arm.name!r}: leave one out"
            )


def _refuse_different(arms: Sequence[ArmResult], names: Sequence[str]) -> None:
    first = arms[0].config
    for name in names:
        for number, arm in enumerate(arms[1:], 2):
            theirs, own = (str(getattr(config, name)) for config in (first, arm.config))
            if own == theirs:
                continue
            what = "model" if name in MODEL else "work"
            of_files = "--same_model compares files of one model, and " * (name == MODEL[0])
            raise UsageError(
                f"arm {number} has --{name} {shown(own, 40)} and arm 1 "
                f"{shown(theirs, 40)}: not the same {what}; {of_files}--allow_different compares "
                "them even so"
            )


def of_one_model(
    common: RunConfig, arms: Sequence[ArmResult], worker: Process
) -> tuple[list[ArmResult], QualityReference]:
    """The arms, named by their files and schemes, and what their quality is relative to. Raises
    UsageError for files of different models, and for two arms that are the same run."""
    paths = list(dict.fromkeys(arm.config.checkpoint_path for arm in arms))
    found = worker.answer(SameModel, "same_model", paths=paths)
    schemes = dict(zip(paths, found.schemes, strict=True))
    stems = {path: Path(path).name.removesuffix(".gguf") or path for path in paths}
    told_apart = len(set(stems.values())) == len(paths)
    runs = []
    for arm in arms:
        path, scheme = arm.config.checkpoint_path, arm.config.quantization
        if isinstance(scheme, Unsaid) or scheme == "as-is":
            scheme = schemes[path] or scheme
        run = dataclasses.replace(arm.config, quantization=scheme)
        name = _name(dataclasses.replace(common, checkpoint_path=path), run)
        name = f"{stems[path] if told_apart else path}, {name}"
        runs.append(ArmResult(name, arm.text, argv(run, said=True)))
    refuse_identical(runs)
    path = paths[found.best]
    config = next(arm.config for arm in arms if arm.config.checkpoint_path == path)
    changes: dict[str, Any] = dict(kernel="auto", kv_cache="dense", kv_cache_quantization=False)
    if schemes[path] or config.quantization != "none":
        changes["quantization"] = "none" if found.floats else Unsaid("none")
    reference = argv(dataclasses.replace(config, **changes), said=True)
    named = [dataclasses.replace(a, name=run.name) for a, run in zip(arms, runs, strict=True)]
    return named, QualityReference(reference, path, schemes[path])
