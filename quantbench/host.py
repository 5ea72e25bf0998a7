"""This machine as the files of Linux tell it: cores, memory, control groups, the processor.

    cores()                 # that this process may use
    free_memory()           # bytes that can still be allocated
    cpuinfo("model name")   # "AMD EPYC 7763 64-Core Processor"

Other systems have no such files: what they do not tell is None.
"""

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")  # in which the files are; another folder in tests
# Mount points of control groups: version 2, and a controller of version 1.
UNIFIED = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
LEGACY = {
    "cpu": ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpuacct,cpu"),
    "memory": ("sys/fs/cgroup/memory",),
}


def cores(allowed: Collection[int] | None = None, physical: bool = True) -> int | None:
    """The cores that this process may use; None where the system does not tell.

    allowed: the CPUs in its affinity mask, by number. physical: CPUs that share a core count once,
    and slow cores beside fast ones do not: a step ends with its slowest thread. A control group's
    limit of CPU time is rounded up to whole cores.
    """
    if allowed is None and (allowed := affinity()) is None:
        return None
    count = len({_siblings(number) for number in fast(allowed)} if physical else allowed)
    return max(1, min([count, *(math.ceil(share) for share in _quotas())]))


def affinity() -> Collection[int] | None:
    """The CPUs in this process's affinity mask, by number; None where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def free_memory() -> int | None:
    """Bytes that can still be allocated: MemAvailable, or what is left of a control group's limit
    if that is less."""
    lines = dict(line.split(":", 1) for line in read("proc/meminfo").splitlines() if ":" in line)
    left = [int(lines["MemAvailable"].split()[0]) * 1024] if "MemAvailable" in lines else []
    for folder, unified in _groups("memory"):
        names = ("max", "current") if unified else ("limit_in_bytes", "usage_in_bytes")
        limit, used = (read(folder / f"memory.{name}") for name in names)
        if limit.isdigit() and used.isdigit():
            evictable = _page_cache(read(folder / "memory.stat"))
            left.append(max(0, int(limit) - int(used) + evictable))
    return min(left, default=None)


def cpuinfo(key: str) -> str | None:
    """The first value of this key in /proc/cpuinfo."""
    for line in read("proc/cpuinfo").splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return value.strip()
    return None


def cpu_features() -> set[str]:
    """What /proc/cpuinfo says that the processor has; empty where it does not say it."""
    return set((cpuinfo("flags") or cpuinfo("Features") or "").split())


def read(path: Path | str) -> str:
    """The text of a file below ROOT without blanks at its ends; "" where it cannot be read."""
    try:
        return (ROOT / path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def fast(allowed: Collection[int]) -> Collection[int]:
    """Those of the CPUs that are of the fast kind, where there are several: Intel's performance
    cores, and ARM's with at least half of the largest capacity that the kernel gives one."""
    performance = {int(number) for number in _listed(read("sys/devices/cpu_core/cpus"))}
    if performance and read("sys/devices/cpu_atom/cpus"):
        return performance & {*allowed} or allowed
    files = {number: f"sys/devices/system/cpu/cpu{number}/cpu_capacity" for number in allowed}
    capacity = {number: int(read(file) or 0) for number, file in files.items()}
    return [number for number in allowed if 2 * capacity[number] >= max(capacity.values())]


def _listed(text: str) -> Iterator[int]:
    """The numbers of a list as the kernel writes it: "0-3,8"."""
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _siblings(number: int) -> str:
    """The CPUs that share a core with CPU `number`, as the kernel writes them: "0,4" or "0-1"."""
    listed = read(f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    return listed or str(number)


def _quotas() -> Iterator[float]:
    """The CPU seconds per second that each control group of this process allows, if limited."""
    for folder, unified in _groups("cpu"):
        if unified:
            given = read(folder / "cpu.max").split()
        else:
            given = [read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        match given:
            case [quota, period] if quota.isdigit() and period.isdigit() and int(period):
                yield int(quota) / int(period)  # without a limit it is "max" or -1


def _page_cache(statistics: str) -> int:
    """Bytes of files in a group's memory.stat. They count as used, and are evicted when memory is
    needed: otherwise a checkpoint that was just copied would seem to fill the group."""
    kinds = dict(line.split() for line in statistics.splitlines() if line.count(" ") == 1)
    names = ("active_file", "inactive_file")  # total_: version 1, recursive
    return sum(int(kinds.get(f"total_{name}", kinds.get(name, 0))) for name in names)


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's control groups and of all that contain them; whether they are
    of version 2."""
    groups: dict[str, str] = {}  # by controller, from lines such as 4:cpu,cpuacct:/a/b and 0::/a/b
    for line in read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "/")
        groups |= dict.fromkeys(controllers.split(","), path)
    for mounts, name in ((UNIFIED, ""), (LEGACY[controller], controller)):
        parts = [p for p in PurePosixPath(groups.get(name, "/")).parts if p not in ("/", "..")]
        for mount in mounts:
            for length in range(len(parts), -1, -1):
                yield (ROOT / mount).joinpath(*parts[:length]), not name
