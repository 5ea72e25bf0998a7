"""What --profile and --memory_profile write."""

from collections.abc import Callable

import torch


def trace(
    device: torch.device,
    profile: str | None,
    memory_profile: str | None,
    once: Callable[[], object],
    say: Callable[[str], None],
) -> None:
    """Trace what `once` does into the files that are named; it is called once for each.

    On CUDA memory gets a snapshot, elsewhere a trace of its own.
    """
    if memory_profile and device.type == "cuda":
        torch.cuda.memory._record_memory_history()
        once()
        torch.cuda.memory._dump_snapshot(memory_profile)
        torch.cuda.memory._record_memory_history(enabled=None)
        say(f"Wrote {memory_profile}; open it at https://docs.pytorch.org/memory_viz")
    traces = {profile: False}
    if device.type != "cuda":
        traces[memory_profile] = True
    for path, with_memory in traces.items():
        if path:
            with torch.profiler.profile(profile_memory=with_memory) as events:
                once()
            events.export_chrome_trace(path)
            say(f"Wrote {path}; open it in https://ui.perfetto.dev")
