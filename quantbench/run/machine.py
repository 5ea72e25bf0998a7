"""What used the processors while samples were taken, from the kernel's counters.

    before = Counters.read()
    …
    use = Counters.read().since(before)
    use.other_cores                     # 1.4: other processes kept 1.4 cores busy, on average

Linux counts CPU time in ticks of 10 ms, so the use of a sample that takes less is rough; `together`
adds up the samples of a run. Other systems have no /proc/stat: what they do not tell is None.
"""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantbench.text import counted

STAT, TASKS = Path("/proc/stat"), Path("/proc/self/task")
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

    def sentence(self) -> str:
        """Who used the cores, without a full stop."""
        said = []
        if self.other_cores is not None:
            said.append(f"other processes used {self.other_cores:.1f} of {_cores(self.cores)}")
        if self.stolen_cores is not None and self.stolen_cores >= 0.05:
            said.append(f"the hypervisor took {self.stolen_cores:.1f}")
        said.append(f"this one used {self.own_cores:.1f}")
        preempted = counted(self.involuntary_switches, "time")
        return f"{', '.join(said)} and was preempted {preempted}"


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
        own = self.own - before.own
        other = stolen = None
        if self.busy is not None and before.busy is not None:
            busy = self.busy - before.busy
            if busy > own / 2 - 2 * self.cores / TICKS_PER_SECOND:
                other = max(0.0, busy - own) / seconds
        if self.stolen is not None and before.stolen is not None and other is not None:
            stolen = max(0.0, self.stolen - before.stolen) / seconds
        switches = self.involuntary_switches - before.involuntary_switches
        return MachineUse(seconds, self.cores, own / seconds, other, stolen, switches)


def together(uses: Sequence[MachineUse]) -> MachineUse | None:
    """The use during several samples; None if there are none. What others used in less than
    SHORTEST is None."""
    if not uses:
        return None
    seconds = sum(use.seconds for use in uses)

    def mean(values: Sequence[float | None]) -> float | None:
        known = [(v, use.seconds) for v, use in zip(values, uses, strict=True) if v is not None]
        if len(known) < len(uses) or seconds < SHORTEST:
            return None
        return sum(v * s for v, s in known) / seconds

    return MachineUse(
        seconds=seconds,
        cores=uses[-1].cores,
        own_cores=sum(use.own_cores * use.seconds for use in uses) / seconds,
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
    if not hasattr(os, "sched_getaffinity"):
        return set()
    try:
        threads = [int(name) for name in os.listdir(TASKS)]
    except OSError:
        threads = [0]
    allowed: set[int] = set()
    for thread in threads:
        try:
            allowed |= os.sched_getaffinity(thread)
        except OSError:
            pass  # the thread has ended
    return allowed


def _ticks(cores: Collection[int], path: Path = STAT) -> tuple[float | None, float | None]:
    """Seconds of work and of steal on these cores since the system started."""
    busy = stolen = 0
    try:
        for line in path.read_text().splitlines():
            name, *_ = columns = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
                busy += sum(int(columns[i]) for i in BUSY)
                stolen += int(columns[STEAL])
    except (OSError, ValueError, IndexError):
        return None, None
    return busy / TICKS_PER_SECOND, stolen / TICKS_PER_SECOND


def _cores(count: int) -> str:
    return counted(count, "core")
