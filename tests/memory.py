"""What a piece of work allocates on the CPU, inside operators too."""

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def allocated(work: Callable[[], object], folder: Path) -> tuple[int, int]:
    """Bytes of the largest allocation, and of the most that is held at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    profiled.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]"]
    steps = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(steps), max(accumulate(steps))
