"""The answer that recorded runs allow: at most three lines, each read off what was concluded.

A fastest run is no winner: a setting is only recommended where its interval, or that of its plan,
lies above the default's speed. Of settings that cannot be told apart, the one that changes the
fewest options is taken.
"""

import math
from collections.abc import Sequence

from quantbench.compare.figures.option_tests import OptionTest
from quantbench.compare.figures.recorded import Conclusions, Group
from quantbench.text import counted

NAMED = 4  # settings that are listed by name


def answer(conclusions: Conclusions) -> list[str]:
    """At most three lines."""
    default = conclusions.settings[0]
    if len(conclusions.settings) == 1:
        return [f"There is one setting alone, in {counted(len(default.runs), 'run')} of "
                f"{default.span}: nothing to compare it with"]  # fmt: skip
    if len(conclusions.plans) > 1 and _judged(conclusions.plans):
        lines = _of_plans(conclusions)
    elif _judged(conclusions.settings):
        lines = _of_settings(conclusions)
    elif conclusions.plans and len(conclusions.plans) > 1:
        lines = _too_few(conclusions, "plans")
    else:
        lines = _of_options(conclusions)
    if any(line.startswith("order and setting") for line in conclusions.confounded):
        lines.append(
            "Order and setting are confounded, so time may be the reason: run the default again, "
            "last, or let quantbench tune --over take turns"
        )
    return lines[:3]


def _judged(groups: Sequence[Group]) -> bool:
    return any(group.verdict not in ("default", "too few runs") for group in groups)


def _of_plans(conclusions: Conclusions) -> list[str]:
    default, *others = conclusions.plans
    faster = [plan for plan in others if plan.verdict == "faster"]
    candidates = [plan for plan in faster if plan.can_be_best] or faster
    if not candidates:
        line = f"Keep the default{_in_brackets(default)}: no other plan is shown to be faster"
        spread = [f"plan {plan.name} {_times(plan)}" for plan in others if plan.speed_up]
        return [f"{line} ({'; '.join(spread[:NAMED])})", *_within(conclusions, default)]
    chosen = min(candidates, key=lambda plan: plan.changes)
    line = (
        f"Leaving the default{_in_brackets(default)} did help: plan {chosen.name}"
        f"{_in_brackets(chosen)} is {_times(chosen)}"
    )
    if len(candidates) > 1:
        names = ", ".join(plan.name for plan in candidates)
        line += f"; plans {names} cannot be told from the fastest"
    return [line, *_within(conclusions, chosen)]


def _within(conclusions: Conclusions, plan: Group) -> list[str]:
    """What is to be said of the settings that share a plan."""
    members = [group for group in conclusions.settings if group.plan == plan.name]
    if len(members) < 2:
        return [_take(members[0])] if members and members[0].verdict != "default" else []
    best = [group for group in members if group.can_be_best]
    if len(best) == 1 and _judged(members):
        return [f"Of the settings of plan {plan.name}, {best[0].name} is shown to be the fastest"]
    chosen = min(best or members, key=lambda group: group.changes)
    return [
        f"These {len(best or members)} settings of plan {plan.name}{_in_brackets(plan)} cannot be "
        "told apart: "
        f"{_listed(best or members)}; {plan.span} is how far identical plans spread, so the "
        f"fastest run is no winner; {_take(chosen)[:1].lower()}{_take(chosen)[1:]}"
    ]


def _of_settings(conclusions: Conclusions) -> list[str]:
    default, *others = conclusions.settings
    faster = [group for group in others if group.verdict == "faster"]
    once = [group for group in others if group.verdict == "too few runs"]
    passed = f"; {counted(len(once), 'setting')} had too few runs to be judged" if once else ""
    if not faster:
        judged = [group for group in others if group not in once]
        spread = [f"{group.name} {_times(group)}" for group in judged]
        return [
            f"Keep the default{_settings_of(default)}: no setting is shown to be faster "
            f"({'; '.join(spread[:NAMED])}){passed}"
        ]
    candidates = [group for group in faster if group.can_be_best] or faster
    chosen = min(candidates, key=lambda group: group.changes)
    lines = [f"Leaving the default did help: {chosen.name} is {_times(chosen)}{passed}"]
    if len(candidates) > 1:
        lines.append(
            f"These {len(candidates)} cannot be told from the fastest: {_listed(candidates)}; "
            f"{chosen.name} changes the fewest options"
        )
    return lines


def _too_few(conclusions: Conclusions, what: str) -> list[str]:
    return [
        f"Too few runs to tell {what} apart: repeat each setting, the default between them, at "
        "least three times, or let quantbench tune --over do so"
    ]


def _of_options(conclusions: Conclusions) -> list[str]:
    """Where no setting was repeated often enough: each option by itself."""
    lines = []
    default, alike = conclusions.settings[0], conclusions.plans[0] if conclusions.plans else None
    for test in (test for test in conclusions.options if test.shown):
        if said := _option_line(test, default, conclusions):
            lines.append(said)
    if lines:
        return lines[:2]
    if alike:
        return [
            f"Keep the default: all {len(conclusions.settings)} settings have identical plans as "
            f"far as was recorded, their runs spread over {alike.span}, and no setting is shown "
            "to be faster",
            *_too_few(conclusions, "settings"),
        ]
    return _too_few(conclusions, "settings")


def _option_line(test: OptionTest, default: Group, conclusions: Conclusions) -> str | None:
    own = default.options[test.name]
    runs = {run.number: run.seconds for run in conclusions.recording.runs}
    numbers = list(runs)
    means = {
        value: math.exp(sum(math.log(runs[numbers[n]]) for n in places) / len(places))
        for value, places in test.runs.items()
    }
    chance = (
        f"p = {test.p:.2g} by permutation, {counted(len(conclusions.options), 'option')} counted"
    )
    best = min(means, key=lambda value: means[value])
    if best == own:
        return f"Keep the default of {test.name}, {own}: others are slower ({chance})"
    return (
        f"Leaving the default of {test.name}, {own}, did help: {test.name}={best} is "
        f"{means[own] / means[best]:.2f} × as fast ({chance})"
    )


# ---------------------------------------------------------------------------------- words


def _times(group: Group) -> str:
    ratio = group.speed_up
    assert ratio is not None
    return f"{ratio.value:.2f} × as fast ({ratio.word} {ratio.low:.2f} to {ratio.high:.2f})"


def _in_brackets(group: Group) -> str:
    words = ", ".join(f"{key}={value}" for key, value in group.options.items())
    return f" ({words})" if words else ""


def _settings_of(default: Group) -> str:
    return _in_brackets(default)


def _take(group: Group) -> str:
    if group.verdict == "default" and group.changes == 0:
        return "Keep the default"
    return f"Take {group.name}, which changes the fewest options"


def _listed(groups: Sequence[Group]) -> str:
    names = [group.name for group in groups]
    shown = "; ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown}; and {len(names) - NAMED} more"
