"""Reading several parts of files at once, past the page cache, without threads: Linux's native
asynchronous I/O (io_submit(2)).

    queue = opened()                                    # None if the system has none
    queue.submit([(ticket, file, address, nbytes, offset)])
    queue.finished(at_least=1)                          # [(ticket, bytes read or -errno)]

glibc has no functions for these system calls, so they are called by their numbers. Reads overlap
only in files that were opened with O_DIRECT.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
import weakref
from collections.abc import Sequence

READS = 128  # capacity of a queue
# io_setup, io_destroy, io_getevents, io_submit, by machine: asm/unistd_64.h, asm-generic/unistd.h.
NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
# linux/aio_abi.h, on machines that store the lowest byte first.
REQUEST = struct.Struct("<Q8xH2xIQQq16x")  # iocb: data, opcode, file, address, nbytes, offset
EVENT = struct.Struct("<QQqq")  # io_event: data, address of the iocb, result, second result
PREAD = 0  # IOCB_CMD_PREAD, an opcode
# The caller's number for the read, a descriptor, the address for the bytes, their number, and their
# start in the file; the last three are multiples of a page.
Read = tuple[int, int, int, int, int]


class Queue:
    """Reads that are under way. One thread at a time may use it."""

    def __init__(self, libc: ctypes.CDLL, numbers: Sequence[int]) -> None:
        """Raises OSError if the system does not allow it."""
        self.call = libc.syscall
        self.call.restype = ctypes.c_long
        setup, destroy, self.getevents, self.submission = map(ctypes.c_long, numbers)
        self.context = ctypes.c_ulong(0)
        if self.call(setup, ctypes.c_long(READS), ctypes.byref(self.context)) < 0:
            raise OSError(ctypes.get_errno(), "io_setup")
        self.requests = ctypes.create_string_buffer(REQUEST.size * READS)
        first = ctypes.addressof(self.requests)
        self.pointers = (ctypes.c_void_p * READS)(*(first + REQUEST.size * i for i in range(READS)))
        self.events = ctypes.create_string_buffer(EVENT.size * READS)
        self.ended = memoryview(self.events)
        weakref.finalize(self, self.call, destroy, self.context)  # waits for reads under way

    def submit(self, reads: Sequence[Read]) -> int:
        """Start to read. Returns how many of the reads, the first ones, the system has accepted."""
        reads = reads[:READS]
        for i, (ticket, *read) in enumerate(reads):
            REQUEST.pack_into(self.requests, REQUEST.size * i, ticket, PREAD, *read)
        done = 0
        while done < len(reads):
            remaining = ctypes.byref(self.pointers, done * ctypes.sizeof(ctypes.c_void_p))
            count = self.call(
                self.submission, self.context, ctypes.c_long(len(reads) - done), remaining
            )
            if count <= 0 and ctypes.get_errno() != errno.EINTR:
                break
            done += max(0, count)
        return done

    def finished(self, at_least: int) -> list[tuple[int, int]]:
        """(ticket, bytes read, or less than 0 an error's negative number) of reads that are over
        and were not reported yet; waits for this number of reads."""
        most, least = ctypes.c_long(READS), ctypes.c_long(at_least)
        while True:
            count = self.call(self.getevents, self.context, least, most, self.events, None)
            if count >= 0:
                events = EVENT.iter_unpack(self.ended[: count * EVENT.size])
                return [(ticket, result) for ticket, _, result, _ in events]
            if ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def opened() -> Queue | None:
    """A queue; None if the system has none, or allows no further one."""
    numbers = NUMBERS.get(platform.machine())
    if not sys.platform.startswith("linux") or numbers is None:
        return None
    try:
        return Queue(ctypes.CDLL(None, use_errno=True), numbers)
    except OSError:
        return None
