"""Whether the speed of a single run can be trusted: how its samples scatter, and why they may.

trust = judge([60.0, 63.2, 292.1], use, threads=2)
trust.trustworthy                   # False
trust.why_not_trustworthy           # samples scatter 4.9 ×; other processes used 1.4 of 2 …
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.run.machine import MachineUse
from quantbench.text import counted

MOST_SCATTER = 0.10  # coefficient of variation up to which the mean of the samples is trusted
# Cores that others may use beyond those that a run's threads leave idle, as a share of all cores.
MOST_TAKEN = 0.10
# `compare ab` runs baseline and candidates in turns, so that what slows both cancels out.
IN_TURNS = "compare with quantbench ab, which takes turns"


@dataclass(frozen=True)
class Spread:
    """How the tok/s of a run's samples differ."""

    samples: int
    least_tok_s: float
    most_tok_s: float
    coefficient_of_variation: float | None  # standard deviation ÷ mean; None for one sample

    @staticmethod
    def of(tok_s: Sequence[float]) -> "Spread":
        mean = statistics.fmean(tok_s)
        deviation = statistics.stdev(tok_s) / mean if len(tok_s) > 1 else None
        return Spread(len(tok_s), min(tok_s), max(tok_s), deviation)

    def sentence(self) -> str:
        """The least and the most, without a full stop."""
        if self.coefficient_of_variation is None:
            return "one sample shows no scatter (--num_samples 5 does)"
        return (
            f"{counted(self.samples, 'sample')} between {self.least_tok_s:.2f} and "
            f"{self.most_tok_s:.2f} tok/s, coefficient of variation "
            f"{self.coefficient_of_variation:.1%}"
        )


@dataclass(frozen=True)
class Trust:
    """What a run says about its own speed. The field names are keys of --output_json_path."""

    spread: Spread
    machine: MachineUse | None  # while samples were taken; None: not measured
    load_average: float | None  # over the last minute
    trustworthy: bool | None  # None: one sample on a quiet machine, which shows no scatter
    why_not_trustworthy: str | None  # one line, with what to do; None if it is trustworthy


def judge(
    tok_s: Sequence[float],
    machine: MachineUse | None,
    threads: int,
    load_average: float | None = None,
) -> Trust:
    """tok_s: of each sample. threads: that compute on the CPU; 1 for a run on an accelerator."""
    spread = Spread.of(tok_s)
    scatters = (spread.coefficient_of_variation or 0) > MOST_SCATTER
    crowded = machine is not None and _crowded(machine, threads)
    reasons = []
    if scatters:
        reasons.append(f"samples scatter {spread.most_tok_s / spread.least_tok_s:.1f} ×")
    if machine is not None and (crowded or scatters):
        reasons += _others(machine)
    why = None
    if scatters or crowded:
        idle = "repeat it on an idle machine" if crowded else "repeat it with longer samples"
        option = "" if crowded else " (--max_new_tokens)"
        why = f"{'; '.join(reasons)}: not trustworthy; {idle}{option}, or {IN_TURNS}"
    elif spread.coefficient_of_variation is None:
        why = "one sample shows no scatter; take more (--num_samples 5)"
    unknown = spread.coefficient_of_variation is None and not crowded
    return Trust(spread, machine, load_average, None if unknown else why is None, why)


def _crowded(machine: MachineUse, threads: int) -> bool:
    """Whether others used more than what the run's own threads leave idle."""
    taken = (machine.other_cores or 0) + (machine.stolen_cores or 0)
    idle = max(0, machine.cores - threads)
    return taken > idle + MOST_TAKEN * machine.cores


def _others(machine: MachineUse) -> list[str]:
    said = []
    cores = counted(machine.cores, "core")
    if machine.other_cores is not None:
        said.append(f"other processes used {machine.other_cores:.1f} of {cores}")
    if machine.stolen_cores is not None and machine.stolen_cores >= 0.05:
        said.append(f"the hypervisor took {machine.stolen_cores:.1f} of {cores}")
    return said
