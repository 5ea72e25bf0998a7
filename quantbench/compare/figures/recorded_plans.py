"""Which recorded runs had the same plan, whatever their settings were.

    plans = plans_of(runs, varying)
    plans[0].name, plans[0].words           # "A", "experts_on_gpu=56, hit_rate=0.277778, …"

Two settings have identical plans if everything that was counted of them is equal and all decisions
that follow from their constants are. Their runs then differ by noise alone: they are repetitions of
one thing, and how far they spread is what a difference between other settings has to exceed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quantbench.compare.figures.recorded_runs import Run, Value


@dataclass(frozen=True)
class Decision:
    """What a runtime decides by constants that are among its settings."""

    settings: tuple[str, ...]
    decide: Callable[..., str | None]  # of their values, in words; None where it cannot be told


def _fetched(latency_cpu: Value, latency_gpu: Value) -> str | None:
    """An expert outside the GPU that n tokens chose takes n × latency_cpu on the CPU, and by a copy
    to the GPU latency_gpu, whatever n is: copied where that takes no longer."""
    for value in (latency_cpu, latency_gpu):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            return None
    assert isinstance(latency_cpu, int | float) and isinstance(latency_gpu, int | float)
    least = max(1, math.ceil(latency_gpu / latency_cpu - 1e-9))
    if least == 1:
        return "experts outside the GPU are always copied to it"
    return f"experts outside the GPU are copied to it for {least} tokens or more"


DECISIONS = (Decision(("latency_cpu", "latency_gpu"), _fetched),)


@dataclass(frozen=True)
class PlanGroup:
    """Runs of identical plans."""

    name: str  # A, B, … in the order of the file
    words: str  # what is known of the plan
    options: dict[str, str]  # settings that all of its runs have, and no others; see `_own`
    runs: list[Run]


def plans_of(runs: Sequence[Run], varying: Sequence[str]) -> list[PlanGroup]:
    """The groups, in the order of their first runs; none where nothing is known of any plan.

    varying: settings that differ between runs.
    """
    groups: dict[str, list[Run]] = {}
    words: dict[str, str] = {}
    for run in runs:
        parts = [f"{key}={written(value)}" for key, value in run.plan.items()]
        parts += [said for decision in DECISIONS if (said := _decided(decision, run.settings))]
        signature = "; ".join(sorted(parts))
        groups.setdefault(signature, []).append(run)
        words[signature] = ", ".join(parts)
    if set(groups) == {""}:
        return []
    return [
        PlanGroup(_letter(number), words[key] or "nothing known", _own(group, runs, varying), group)
        for number, (key, group) in enumerate(groups.items())
    ]


def written(value: Value) -> str:
    """A value as a command line has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "not recorded"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def assignments(settings: Mapping[str, Value], keys: Sequence[str]) -> str:
    """ "threads=1, policy=fetch": these of the settings."""
    return ", ".join(f"{key}={written(settings[key])}" for key in keys)


def _decided(decision: Decision, settings: Mapping[str, Value]) -> str | None:
    if any(key not in settings for key in decision.settings):
        return None
    return decision.decide(*(settings[key] for key in decision.settings))


def _own(group: Sequence[Run], runs: Sequence[Run], varying: Sequence[str]) -> dict[str, str]:
    """The settings that are alike in the group, and either that of no other run or what a decision
    is made from."""
    inside = {run.number for run in group}
    others = [run for run in runs if run.number not in inside]
    deciding = {key for decision in DECISIONS for key in decision.settings}
    options = {}
    for key in varying:
        own = {written(run.settings[key]) for run in group}
        theirs = {written(run.settings[key]) for run in others}
        if len(own) == 1 and (not own & theirs or key in deciding):
            options[key] = own.pop()
    return options


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"P{number + 1}"
