"""What used the processors while samples were taken, from the kernel's counters.

    before = Counters.read()
    …
    use = Counters.read().since(before)
    use.other_cores                     # 1.4: other processes kept 1.4 cores busy, on average

Linux counts CPU time in ticks of 10 ms, so the use of a sample that takes less is rough; `together`
adds up the samples of a run. Other systems have no /proc/stat: what they do not tell is None.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from quantbench import host
from quantbench.text import counted

# Columns of a cpu line in /proc/stat (man 5 proc): user, nice, system, irq and softirq are work.
BUSY, STEAL = (1, 2, 3, 6, 7), 8
SHORTEST = 0.1  # seconds of samples; in less, ticks tell nothing of other processes
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class MachineUse:
    """The use of the cores on which this process may run. Cores are logical ones: 0.5 cores for
    two seconds are one second of CPU time."""

    seconds: float  # of wall time
    cores: int  # that this process may use
    own_cores: float  # used by this process
    other_cores: float | None  # used by other processes and by the kernel; None: not known
    stolen_cores: float | None  # which the hypervisor gave to other virtual machines
    involuntary_switches: int  # times that a thread of this process was preempted

    def of_processes(self, own_cores: float) -> "MachineUse":
        """The same for several processes that together used `own_cores`, this one among them."""
        others = None
        if self.other_cores is not None:
            others = max(0.0, self.other_cores - (own_cores - self.own_cores))
        return replace(self, own_cores=own_cores, other_cores=others)

    def others(self) -> list[str]:
        """Who else used the cores, as far as that is known."""
        cores, others = counted(self.cores, "core"), []
        if self.other_cores is not None:
            others.append(f"other processes used {self.other_cores:.1f} of {cores}")
        if self.stolen_cores is not None and self.stolen_cores >= 0.05:
            others.append(f"the hypervisor took {self.stolen_cores:.1f} of {cores}")
        return others

    def sentence(self) -> str:
        """Who used the cores, without a full stop."""
        this_one = f"this process used {self.own_cores:.1f}"
        preempted = counted(self.involuntary_switches, "time")
        return f"{', '.join([*self.others(), this_one])} and was preempted {preempted}"


@dataclass(frozen=True)
class Counters:
    """The counters at one moment. Seconds are of CPU time, but for `clock`."""

    clock: float  # time.perf_counter()
    cores: int
    own: float
    busy: float | None  # of all processes on these cores; None: not known
    stolen: float | None
    involuntary_switches: int

    @staticmethod
    def read() -> "Counters":
        import resource  # here, because Windows has none

        allowed = _allowed()
        busy, stolen = _ticks(allowed)
        return Counters(
            clock=time.perf_counter(),
            cores=len(allowed) or os.cpu_count() or 1,
            own=time.process_time(),
            busy=busy,
            stolen=stolen,
            involuntary_switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
        )

    def since(self, before: "Counters") -> MachineUse:
        """The use between two moments. Some sandboxes count no work, not even this process's: then
        that of others is not known."""
        seconds = max(self.clock - before.clock, 1e-9)
        own_seconds = self.own - before.own
        others = stolen = None
        if self.busy is not None and before.busy is not None:
            busy = self.busy - before.busy
            if busy > own_seconds / 2 - 2 * self.cores / TICKS_PER_SECOND:
                others = max(0.0, busy - own_seconds) / seconds
        if self.stolen is not None and before.stolen is not None and others is not None:
            stolen = max(0.0, self.stolen - before.stolen) / seconds
        switches = self.involuntary_switches - before.involuntary_switches
        return MachineUse(seconds, self.cores, own_seconds / seconds, others, stolen, switches)


def together(uses: Sequence[MachineUse]) -> MachineUse | None:
    """The use during several samples; None if there are none. What others used in less than
    SHORTEST is None."""
    if not uses:
        return None
    weights = [use.seconds for use in uses]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        enough = len(known) == len(uses) and sum(weights) >= SHORTEST
        return statistics.fmean(known, weights) if enough else None

    return MachineUse(
        seconds=sum(weights),
        cores=uses[-1].cores,
        own_cores=statistics.fmean([use.own_cores for use in uses], weights),
        other_cores=mean([use.other_cores for use in uses]),
        stolen_cores=mean([use.stolen_cores for use in uses]),
        involuntary_switches=sum(use.involuntary_switches for use in uses),
    )


def load_average() -> float | None:
    """Threads that were running or waiting, on average over the last minute; None: not known."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def _allowed() -> set[int]:
    """The cores on which any thread of this process may run. OpenMP can bind each to one core."""
    if host.affinity() is None:
        return set()
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        threads = [0]
    allowed: set[int] = set()
    for thread in threads:
        with contextlib.suppress(OSError):  # the thread has ended
            allowed |= os.sched_getaffinity(thread)
    return allowed


def _ticks(cores: Collection[int]) -> tuple[float | None, float | None]:
    """Seconds of work and of steal on these cores since the system started."""
    busy = stolen = 0
    try:
        for line in (host.ROOT / "proc/stat").read_text().splitlines():
            name, *_ = columns = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
                busy += sum(int(columns[i]) for i in BUSY)
                stolen += int(columns[STEAL])
    except (OSError, ValueError, IndexError):
        return None, None
    return busy / TICKS_PER_SECOND, stolen / TICKS_PER_SECOND


# ---------------------------------------------------------------------------------- trust


MOST_SCATTER = 0.10  # coefficient of variation up to which the mean of the samples is trusted
# Cores that others may use beyond those that a run's threads leave idle, as a share of all cores.
MOST_TAKEN = 0.10
# `quantbench ab` runs baseline and candidates in turns, so that what slows both cancels out.
IN_TURNS = "compare with quantbench ab, which takes turns"


@dataclass(frozen=True)
class Spread:
    """How the tok/s of a run's samples differ."""

    samples: int
    least_tok_s: float
    most_tok_s: float
    coefficient_of_variation: float | None  # standard deviation ÷ mean; None for one sample

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
    variation = statistics.stdev(tok_s) / statistics.fmean(tok_s) if len(tok_s) > 1 else None
    spread = Spread(len(tok_s), min(tok_s), max(tok_s), variation)
    scatters = (variation or 0) > MOST_SCATTER
    is_crowded = machine is not None and crowded(machine, threads)
    if is_crowded or scatters:
        reasons = [f"samples scatter {spread.most_tok_s / spread.least_tok_s:.1f} ×"] * scatters
        advice = "on an idle machine" if is_crowded else "with longer samples (--max_new_tokens)"
        if machine and threads > machine.cores:  # they wait for each other, whoever else is there
            reasons += [f"{threads} threads share {counted(machine.cores, 'core')}"]
            advice = f"with --threads {machine.cores}"
        elif machine:
            reasons += machine.others()
        why = f"{'; '.join(reasons)}: not trustworthy; repeat it {advice}, or {IN_TURNS}"
        return Trust(spread, machine, load_average, False, why)
    if variation is None:
        why = "one sample shows no scatter; take more (--num_samples 5)"
        return Trust(spread, machine, load_average, None, why)
    return Trust(spread, machine, load_average, True, None)


def crowded(machine: MachineUse, threads: int) -> bool:
    """Whether others used more than what the run's own threads leave idle."""
    taken = (machine.other_cores or 0) + (machine.stolen_cores or 0)
    idle = max(0, machine.cores - threads)
    return taken > idle + MOST_TAKEN * machine.cores
