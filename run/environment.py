"""The environment of a run: one place sets it for every command, and every run records it.

    environment.prepare()                     # first thing, before torch is imported
    config = environment.use_threads(config)  # once the options are read
    environment.in_force()                    # for the JSON, once the model is loaded

What the user has set stays as it is. Nothing here imports torch before it is needed.
"""

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchlog.config import RunConfig
from cli import say
from run import threads

# Variables that libraries read once, when they are loaded.
DEFAULTS: Mapping[str, str] = {
    # torch's CPU allocator asks for huge pages (2 MB): decoding reads 7 % faster (docs/LOG.md).
    "THP_MEM_ALLOC_ENABLE": "1",
    # Milliseconds for which Intel's OpenMP lets threads spin after a parallel loop. Its own 200 ms
    # would reach into the next arm's sample; GNU's OpenMP stops after a few.
    "KMP_BLOCKTIME": "5",
    # torch's profiler (kineto) prints a line on stderr when it starts and stops; 6 is silence.
    "KINETO_LOG_LEVEL": "6",
}
# The compiler's own: processes that compile Triton kernels take the cores from the C++ compiler.
CPU_COMPILER: Mapping[str, str] = {"TORCH_WARM_POOL": "0"}
# Objects allocated between two garbage collections. Importing and tracing keep what they allocate:
# with Python's 700, looking for garbage took a fifth of the start.
GC_THRESHOLD = 100_000

# What changes how fast a run is, or which code it runs. Nothing else of the user's is recorded.
RECORDED_PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "MALLOC_")
RECORDED = (
    *DEFAULTS,
    *CPU_COMPILER,
    *("QUANTBENCH_ISA", "CXX", "CXXFLAGS", "LD_PRELOAD", "GLIBC_TUNABLES", "TRITON_INTERPRET"),
)
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEMORY_MAP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class Environment:
    """What was in force in this process."""

    threads: int  # of torch, within an op
    interop_threads: int  # of torch, between ops
    cores: int | None  # that the process may use; None where the system does not say
    gc_threshold: int
    system_huge_pages: str | None  # always, madvise or never; None where there is no such setting
    huge_page_bytes: int | None  # that the process has in huge pages now; None: not known
    variables: dict[str, str]  # of the environment, by name


def defaults(given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that runs models: `given`, and what is missing there."""
    return {**DEFAULTS, **given}


def prepare() -> None:
    """Set this process up for a run, before torch is imported."""
    os.environ.update(defaults(os.environ))
    gc.set_threshold(GC_THRESHOLD)


def prepare_compiler(device_type: str) -> None:
    """Set up what is compiled for a device of this type; before the first compilation."""
    if device_type == "cpu":
        for name, value in CPU_COMPILER.items():
            os.environ.setdefault(name, value)


def use_threads(config: RunConfig) -> RunConfig:
    """Give torch the threads that `config` asks for; the config that repeats this elsewhere.

    Says so where there are more threads than cores. Raises UsageError where OMP_THREAD_LIMIT
    forbids as many.
    """
    import torch

    chosen = threads.choose(config.threads, threads.cores(), os.environ)
    if warning := chosen.warning():
        say(warning)
    if chosen.count is not None:
        torch.set_num_threads(chosen.count)
        if torch.get_num_interop_threads() != chosen.count:
            try:
                torch.set_num_interop_threads(chosen.count)
            except RuntimeError:
                pass  # only once a process: a second run in it keeps those of the first
    return replace(config, threads=chosen.recorded)


def in_force() -> Environment:
    """What this process runs under at this moment."""
    import torch

    named = {name: os.environ[name] for name in sorted(os.environ) if _is_recorded(name)}
    return Environment(
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        cores=threads.cores(),
        gc_threshold=gc.get_threshold()[0],
        system_huge_pages=system_huge_pages(),
        huge_page_bytes=huge_page_bytes(),
        variables=named,
    )


def system_huge_pages(path: Path = HUGE_PAGES) -> str | None:
    """The kernel's setting, in brackets in its file: always, madvise or never."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        return None


def huge_page_bytes(path: Path = MEMORY_MAP) -> int | None:
    """Bytes of this process's own memory that lie in transparent huge pages."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith("AnonHugePages:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _is_recorded(name: str) -> bool:
    return name in RECORDED or name.startswith(RECORDED_PREFIXES)
