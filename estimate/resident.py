"""The memory of a process on the CPU, as far as malloc decides it."""

KEPT = 64 << 20  # freed bytes that the heap keeps: M_TRIM_THRESHOLD in devices.returning_memory
KEPT_FROM = 512  # tokens of a pass whose layers allocate and free more than that


def kept_by_heap(tokens: int) -> int:
    """Bytes that the heap of a process keeps, of those that passes of so many tokens have freed.

    A layer of a 512-token pass frees more than KEPT; with fewer tokens it is as much less.
    """
    return KEPT * min(tokens, KEPT_FROM) // KEPT_FROM
