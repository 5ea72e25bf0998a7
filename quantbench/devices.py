"""What differs between cpu, cuda, xpu and mps: names, synchronization, and memory, in bytes."""

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from quantbench.errors import UsageError

ACCELERATORS = ("cuda", "xpu", "mps")
STATUS, MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
# Prompt tokens per forward pass: enough to keep all cores busy, and few enough that the activations
# take little memory: 40 MB for a 1 B Llama on the CPU.
PREFILL_CHUNK = {"cpu": 512, "cuda": 2048, "xpu": 2048, "mps": 1024}
# On the CPU those of all rows together, but at least so many of each row: activations of many rows
# would be memory that the system has to clear and hand out in every layer.
LEAST_CHUNK = {"cpu": 32}
CLEAR_REFERENCES = Path("/proc/self/clear_refs")
# A control group's files, version 2 and then version 1: its limit, its usage, its usage by kind.
CONTROL_GROUP_FILES = (
    tuple(Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current", "stat")),
    tuple(
        Path("/sys/fs/cgroup/memory") / f"memory.{name}"
        for name in ("limit_in_bytes", "usage_in_bytes", "stat")
    ),
)


def resolve(name: str) -> torch.device:
    """The device called `name`; "auto" is the first accelerator present, or the CPU.

    Raises UsageError, with the names of the devices present, for any other.
    """
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
    """Wait until the device has finished all work that was issued to it."""
    if device.type != "cpu":
        _module(device.type).synchronize()


def prefill_chunk(device: torch.device, rows: int) -> int:
    """Prompt tokens of each of `rows` rows per forward pass."""
    at_once = PREFILL_CHUNK.get(device.type, 512)
    return max(at_once // max(1, rows), LEAST_CHUNK.get(device.type, at_once))


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `peak_memory` reports. On Linux this resets the kernel's VmHWM."""
    if device.type in ("cuda", "xpu"):
        _module(device.type).reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):  # refused: peak_memory reports resident_since_start
            CLEAR_REFERENCES.write_text("5")  # 5 resets the peak resident set (man 5 proc)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes since the last reset, by kind. The log reports the first kind.

    CUDA, xpu: "reserved" and "allocated" by torch. CPU: "resident", the resident set of the
    process. Where the system does not allow a reset (macOS, some sandboxes) it is
    "resident_since_start", the peak since the process started, which is never less.
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
    import resource  # here, because Windows has none: importing our modules must not fail there

    unit = 1 if sys.platform == "darwin" else 1024
    return {"resident_since_start": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def _can_reset_peak() -> bool:
    """Whether the kernel allows the reset. If not, opening the file fails."""
    try:
        os.close(os.open(CLEAR_REFERENCES, os.O_WRONLY))
    except OSError:
        return False
    return True


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not report it.

    Linux: MemAvailable, or what is left of the control group's limit if that is less. CUDA and xpu:
    what the driver reports free, plus what torch has reserved and does not use.
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
    """Bytes left of a control group's limit; None where it has none.

    The group's usage includes the page cache, which is evicted when memory is needed, so that is
    added back: otherwise a checkpoint that was just copied would seem to fill the group.
    """
    try:
        left = int(limit.read_text()) - int(used.read_text())
        kinds = dict(line.split() for line in statistics.read_text().splitlines())
    except (OSError, ValueError):
        return None
    for name in ("active_file", "inactive_file"):
        left += int(kinds.get(f"total_{name}", kinds.get(name, 0)))  # total_: version 1, recursive
    return max(0, left)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor stores; for a tensor subclass, those of the tensors inside it."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def returning_memory() -> Iterator[None]:
    """Inside this context, CPU memory of 2 MB or more is returned to the system when it is freed.

    Otherwise glibc keeps freed blocks of up to 32 MB for reuse, and quantizing a 1.1 B model layer
    by layer peaks 1.1 GB higher (docs/LOG.md). Smaller blocks are reused, as the temporaries of
    quantizing are: returned and mapped anew, each of their pages would cost a page fault every
    time. Without glibc this does nothing.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt = getattr(libc, "mallopt", None)
    if libc is None or mallopt is None:
        yield
        return
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
    mallopt(M_MMAP_THRESHOLD, 2 << 20)
    mallopt(M_TRIM_THRESHOLD, 32 << 20)  # free bytes that the heap may keep at its end
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc chooses by itself,
        mallopt(M_TRIM_THRESHOLD, 64 << 20)  # and what it chooses with it
        return_freed()


def return_freed() -> None:
    """Return to the system what malloc keeps of freed memory, as far as the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


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
