"""The memory of this process on the CPU, from the kernel's own account."""

from pathlib import Path

STATUS = Path("/proc/self/status")
KEPT = 64 << 20  # freed bytes that the heap keeps: M_TRIM_THRESHOLD in devices.returning_memory
KEPT_FROM = 512  # tokens of a pass whose layers allocate and free more than that


def base_bytes() -> int:
    """Bytes resident now; 0 where the system does not say."""
    if not STATUS.exists():
        return 0
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def kept_by_heap(tokens: int) -> int:
    """Bytes that the heap of a process keeps, of those that passes of so many tokens have freed.

    A layer of a 512-token pass frees more than KEPT; with fewer tokens it is as much less.
    """
    return KEPT * min(tokens, KEPT_FROM) // KEPT_FROM
