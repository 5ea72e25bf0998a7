"""The environment of a run: set here for every command, and recorded by every run.

    environment.prepare()                     # first, before torch is imported
    environment.use_threads(config)           # after the options are read
    environment.in_force()                    # for the JSON, after the model is loaded

Variables that the user has set are not changed. torch is imported only where it is needed.
"""

import contextlib
import gc
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantbench import host
from quantbench.cli import TORCHRUN
from quantbench.errors import QuantbenchError, UsageError
from quantbench.log.config import RunConfig
from quantbench.progress import say
from quantbench.text import counted

# Variables that libraries read once, when they are loaded.
DEFAULTS: Mapping[str, str] = {
    # torch's CPU allocator asks for huge pages (2 MB): weights are read 7 % faster (docs/LOG.md).
    "THP_MEM_ALLOC_ENABLE": "1",
    # Milliseconds for which Intel's OpenMP lets threads spin after a parallel loop. Its default of
    # 200 ms would disturb the next arm's sample. GNU's OpenMP stops after a few.
    "KMP_BLOCKTIME": "5",
    # torch's profiler (kineto) prints a line to stderr when it starts and stops; 6 silences it.
    "KINETO_LOG_LEVEL": "6",
}
# Objects allocated between two garbage collections. Importing and tracing allocate objects that
# live long; with Python's default of 700, collections took 20 % of the start-up time.
GC_THRESHOLD = 100_000

# Variables that change a run's speed or the code that it runs. No others are recorded.
RECORDED_PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "MALLOC_")
RECORDED = {
    *DEFAULTS,
    *("TORCH_WARM_POOL", "QUANTBENCH_ISA", "CXX", "CXXFLAGS", "LD_PRELOAD", "GLIBC_TUNABLES"),
    "TRITON_INTERPRET",
}
LEAST_ADDRESSES = 1e9  # bytes: a process that has imported torch 2.13 without CUDA has 0.96 GB
STORE = "QUANTBENCH_RANK_STORE"  # where the ranks that parallel/launch.py started meet
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True)
class Environment:
    """The settings of this process that affect a run."""

    threads: int  # torch's threads within an op
    interop_threads: int  # torch's threads between ops
    cores: int | None  # physical cores that the process may use; None: not known
    gc_threshold: int  # objects allocated between two garbage collections
    system_huge_pages: str | None  # always, madvise or never; None: not known
    huge_page_bytes: int | None  # bytes of the process in huge pages; None: not known
    variables: dict[str, str]  # environment variables by name


def prepare() -> None:
    """Set the variables and the garbage collector for a run, before torch is imported. Raises
    FileNotFoundError where the current folder was removed, and QuantbenchError as `check_room`:
    else torch's libraries would say it in their own words."""
    os.getcwd()
    check_room()
    os.environ.update({**DEFAULTS, **os.environ})
    gc.set_threshold(GC_THRESHOLD)


def check_room() -> None:
    """Raise QuantbenchError where a limit of memory is too small to import torch."""
    import resource  # which Windows has not

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < LEAST_ADDRESSES:
        raise QuantbenchError(
            f"not enough memory to load torch: `ulimit -v` allows {limit / 1e9:.2g} GB; raise it "
            f"above {LEAST_ADDRESSES / 1e9:g} GB"
        )


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Python's garbage collector waits until the end of the block.

    A full collection takes 35 ms, ten times a short prompt. Where it falls depends on how many
    objects a process allocated before: it would hit the same sample of every process of an arm,
    so that two equal arms seem to differ.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Place:
    """A process among the ranks of a run."""

    rank: int
    size: int
    local_rank: int  # among those on this machine
    local_size: int


def place(variables: Mapping[str, str] | None = None) -> Place | None:
    """This process's place, from the variables (os.environ) of torchrun or parallel/launch.py; None
    if neither started it, or if it is the only rank. Job schedulers set RANK and WORLD_SIZE,
    too."""
    given = os.environ if variables is None else variables
    if not {STORE, TORCHRUN} & given.keys():
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = [given.get(name, "") for name in names]
    if not all(number.isdecimal() for number in numbers) or int(numbers[1]) < 2:
        return None
    return Place(*map(int, numbers))


def is_torchrun() -> bool:
    """Whether torchrun started this process, rather than launch.start."""
    return place() is not None and STORE not in os.environ


# ---------------------------------------------------------------------------------- threads


@dataclass(frozen=True)
class Threads:
    """How many threads a run computes with."""

    count: int | None  # for torch.set_num_threads; None: leave torch's default
    cores: int | None  # physical cores that the process may use; None: not known
    recorded: int | None  # the --threads of the repro command; None: leave it out

    def warning(self) -> str | None:
        """One line if there are more threads than cores, else None: a parallel loop ends with its
        last thread, which waits for a core while others occupy all of them by waiting for it."""
        if self.count is None or self.cores is None or self.count <= self.cores:
            return None
        cores = counted(self.cores, "core")
        return f"{self.count} threads on {cores}: slower than {self.cores} (--threads {self.cores})"


def choose_threads(
    asked: int | None, cores: int | None, variables: Mapping[str, str], ranks: int = 1
) -> Threads:
    """The number `asked` for; or else that of OMP_NUM_THREADS in `variables`; or else `cores`,
    divided among the `ranks` of a run on this machine.

    The repro command names it if the user asked for it, or if it differs from `cores`. Raises
    UsageError if the user asks for more than OMP_THREAD_LIMIT; otherwise that limit applies
    silently.
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
        f"{ranks} ranks on {counted(cores, 'core')} take turns and wait for one another at every "
        f"layer: slower than --tp {cores}"
    )


def first_number(text: str) -> int | None:
    """The first number of an OpenMP list such as "4,2"; None if it is not a positive number."""
    number = re.match(r"\s*([0-9]{1,6})\s*(,|$)", text)
    return (int(number[1]) or None) if number else None


def threads_of(config: RunConfig) -> Threads:
    """The threads that `config` asks for. Raises UsageError beyond OMP_THREAD_LIMIT."""
    variables, where = dict(os.environ), place()
    if is_torchrun() and variables.get("OMP_NUM_THREADS") == "1":
        del variables["OMP_NUM_THREADS"]  # torchrun sets that whatever cores there are
    ranks = where.local_size if where else 1
    return choose_threads(config.threads, host.cores(), variables, ranks)


def use_threads(config: RunConfig) -> None:
    """Set torch's threads as `config` asks; print a warning if they are more than the cores.

    Raises UsageError as `threads_of`."""
    import torch

    chosen = threads_of(config)
    if warning := chosen.warning():
        say(warning)
    if chosen.count is not None:
        torch.set_num_threads(chosen.count)
        if torch.get_num_interop_threads() != chosen.count:
            with contextlib.suppress(RuntimeError):  # allowed once a process: the first run's stay
                torch.set_num_interop_threads(chosen.count)


def in_force() -> Environment:
    """The settings of this process at this moment."""
    import torch

    named = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in RECORDED or name.startswith(RECORDED_PREFIXES)
    }
    return Environment(
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        cores=host.cores(),
        gc_threshold=gc.get_threshold()[0],
        system_huge_pages=system_huge_pages(),
        huge_page_bytes=huge_page_bytes(),
        variables=named,
    )


def system_huge_pages() -> str | None:
    """The kernel's setting, which is in brackets in its file: always, madvise or never."""
    return host.read(HUGE_PAGES).partition("[")[2].partition("]")[0] or None


def huge_page_bytes() -> int | None:
    """Bytes of this process's anonymous memory in transparent huge pages."""
    found = re.search(r"^AnonHugePages:\s*(\d+)", host.read("proc/self/smaps_rollup"), re.M)
    return int(found[1]) * 1024 if found else None
