"""How many threads a run computes with: --threads, or as many cores as the process may use.

    chosen = choose(config.threads, cores(), os.environ)
    chosen.count           # for torch.set_num_threads
    chosen.recorded        # for the repro command: None if it need not say --threads

More threads than cores are slower than one thread. A parallel loop ends with its last thread, which
waits for a core while other threads occupy all cores by waiting for it.
"""

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quantbench.errors import UsageError

ROOT = Path("/")
# Mount points of control groups: version 2, and version 1's controller of CPU time.
UNIFIED = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
LEGACY = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpuacct,cpu")


@dataclass(frozen=True)
class Threads:
    """A choice of threads."""

    count: int | None  # None: leave torch's default
    cores: int | None  # physical cores that the process may use; None: not known
    recorded: int | None  # the --threads of the repro command; None: leave it out

    def warning(self) -> str | None:
        """One line if there are more threads than cores, else None."""
        if self.count is None or self.cores is None or self.count <= self.cores:
            return None
        cores = f"{self.cores} core{'s' * (self.cores > 1)}"
        return f"{self.count} threads on {cores}: slower than {self.cores} (--threads {self.cores})"


def choose(
    asked: int | None, cores: int | None, variables: Mapping[str, str], ranks: int = 1
) -> Threads:
    """The number `asked` for; or else that of OMP_NUM_THREADS in `variables`; or else `cores`,
    divided among the `ranks` of a run on this machine.

    It is recorded if it was asked for, or if it differs from `cores`. Raises UsageError if more are
    asked for than OMP_THREAD_LIMIT allows; without a request that limit is applied silently.
    """
    limit = first_number(variables.get("OMP_THREAD_LIMIT", ""))
    cores = max(1, cores // ranks) if cores else None
    if asked is not None:
        if limit and asked > limit:
            raise UsageError(
                f"--threads {asked} is more than OMP_THREAD_LIMIT={limit} allows; "
                f"take --threads {limit} or unset that variable"
            )
        return Threads(asked, cores, asked)
    count = first_number(variables.get("OMP_NUM_THREADS", "")) or cores
    if count and limit:
        count = min(count, limit)
    return Threads(count, cores, count if count != cores else None)


def crowded(ranks: int, cores: int | None) -> str | None:
    """One line if there are more ranks on this machine than cores, else None."""
    if cores is None or ranks <= cores:
        return None
    return (
        f"{ranks} ranks on {cores} core{'s' * (cores > 1)} take turns and wait for one another at "
        f"every layer: slower than --tp {cores}"
    )


def first_number(text: str) -> int | None:
    """The first number of an OpenMP list such as "4,2"; None if it is not a positive number."""
    number = re.match(r"\s*([0-9]{1,6})\s*(,|$)", text)
    return (int(number[1]) or None) if number else None


def cores(root: Path = ROOT, allowed: Collection[int] | None = None) -> int | None:
    """The number of physical cores that this process may use, at least 1; None if not known.

    allowed: the CPUs in its affinity mask, by number. CPUs that share a core count once. A control
    group's limit of CPU time is rounded up to whole cores.
    """
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return None
        allowed = os.sched_getaffinity(0)
    physical = len({_siblings(root, number) for number in allowed})
    quotas = [math.ceil(share) for share in _quotas(root)]
    return max(1, min([physical, *quotas]))


def _siblings(root: Path, number: int) -> str:
    """The CPUs that share a core with CPU `number`, as the kernel writes them: "0,4" or "0-1"."""
    path = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
    return _read(path) or str(number)


def _quotas(root: Path) -> Iterator[float]:
    """The CPU seconds per second that each control group of this process allows, if limited."""
    groups = _groups(_read(root / "proc/self/cgroup"))
    for mount in UNIFIED:
        for folder in _ancestors(root / mount, groups.get("", "/")):
            match _read(folder / "cpu.max").split():
                case [quota, period] if quota.isdigit() and period.isdigit() and int(period):
                    yield int(quota) / int(period)
    for mount in LEGACY:
        for folder in _ancestors(root / mount, groups.get("cpu", "/")):
            quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if quota.isdigit() and period.isdigit() and int(period):  # -1: no limit
                yield int(quota) / int(period)


def _groups(text: str) -> dict[str, str]:
    """The process's group by controller, from lines such as 4:cpu,cpuacct:/a/b and 0::/a/b."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "/")
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _ancestors(mount: Path, group: str) -> Iterator[Path]:
    """The folders of a group and of all groups that contain it, up to the mount point."""
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
