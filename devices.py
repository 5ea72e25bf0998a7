"""What differs between cpu, cuda, xpu and mps: names, synchronization, and memory, in bytes."""

import contextlib
import ctypes
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from errors import UsageError

ACCELERATORS = ("cuda", "xpu", "mps")
STATUS, MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
CLEAR_REFERENCES = Path("/proc/self/clear_refs")
# A container's own control group, version 2 and then 1: its limit, its use, and the use by kind.
CONTROL_GROUP_FILES = (
    tuple(Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current", "stat")),
    tuple(
        Path("/sys/fs/cgroup/memory") / f"memory.{name}"
        for name in ("limit_in_bytes", "usage_in_bytes", "stat")
    ),
)


def resolve(name: str) -> torch.device:
    """The device called `name`; "auto" is the accelerator there is, or the CPU."""
    present = [kind for kind in ACCELERATORS if _module(kind).is_available()]
    if name == "auto":
        return torch.device(present[0] if present else "cpu")
    accepted = ", ".join(["auto", "cpu", *present])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name!r} is no device; here there are {accepted}") from None
    if device.type not in ("cpu", *ACCELERATORS):
        raise UsageError(f"--device {name!r} is not supported; here there are {accepted}")
    if device.type != "cpu" and device.type not in present:
        raise UsageError(f"--device {name}: torch finds no {device.type} here; use {accepted}")
    if (device.index or 0) >= (1 if device.type == "cpu" else _module(device.type).device_count()):
        raise UsageError(f"--device {name}: there is no device of that number here")
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if device.type != "cpu":
        _module(device.type).synchronize()


def reset_peak_memory(device: torch.device) -> None:
    """Start counting the peak anew. On Linux the kernel's own high-water mark is reset."""
    if device.type in ("cuda", "xpu"):
        _module(device.type).reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):  # peak_memory says that it was refused
            CLEAR_REFERENCES.write_text("5")  # 5: the peak resident set (man 5 proc)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes since the last reset, by kind; the first kind is the one the log reports.

    CUDA: reserved and allocated by torch. CPU: "resident", the resident set of the process;
    "resident_since_start" where the system does not let it be reset (macOS, some sandboxes): the
    peak since the process started, which is at least that since the last reset.
    """
    if device.type in ("cuda", "xpu"):
        module = _module(device.type)
        return {
            "reserved": module.max_memory_reserved(device),
            "allocated": module.max_memory_allocated(device),
        }
    if device.type == "mps":
        return {"reserved": torch.mps.driver_allocated_memory()}
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                kind = "resident" if _can_reset_peak() else "resident_since_start"
                return {kind: int(line.split()[1]) * 1024}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"resident_since_start": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def _can_reset_peak() -> bool:
    """Whether the kernel takes the reset: it refuses when the file is opened, if at all."""
    try:
        os.close(os.open(CLEAR_REFERENCES, os.O_WRONLY))
    except OSError:
        return False
    return True


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not say.

    Linux: the smaller of what the kernel calls available and what is left to the process's control
    group. CUDA and xpu: what the driver has free, and what torch has reserved and does not use.
    """
    if device.type in ("cuda", "xpu"):
        module = _module(device.type)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return module.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    limits = [_available_memory(), *(_left_to_group(*files) for files in CONTROL_GROUP_FILES)]
    return min((free for free in limits if free is not None), default=None)


def _available_memory() -> int | None:
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_to_group(limit: Path, used: Path, statistics: Path) -> int | None:
    """Bytes left to a control group; None where it has no limit ("max", or about 2**63).

    The page cache counts as used, but is evicted when memory is needed: a checkpoint that was just
    copied would otherwise seem to fill the group.
    """
    try:
        left = int(limit.read_text()) - int(used.read_text())
        kinds = dict(line.split() for line in statistics.read_text().splitlines())
    except (OSError, ValueError):
        return None
    for name in ("active_file", "inactive_file"):
        left += int(kinds.get(f"total_{name}", kinds.get(name, 0)))  # version 1: with its children
    return max(0, left)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor stores; for a tensor subclass, those of the tensors inside it."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def returning_memory() -> Iterator[None]:
    """Inside this context, freed CPU memory goes back to the system at once.

    glibc keeps freed blocks of up to 32 MB for reuse: quantizing a 1.1 B model layer by layer then
    peaks 1.1 GB higher (docs/LOG.md). Without glibc this does nothing.
    """
    M_MMAP_THRESHOLD = -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        if mallopt:
            mallopt(M_MMAP_THRESHOLD, 32 << 20)  # where glibc's own rule would have ended


def describe(device: torch.device) -> dict[str, str | int]:
    """The device's name, its driver's version where there is one, and torch's thread count."""
    if device.type == "cuda":
        return {"name": torch.cuda.get_device_name(device), "driver": _cuda_driver()}
    if device.type == "xpu":
        return {"name": torch.xpu.get_device_name(device)}
    return {"name": _processor(), "threads": torch.get_num_threads()}


def _module(kind: str):
    return getattr(torch, kind)


def _cuda_driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0] if version.exists() else "unknown"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
