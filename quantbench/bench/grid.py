"""The settings of a tune: every combination of the values that --over gives, and which of them are
the same plan.

    grid = read_grid(common, ["threads=1,2", "quantization=int8wo,int4wo-128"])
    settings = settings_of(common, grid)        # the default first, then the four combinations
    able, refused = group(settings, planned)    # arms to measure, and what cannot run

The default is the command line without --over: it is the baseline, and what stays if nothing else
is shown to be faster. "default" as a value leaves an option as it is there, and switches take on
and off.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from quantbench.arguments import nearest
from quantbench.bench.answers import Planned
from quantbench.bench.arm import MODEL, WORK, refuse_unused
from quantbench.bench.store import ArmResult
from quantbench.errors import QuantbenchError, UsageError
from quantbench.log.config import ALIASES, NOT_IN_ARMS, RunConfig, argv, option_table
from quantbench.log.kinds import Switch
from quantbench.quantize import spec
from quantbench.run import checks
from quantbench.text import counted, key, shown

MOST_SETTINGS = 64
DEFAULT = "default"
SWITCHES = {"on": True, "off": False}
Grid = dict[str, dict[str, Any]]  # by option its values, by their texts in --over


def settings_of(common: RunConfig, grid: Grid) -> list[ArmResult]:
    """The default, and every combination, named by its values."""
    default = common.without(checks.unused(common))
    settings = [ArmResult(DEFAULT, DEFAULT, argv(default, said=True), changes=0)]
    for chosen in itertools.product(*(values.items() for values in grid.values())):
        values = {option: value for option, (_, value) in zip(grid, chosen, strict=True)}
        config = dataclasses.replace(common, **values)
        config = config.without(checks.unused(config))
        changed = [option for option in grid if getattr(config, option) != getattr(default, option)]
        name = ", ".join(f"{option}={text}" for option, (text, _) in zip(grid, chosen, strict=True))
        settings.append(ArmResult(name, name, argv(config, said=True), changes=len(changed)))
    return settings


def read_grid(common: RunConfig, texts: Sequence[str]) -> Grid:
    """Raises UsageError, one line, for what is no grid."""
    if not texts:
        raise UsageError(
            "nothing to tune: give --over OPTION=VALUE,VALUE, such as --over threads=1,2, once for "
            "each option"
        )
    grid: Grid = {}
    for option, values in [_axis(common, text) for text in texts]:
        if option in grid:
            raise UsageError(f"--over {option} is given twice: give all of its values in one")
        grid[option] = values
    counts = [len(values) for values in grid.values()]
    if (count := math.prod(counts)) > MOST_SETTINGS:
        product = " × ".join(map(str, counts))
        raise UsageError(
            f"--over: {product} = {count} settings, and {MOST_SETTINGS} at most can be compared: "
            "give fewer values, or tune one option after the other"
        )
    checks.check_inputs(common)
    refuse_unused(common, [setting.config for setting in settings_of(common, grid)])
    return grid


def _axis(common: RunConfig, text: str) -> tuple[str, dict[str, Any]]:
    """An option and its values."""
    spelled, equals, rest = text.partition("=")
    option = key(spelled.strip())
    option = {alias: name for name, alias in ALIASES.items()}.get(option, option)
    table, named = option_table(), f"--over {shown(text)}"
    if not equals:
        raise UsageError(f"{named} takes OPTION=VALUE,VALUE, such as threads=1,2")
    if option not in table:
        raise UsageError(f"{named}: generate has no option {shown(option)}; "
                         f"{nearest(option, list(table))}")  # fmt: skip
    if option in NOT_IN_ARMS:
        raise UsageError(f"{named}: a comparison decides --{option} itself, or it changes nothing")
    if option in (*MODEL, *WORK):
        raise UsageError(
            f"{named}: settings that differ in --{option} do not do the same work; quantbench ab "
            "--allow_different compares them even so"
        )
    texts = [value.strip() for value in rest.split(",")]
    if "" in texts:
        raise UsageError(f"{named}: a value is empty; give them as {option}=A,B")
    values = [_value(common, option, value, named) for value in texts]
    if len(values) == 1:
        raise UsageError(
            f"{named}: one value is no choice: give --{option} {texts[0]}, or another value"
        )
    for place, value in enumerate(values):
        if (first := values.index(value)) != place:
            twice = shown(texts[place]) if texts[first] == texts[place] else (
                f"{shown(texts[first])} and {shown(texts[place])}, which are the same")  # fmt: skip
            raise UsageError(f"{named}: twice {twice}: leave one out")
    return option, dict(zip(texts, values, strict=True))


def _value(common: RunConfig, option: str, text: str, named: str) -> object:
    """The value as RunConfig has it. Raises UsageError where the option does not take it."""
    if text == DEFAULT:
        return getattr(common, option)
    given: object = text
    if isinstance(option_table()[option].kind, Switch):
        if text not in SWITCHES:
            raise UsageError(f"{named}: --{option} is a switch, which takes on and off here")
        given = SWITCHES[text]
    try:
        changed: dict[str, Any] = {option: given}
        value = getattr(dataclasses.replace(common, **changed), option)
        return str(spec.parse(value)) if option == "quantization" else value
    except UsageError as error:
        raise UsageError(f"{named}: {error}") from None


# ---------------------------------------------------------------------------------- plans


def group(
    settings: Sequence[ArmResult], planned: Sequence[Planned]
) -> tuple[list[ArmResult], list[ArmResult]]:
    """One arm for each plan, the baseline first: of settings with identical ones, the first. And
    those that cannot run.

    planned: what is known of each setting's plan. Where the default cannot run, the first setting
    that can takes its place. Raises UsageError or QuantbenchError where none can.
    """
    arms: dict[str, ArmResult] = {}
    refused: list[ArmResult] = []
    for setting, plan in zip(settings, planned, strict=True):
        if plan.identity is None:
            if setting.name != DEFAULT:
                refused.append(dataclasses.replace(setting, unable=plan.problem))
            continue
        identity = repr(sorted(plan.identity.items()))
        if (first := arms.setdefault(identity, setting)) is not setting:
            first.also = [*(first.also or ()), setting.name]
    if not arms:
        failure = UsageError if planned[0].kind == "usage" else QuantbenchError
        raise failure(f"no setting can run here: {planned[0].problem}")
    return [*arms.values()], refused


def said(
    able: Sequence[ArmResult], refused: Sequence[ArmResult], why_not_default: str | None, count: int
) -> list[str]:
    """Which of `count` settings of the grid have identical plans, in lines for people."""
    lines = []
    if why_not_default is not None:
        lines.append(
            f"the default cannot run here ({why_not_default}): the baseline is {able[0].name}"
        )
    lines += [f"identical plans: {arm.name} is measured for {'; '.join(arm.also)}, too"
              for arm in able if arm.also]  # fmt: skip
    lines += [f"{arm.name} cannot run: {arm.unable}" for arm in refused]
    several = f"{counted(len(able), 'plan')} to measure"
    return [f"{counted(count, 'setting')} of the grid: {several}", *lines]
