"""How many threads a run computes with: --threads, or as many cores as the process may use.

    chosen = choose(config.threads, cores(), os.environ)
    chosen.count           # for torch.set_num_threads
    chosen.recorded        # for the repro line: None where any machine would choose the same way

More threads than cores are slower than one: a parallel loop ends with its last thread, and that
one waits for a core that the others hold while they wait for it.
"""

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from errors import UsageError

ROOT = Path("/")
# Where control groups of version 2 and 1 are mounted, and version 1's controller of CPU time.
UNIFIED = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
LEGACY = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpuacct,cpu")


@dataclass(frozen=True)
class Threads:
    """A choice. `count`: None leaves torch's own; `cores`: None where the system does not say."""

    count: int | None
    cores: int | None
    recorded: int | None

    def warning(self) -> str | None:
        """One line where there are more threads than cores."""
        if self.count is None or self.cores is None or self.count <= self.cores:
            return None
        cores = f"{self.cores} core{'s' * (self.cores > 1)}"
        return f"{self.count} threads on {cores}: slower than {self.cores} (--threads {self.cores})"


def choose(asked: int | None, cores: int | None, variables: Mapping[str, str]) -> Threads:
    """The number that was asked for; without one OMP_NUM_THREADS, where set; without that `cores`.

    It is recorded where it was asked for, or where the environment makes it another than `cores`.
    Raises UsageError where more are asked for than OMP_THREAD_LIMIT allows.
    """
    limit = first_number(variables.get("OMP_THREAD_LIMIT", ""))
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


def first_number(text: str) -> int | None:
    """The first of OpenMP's list, as in "4,2"; None for what is not a positive number."""
    number = re.match(r"\s*([0-9]{1,6})\s*(,|$)", text)
    return (int(number[1]) or None) if number else None


def cores(root: Path = ROOT, allowed: Collection[int] | None = None) -> int | None:
    """Physical cores that this process may use; None where the system does not say.

    `allowed`: numbers of the CPUs in its affinity mask. CPUs that share a core count once; the CPU
    time that its control groups allow is rounded up to whole cores. At least 1.
    """
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return None
        allowed = os.sched_getaffinity(0)
    physical = len({_siblings(root, number) for number in allowed})
    quotas = [math.ceil(share) for share in _quotas(root)]
    return max(1, min([physical, *quotas]))


def _siblings(root: Path, number: int) -> str:
    """The CPUs that share a core with this one, as the kernel writes them: "0,4" or "0-1"."""
    path = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
    return _read(path) or str(number)


def _quotas(root: Path) -> Iterator[float]:
    """CPU seconds a second that each control group above this process allows."""
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
    """The folders of the group and of those around it. A container sees its own as the mount."""
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
