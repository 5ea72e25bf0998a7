"""A class per kind of device: memory in bytes, its peak, prompts' chunks, compile options, names.

devices.resolve("auto")                 # the first accelerator present, or the CPU
devices.free_memory(device)             # and so on: each asks the device's class in KINDS
"""

import contextlib
import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quantbench import host
from quantbench.errors import UsageError

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
STATUS = Path("/proc/self/status")
CLEAR_REFERENCES = Path("/proc/self/clear_refs")


class Device:
    """A kind of device. The methods are those of cuda and xpu, whose modules in torch are alike."""

    # Prompt tokens of a row per forward pass, and of all rows together: enough to keep the device
    # busy, and few enough that the activations take little memory. Float32 sums of an 8 B Llama's
    # widest layer take 115 KB a token.
    chunk, tokens = 2048, 8192
    least_chunk = 32
    compile_options: Mapping[str, Any] = {}  # of torch.compile, for a decoding step

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def module(self) -> Any:
        """Its module in torch, such as torch.cuda."""
        return getattr(torch, self.kind)

    def count(self) -> int:
        """Devices of this kind that are present."""
        return self.module.device_count() if self.module.is_available() else 0

    def synchronize(self) -> None:
        self.module.synchronize()

    def prefill_chunk(self, rows: int) -> int:
        return max(min(self.chunk, self.tokens // max(1, rows)), self.least_chunk)

    def free_memory(self, device: torch.device) -> int | None:
        unused = self.module.memory_reserved(device) - self.module.memory_allocated(device)
        return self.module.mem_get_info(device)[0] + unused

    def reset_peak_memory(self, device: torch.device) -> None:
        self.module.reset_peak_memory_stats(device)

    def peak_memory(self, device: torch.device) -> dict[str, int]:
        return {
            "reserved": self.module.max_memory_reserved(device),
            "allocated": self.module.max_memory_allocated(device),
        }

    def describe(self, device: torch.device) -> dict[str, str | int]:
        return {"name": self.module.get_device_name(device)}


class Cuda(Device):
    # CUDA graphs remove the cost of launching each kernel.
    compile_options = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}

    def describe(self, device: torch.device) -> dict[str, str | int]:
        driver = host.read(Path("/proc/driver/nvidia/version")).partition("\n")[0]
        return super().describe(device) | {"driver": driver or "unknown"}


class Mps(Device):
    chunk = 1024

    def free_memory(self, device: torch.device) -> int | None:
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()

    def reset_peak_memory(self, device: torch.device) -> None:
        """torch counts no peak for mps."""

    def peak_memory(self, device: torch.device) -> dict[str, int]:
        return {"reserved": torch.mps.driver_allocated_memory()}

    def describe(self, device: torch.device) -> dict[str, str | int]:
        return {"name": _processor(), "threads": torch.get_num_threads()}


class Cpu(Device):
    # The system would have to clear and hand out the memory of larger activations in every layer.
    # Those of a 1 B Llama take 40 MB.
    chunk = tokens = 512
    # Precompiling the header takes 9 s and saves less than 1 s for each of a step's few kernels.
    # Inductor's freezing and max-autotune are not used: they made steps 17 % faster, but took twice
    # the memory and eight times the compilation time (docs/LOG.md).
    compile_options = {"cpp_cache_precompile_headers": False}

    def count(self) -> int:
        return 1

    def synchronize(self) -> None:
        """A call returns when its work is done."""

    def free_memory(self, device: torch.device) -> int | None:
        return host.free_memory()

    def reset_peak_memory(self, device: torch.device) -> None:
        with contextlib.suppress(OSError):  # refused: peak_memory reports resident_since_start
            CLEAR_REFERENCES.write_text("5")  # 5 resets the peak resident set (man 5 proc)

    def peak_memory(self, device: torch.device) -> dict[str, int]:
        if peak := re.search(r"^VmHWM:\s*(\d+)", host.read(STATUS), re.M):
            kind = "resident" if can_reset_peak() else "resident_since_start"
            return {kind: int(peak[1]) * 1024}
        import resource  # here, because Windows has none: importing this module must not fail there

        unit = 1 if sys.platform == "darwin" else 1024
        return {"resident_since_start": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}

    def describe(self, device: torch.device) -> dict[str, str | int]:
        return {"name": _processor(), "threads": torch.get_num_threads()}


CPU = Cpu("cpu")
ACCELERATORS = {"cuda": Cuda("cuda"), "xpu": Device("xpu"), "mps": Mps("mps")}
KINDS: dict[str, Device] = {"cpu": CPU, **ACCELERATORS}


def resolve(name: str) -> torch.device:
    """The device called `name`; "auto" is the first accelerator present, or the CPU.

    Raises UsageError, with the names of the devices present, for any other.
    """
    present = [kind for kind, accelerator in ACCELERATORS.items() if accelerator.count()]
    if name == "auto":
        return torch.device(present[0] if present else "cpu")
    accepted = ", ".join(["auto", "cpu", *present])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name!r} is no device; here there are {accepted}") from None
    if device.type not in KINDS:
        raise UsageError(f"--device {name!r} is not supported; here there are {accepted}")
    count = KINDS[device.type].count()
    if not count:
        raise UsageError(f"--device {name}: torch finds no {device.type} here; use {accepted}")
    if (device.index or 0) >= count:
        raise UsageError(f"--device {name}: there is no device of that number here")
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was issued to it."""
    KINDS[device.type].synchronize()


def prefill_chunk(device: torch.device, rows: int) -> int:
    """Prompt tokens of each of `rows` rows per forward pass."""
    return KINDS[device.type].prefill_chunk(rows)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `peak_memory` reports. On Linux this resets the kernel's VmHWM."""
    KINDS[device.type].reset_peak_memory(device)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes since the last reset, by kind. The log reports the first kind.

    CUDA, xpu: "reserved" and "allocated" by torch. CPU: "resident", the resident set of the
    process. Where the system does not allow a reset (macOS, some sandboxes) it is
    "resident_since_start", the peak since the process started, which is never less.
    """
    return KINDS[device.type].peak_memory(device)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not report it.

    Linux: MemAvailable, or what is left of the control group's limit if that is less. CUDA and xpu:
    what the driver reports free, plus what torch has reserved and does not use.
    """
    return KINDS[device.type].free_memory(device)


def last_level_cache(device: torch.device, root: Path = CACHES) -> int | None:
    """Bytes of the largest cache that a core of the processor, or a card, has; None where the
    system does not tell."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for file in root.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = file.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]])
    return max(sizes, default=None) if device.type == "cpu" else None


def describe(device: torch.device) -> dict[str, str | int]:
    """The device's name, its driver's version where there is one, and torch's thread count."""
    return KINDS[device.type].describe(device)


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


def _processor() -> str:
    return host.cpuinfo("model name") or platform.processor() or platform.machine()
