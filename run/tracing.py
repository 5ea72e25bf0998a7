"""Writing the traces of --profile and --memory_profile."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

import files
from errors import LogError


def trace(
    device: torch.device,
    profile: str | None,
    memory_profile: str | None,
    once: Callable[[], object],
    say: Callable[[str], None],
) -> None:
    """Call `once` for each file that is given, and write a trace of the call there.

    profile: for a trace of operations. memory_profile: for a memory snapshot on CUDA, elsewhere for
    a trace with allocations. say: prints a line. Raises LogError if a file cannot be written in
    full; an older file of that name then stays unchanged.
    """
    if memory_profile and device.type == "cuda":
        torch.cuda.memory._record_memory_history()
        once()
        _write("--memory_profile", memory_profile, torch.cuda.memory._dump_snapshot)
        torch.cuda.memory._record_memory_history(enabled=None)
        say(f"Wrote {memory_profile}; open it at https://docs.pytorch.org/memory_viz")
    traces = {"--profile": profile}
    if device.type != "cuda":
        traces["--memory_profile"] = memory_profile
    for option, path in traces.items():
        if path:
            with torch.profiler.profile(profile_memory=option == "--memory_profile") as events:
                once()
            _write(option, path, events.export_chrome_trace)
            say(f"Wrote {path}; open it in https://ui.perfetto.dev")


def _write(option: str, path: str, export: Callable[[str], object]) -> None:
    """Replace `path` by what `export` writes. Raises LogError if that is incomplete: on a full disk
    the profiler reports nothing."""

    def write(file: Path) -> None:
        try:
            export(str(file))
            if not file.is_file() or not _is_whole(file):
                raise LogError(
                    f"{option} {path}: the trace could not be written in full; is the disk full?"
                )
        finally:
            file.with_name(f"{file.name}.tmp").unlink(missing_ok=True)  # left by the profiler

    files.replace(option, path, write)


def _is_whole(file: Path) -> bool:
    """Whether a JSON file ends with its closing bracket; whether any other file is not empty."""
    with open(file, "rb") as opened:
        head = opened.read(1)
        opened.seek(max(0, os.path.getsize(file) - 16))
        return opened.read().rstrip().endswith(b"}") if head == b"{" else bool(head)
