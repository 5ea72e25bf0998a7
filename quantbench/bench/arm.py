"""An arm: one way to run a model, made of the options all arms share and its own.

    arms = make_arms(common, ["--quantization none", "--quantization int8wo --kernel reference"])
    arms[1].name        # "int8wo, kernel=reference"

The first is the baseline.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantbench.errors import QuantbenchError, UsageError
from quantbench.log import shell
from quantbench.log.config import RunConfig, Unsaid, argv, option_table
from quantbench.log.options import parse
from quantbench.quantize import spec
from quantbench.run import checks
from quantbench.text import key, shown

# What a comparison decides itself, or what concerns one run alone.
NOT_IN_ARMS = (
    *("num_samples", "write_result", "output_json_path", "profile", "memory_profile"),
    *("save", "format", "dry_run", "interactive", "debug"),
)
# Arms that differ in these do not do the same work.
MODEL = ("checkpoint_path", "num_layers")
WORK = ("prompt", "prefill_size", "max_new_tokens", "batch_size", "context_depth", "seed")


@dataclass(frozen=True)
class Arm:
    """`text` is what the person wrote; `problem` says why it cannot run here, where that is known
    before anything is measured."""

    name: str
    text: str
    config: RunConfig
    problem: str | None = None


def make_arms(common: RunConfig, texts: Sequence[str], allow_different: bool = False) -> list[Arm]:
    """An arm for each text. Raises UsageError, one line, for options that are wrong, and for arms
    that cannot be compared.
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
    if not allow_different:
        _refuse_different(arms)
    return arms


def read_arms(common: RunConfig, texts: Sequence[str], baseline: bool = True) -> list[Arm]:
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


def every_scheme(common: RunConfig, texts: Sequence[str], schemes: Sequence[str]) -> list[str]:
    """The texts, and one more for each scheme that none of them is already. A scheme that does not
    go with the options of all arms is left out."""
    configs = [same(arm.config) for arm in read_arms(common, texts)]
    others = []
    for text in (f"--quantization {scheme}" for scheme in schemes):
        with contextlib.suppress(QuantbenchError):
            if same(_read_arm(common, text).config) not in configs:
                others.append(text)
    return [*texts, *others]


def same(config: RunConfig) -> RunConfig:
    """The config with everything that changes nothing set alike."""
    old = config.kv_cache_quantization and config.kv_cache == "dense"
    changes: dict[str, Any] = {"kv_cache": "int8" if old else config.kv_cache}
    for name in ("kv_cache_quantization", "linear_causal_mask", *NOT_IN_ARMS):
        changes[name] = RunConfig.__dataclass_fields__[name].default
    return dataclasses.replace(config, **changes)


def _read_arm(common: RunConfig, text: str) -> Arm:
    """The arm of a text. Raises QuantbenchError, one line, for options that are wrong."""
    words = [word.text for word in shell.words(text)]
    own = parse(words)
    given = [name for name in NOT_IN_ARMS if getattr(own, name) != getattr(RunConfig(), name)]
    if given:
        raise UsageError(f"--{given[0]} does not belong into an arm")
    config = parse([*argv(common, said=True), *words])
    left_out = [name for name in checks.unused(config) if name not in _given(words)]
    common, config = without(common, left_out), without(config, left_out)
    checks.check_options(config)
    if not isinstance(config.quantization, Unsaid):
        config = dataclasses.replace(config, quantization=str(spec.parse(config.quantization)))
    return Arm(_name(common, config), text, config)


def _given(words: Sequence[str]) -> set[str]:
    """The options that these words name."""
    return {key(word.partition("=")[0]) for word in words if word.startswith("--")}


def without(config: RunConfig, names: Sequence[str]) -> RunConfig:
    """The config with these options at their defaults."""
    usual: dict[str, Any] = {name: getattr(checks.DEFAULT, name) for name in names}
    return dataclasses.replace(config, **usual)


def refuse_unused(common: RunConfig, configs: Sequence[RunConfig]) -> None:
    """Raise UsageError for an option of all arms that the scheme of none takes."""
    for name in checks.OF_SCHEMES:
        value, usual = getattr(common, name), getattr(checks.DEFAULT, name)
        if value != usual and all(getattr(config, name) == usual for config in configs):
            schemes = " and ".join(dict.fromkeys(str(config.quantization) for config in configs))
            raise UsageError(checks.OF_SCHEMES[name][1].format(schemes))


def _name(common: RunConfig, config: RunConfig) -> str:
    parts = [config.quantization]
    for name in option_table():
        value = getattr(config, name)
        if name != "quantization" and value != getattr(common, name):
            parts.append(name if value is True else f"{name}={value}")
    return ", ".join(parts)


def refuse_identical(arms: Sequence[Arm]) -> None:
    """Raise UsageError for two arms that are the same run."""
    seen: dict[RunConfig, int] = {}
    for number, arm in enumerate(arms, 1):
        first = seen.setdefault(same(arm.config), number)
        if first != number:
            raise UsageError(
                f"arms {first} and {number} are the same run, {arms[first - 1].name!r} and "
                f"{arm.name!r}: leave one out"
            )


def _refuse_different(arms: Sequence[Arm]) -> None:
    configs = [(number, arm.config) for number, arm in enumerate(arms, 1)]
    for name in (*MODEL, *WORK):
        for number, config in configs[1:]:
            theirs, own = (str(getattr(one, name)) for one in (configs[0][1], config))
            if own == theirs:
                continue
            what = "model" if name in MODEL else "work"
            raise UsageError(
                f"arm {number} has --{name} {shown(own, 40)} and arm {configs[0][0]} "
                f"{shown(theirs, 40)}: not the same {what}; --allow_different compares them even so"
            )
