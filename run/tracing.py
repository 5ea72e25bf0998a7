"""What --profile and --memory_profile write: a whole file, or an error."""

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
    """Trace what `once` does into the files that are named; it is called once for each.

    On CUDA memory gets a snapshot, elsewhere a trace of its own. Raises LogError where a file
    cannot be written in full; one that was there before is then as it was.
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
    """The profiler writes beside the file first, and says nothing where a disk is full."""

    def write(file: Path) -> None:
        try:
            export(str(file))
            if not file.is_file() or not _is_whole(file):
                raise LogError(
                    f"{option} {path}: the trace could not be written in full; is the disk full?"
                )
        finally:
            file.with_name(f"{file.name}.tmp").unlink(missing_ok=True)  # the profiler's own

    files.replace(option, path, write)


def _is_whole(file: Path) -> bool:
    """Whether a trace has its last bracket; what is no JSON, whether it has anything."""
    with open(file, "rb") as opened:
        head = opened.read(1)
        opened.seek(max(0, os.path.getsize(file) - 16))
        return opened.read().rstrip().endswith(b"}") if head == b"{" else bool(head)
