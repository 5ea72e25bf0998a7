"""Writing the traces of --profile and --memory_profile."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from quantbench import files
from quantbench.errors import LogError
from quantbench.progress import say
from quantbench.run.plan import Plan
from quantbench.text import aligned

LISTED = 5  # operations in the table
WIDEST = 60  # characters of a name: those of CUDA kernels have hundreds


def trace(plan: Plan, once: Callable[[], object]) -> None:
    """Call `once` for each file that --profile and --memory_profile name, and write a trace of the
    call there: of operations; and a memory snapshot on CUDA, elsewhere a trace with allocations.

    Rank 0 alone traces; the others call `once` as often, because it waits for them. Raises LogError
    if a file cannot be written in full; an older file of that name then stays unchanged.
    """
    for option in ("profile", "memory_profile"):
        path, of_memory = getattr(plan.config, option), option == "memory_profile"
        if not path:
            continue
        if plan.ranks.rank:
            once()
        elif of_memory and plan.device.type == "cuda":
            torch.cuda.memory._record_memory_history()
            once()
            _write(option, path, torch.cuda.memory._dump_snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
            say(f"Wrote {path}; open it at https://docs.pytorch.org/memory_viz")
        else:
            with torch.profiler.profile(profile_memory=of_memory) as events:
                once()
            _write(option, path, events.export_chrome_trace)
            say(f"Wrote {path}; open it in https://ui.perfetto.dev")
            if not of_memory:
                say(longest_operations(events))


def longest_operations(events: torch.profiler.profile) -> str:
    """A table of the operations that took most of the traced sample, without what they called.

    Times are the device's: on an accelerator those of its kernels, else the CPU's.
    """
    averages = events.key_averages()
    on_device = any(event.self_device_time_total for event in averages)
    timed = [
        (event.self_device_time_total if on_device else event.self_cpu_time_total, event)
        for event in averages
    ]
    total = sum(microseconds for microseconds, _ in timed) or 1
    rows = [("operation", "calls", "time", "share")]
    for microseconds, event in sorted(timed, key=lambda pair: -pair[0])[:LISTED]:
        name = event.key if len(event.key) <= WIDEST else f"{event.key[: WIDEST - 1]}…"
        time = f"{microseconds / 1000:.2f} ms"
        rows.append((name, str(event.count), time, f"{microseconds / total:.0%}"))
    return aligned(rows, left={0})


def _write(option: str, path: str, export: Callable[[str], object]) -> None:
    """Replace `path` by what `export` writes. Raises LogError if that is incomplete: on a full disk
    the profiler reports nothing."""

    def write(file: Path) -> None:
        try:
            export(str(file))
            if not file.is_file() or not _is_whole(file):
                raise LogError(
                    f"--{option} {path}: the trace could not be written in full; is the disk full?"
                )
        finally:
            file.with_name(f"{file.name}.tmp").unlink(missing_ok=True)  # left by the profiler

    files.replace(f"--{option}", path, write)


def _is_whole(file: Path) -> bool:
    """Whether a JSON file ends with its closing bracket; whether any other file is not empty."""
    with open(file, "rb") as opened:
        head = opened.read(1)
        opened.seek(max(0, os.path.getsize(file) - 16))
        return opened.read().rstrip().endswith(b"}") if head == b"{" else bool(head)
