"""Devices: memory in bytes, its peak, prompts' chunks, compile options, names.

devices.resolve("auto")                 # the first accelerator present, or the CPU
devices.free_memory(device)
"""

import contextlib
import ctypes
import itertools
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantbench import host
from quantbench.errors import UsageError

CLEAR_REFERENCES = Path("/proc/self/clear_refs")
LEAST_CHUNK = 32  # prompt tokens of a row


@dataclass(frozen=True)
class DeviceKind:
    """How a kind of device is given work."""

    # Prompt tokens of a row per forward pass, and of all rows together: enough to keep the device
    # busy, and few enough that the activations take little memory. Float32 sums of an 8 B Llama's
    # widest layer take 115 KB a token.
    chunk: int = 2048
    tokens: int = 8192
    compile_options: Mapping[str, Any] = field(default_factory=dict)  # for a decoding step


# Accelerators in the order in which "auto" takes them.
KINDS = {
    # CUDA graphs remove the cost of launching each kernel.
    "cuda": DeviceKind(
        compile_options={"triton.cudagraphs": True, "coordinate_descent_tuning": True}
    ),
    "xpu": DeviceKind(),
    "mps": DeviceKind(chunk=1024),
    "cpu": DeviceKind(
        # The system would have to clear and hand out the memory of larger activations in every
        # layer. Those of a 1 B Llama take 40 MB.
        chunk=512,
        tokens=512,
        # Precompiling the header takes 9 s and saves less than 1 s for each of a step's few
        # kernels. Inductor's freezing and max-autotune are not used: they made steps 17 % faster,
        # but took twice the memory and eight times the compilation time (docs/LOG.md).
        compile_options={"cpp_cache_precompile_headers": False},
    ),
}


def _torch_of(kind: str) -> Any:
    """A kind's module in torch, such as torch.cuda. Those of cuda and xpu are alike."""
    return getattr(torch, kind)


def _count(kind: str) -> int:
    """Devices of this kind that are present."""
    return _torch_of(kind).device_count() if _torch_of(kind).is_available() else 0


def resolve(name: str) -> torch.device:
    """The device called `name`; "auto" is the first accelerator present, or the CPU.

    Raises UsageError, with the names of the devices present, for any other.
    """
    present = [kind for kind in KINDS if _count(kind)]
    if name == "auto":
        return torch.device(present[0])
    accepted = ", ".join(["auto", "cpu", *present[:-1]])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name!r} is no device; here there are {accepted}") from None
    if device.type not in KINDS:
        raise UsageError(f"--device {name!r} is not supported; here there are {accepted}")
    count = _count(device.type)
    if not count:
        raise UsageError(f"--device {name}: torch finds no {device.type} here; use {accepted}")
    if (device.index or 0) >= count:
        raise UsageError(f"--device {name}: the highest number here is {count - 1}; use {accepted}")
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was issued to it."""
    which = () if device.type == "mps" else (device,)
    _torch_of(device.type).synchronize(*which)


def moment(device: torch.device) -> Any:
    """This moment, for `seconds_between`. On CUDA work has only been launched when a call returns:
    there it is an event behind that work, to be read when the device is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(earlier: Any, later: Any) -> float:
    """Seconds from one `moment` of a device to another."""
    return later - earlier if isinstance(later, float) else earlier.elapsed_time(later) / 1e3


def intervals(moments: Sequence[Any]) -> list[float]:
    """Seconds from each `moment` of a device to the next, once the device is done."""
    return [seconds_between(*pair) for pair in itertools.pairwise(moments)]


class Stopwatch:
    """How long pieces of work take on a device. They need not be done when `stop` is called."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pairs: list[tuple[Any, Any]] = []

    def start(self) -> Any:
        return moment(self.device)

    def stop(self, started: Any) -> None:
        self.pairs.append((started, moment(self.device)))

    def seconds(self) -> float:
        """The sum over all pieces since the last call. Waits for the device."""
        if self.pairs:
            synchronize(self.device)
        pairs, self.pairs = self.pairs, []
        return sum(seconds_between(*pair) for pair in pairs)


def prefill_chunk(device: torch.device, rows: int) -> int:
    """Prompt tokens of each of `rows` rows per forward pass."""
    kind = KINDS[device.type]
    return max(min(kind.chunk, kind.tokens // max(1, rows)), LEAST_CHUNK)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `peak_memory` reports, which is then of what is in use: memory that an
    accelerator's allocator keeps of freed tensors is returned first. torch counts none for mps."""
    if device.type == "cpu":
        with contextlib.suppress(OSError):  # refused: peak_memory reports resident_since_start
            CLEAR_REFERENCES.write_bytes(b"5")  # 5 resets the peak resident set (man 5 proc)
    elif device.type != "mps":
        _torch_of(device.type).empty_cache()
        _torch_of(device.type).reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes since the last reset, by kind. The log reports the first kind.

    CUDA, xpu: "reserved" and "allocated" by torch. CPU: "resident", the resident set of the
    process. Where the system does not allow a reset (macOS, some sandboxes) it is
    "resident_since_start", the peak since the process started, which is never less.
    """
    if device.type == "mps":
        return {"reserved": torch.mps.driver_allocated_memory()}
    if device.type != "cpu":
        module = _torch_of(device.type)
        reserved, allocated = module.max_memory_reserved, module.max_memory_allocated
        return {"reserved": reserved(device), "allocated": allocated(device)}
    if peak := re.search(r"^VmHWM:\s*(\d+)", host.read("proc/self/status"), re.M):
        return {"resident" if can_reset_peak() else "resident_since_start": int(peak[1]) * 1024}
    import resource  # here, because Windows has none: importing this module must not fail there

    unit = 1 if sys.platform == "darwin" else 1024
    return {"resident_since_start": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not report it.

    Linux: MemAvailable, or what is left of the control group's limit if that is less. CUDA and xpu:
    what the driver reports free, plus what torch has reserved and does not use.
    """
    if device.type == "cpu":
        return host.free_memory()
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    module = _torch_of(device.type)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return module.mem_get_info(device)[0] + unused


def last_level_cache(device: torch.device) -> int | None:
    """Bytes of the largest cache that a core of the processor, or a card, has; None where the
    system does not tell."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    if device.type != "cpu":
        return None
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    texts = map(host.read, host.ROOT.glob("sys/devices/system/cpu/cpu0/cache/index*/size"))
    sizes = [re.fullmatch("([0-9]+)([KMG])", text) for text in texts]
    return max((int(size[1]) * units[size[2]] for size in sizes if size), default=None)


def describe(device: torch.device) -> dict[str, str | int]:
    """The device's name, its driver's version where there is one, and torch's thread count."""
    if device.type in ("cpu", "mps"):
        name = host.cpuinfo("model name") or platform.processor() or platform.machine()
        return {"name": name, "threads": torch.get_num_threads()}
    name = _torch_of(device.type).get_device_name(device)
    if device.type != "cuda":
        return {"name": name}
    driver = host.read("proc/driver/nvidia/version").partition("\n")[0]
    return {"name": name, "driver": driver or "unknown"}


def can_reset_peak() -> bool:
    """Whether the kernel allows the reset of the CPU's peak. If not, opening the file fails."""
    try:
        os.close(os.open(CLEAR_REFERENCES, os.O_WRONLY))
    except OSError:
        return False
    return True


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
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc chooses,
        mallopt(M_TRIM_THRESHOLD, 64 << 20)  # and what it chooses with it
        return_freed()


def return_freed() -> None:
    """Return to the system what malloc keeps of freed memory, as far as the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
