"""The energy of a run, as run/counters.py counts it, and what is said of it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.log.record import NO_COUNTER


@dataclass(frozen=True)
class Energy:
    """The energy of one run; where it was repeated, the mean of the repeats."""

    counter: str
    joules: float  # without the idle machine's
    seconds: float
    idle_watts: float
    repeats: int


@dataclass(frozen=True)
class NotCounted:
    why_not: str


def pooled(energies: Sequence[Energy]) -> Energy:
    """The energy of a run that was counted several times: means over all repeats, the idle power
    the mean of its readings."""
    repeats = [energy.repeats for energy in energies]
    joules = statistics.fmean([energy.joules for energy in energies], repeats)
    seconds = statistics.fmean([energy.seconds for energy in energies], repeats)
    idle = statistics.fmean(energy.idle_watts for energy in energies)
    return Energy(energies[0].counter, joules, seconds, idle, sum(repeats))


def sentence(
    joules: float | None, idle_watts: float | None, why_not: str | None, estimated: float | None
) -> str:
    """Joules of a new token, or why they are not known, beside the estimate; "" where there is
    neither a counter nor an estimate."""
    estimate = "" if estimated is None else f"; {estimated:.3g} J estimated"
    if joules is not None:
        idle = "" if idle_watts is None else f", {idle_watts:.3g} W"
        return f"{joules:.3g} J a new token, without the idle machine's{idle}{estimate}"
    if why_not is not None and not why_not.startswith(NO_COUNTER):
        return f"joules of a new token are not known: {why_not}{estimate}"
    return f"at most {estimated:.3g} J a new token ({NO_COUNTER})" if estimated else ""
