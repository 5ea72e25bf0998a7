"""Reading several parts of files at once, past the page cache, without threads: Linux's native
asynchronous I/O (io_submit(2)).

    queue = opened()                                    # None where the system has none
    queue.submit([Read(ticket, file, offset, address, nbytes)])
    queue.finished(at_least=1)                          # [(ticket, bytes read or -errno)]

glibc has no functions for these system calls, so they are called by their numbers. Reads overlap
only for files that were opened with O_DIRECT.
"""

import ctypes
import errno
import os
import platform
import sys
import weakref
from collections.abc import Sequence
from typing import NamedTuple

READS = 128  # that a queue holds
# io_setup, io_destroy, io_getevents, io_submit, by machine: asm/unistd_64.h, asm-generic/unistd.h.
NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
READ = 0  # IOCB_CMD_PREAD of linux/aio_abi.h, whose structures follow


class Read(NamedTuple):
    """Bytes of a file that are wanted at an address. All but the ticket are multiples of a page."""

    ticket: int  # by which the caller knows the read
    file: int  # descriptor
    offset: int
    address: int
    nbytes: int


class _Request(ctypes.Structure):
    """struct iocb, on machines that store the lowest byte first."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("file", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_file", ctypes.c_uint32),
    ]


class _Event(ctypes.Structure):
    """struct io_event."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    ]


class Queue:
    """Reads that are under way. One thread at a time may use it."""

    def __init__(self, libc: ctypes.CDLL, numbers: Sequence[int]) -> None:
        """Raises OSError where the system does not allow it."""
        self.call = libc.syscall
        self.call.restype = ctypes.c_long
        setup, destroy, self.getevents, self.submission = map(ctypes.c_long, numbers)
        context = ctypes.c_ulong(0)
        if self.call(setup, ctypes.c_long(READS), ctypes.byref(context)) < 0:
            raise OSError(ctypes.get_errno(), "io_setup")
        self.context = context
        self.requests = (_Request * READS)()
        self.pointers = (ctypes.c_void_p * READS)()
        for i in range(READS):
            self.pointers[i] = ctypes.addressof(self.requests[i])
        self.events = (_Event * READS)()
        # Waits for the reads under way.
        weakref.finalize(self, self.call, destroy, context)

    def submit(self, reads: Sequence[Read]) -> int:
        """Begin to read. Returns how many of the reads, the first ones, the system has accepted."""
        reads = reads[:READS]
        for request, read in zip(self.requests, reads, strict=False):
            request.data, request.opcode = read.ticket, READ
            request.file, request.offset = read.file, read.offset
            request.address, request.nbytes = read.address, read.nbytes
        done = 0
        while done < len(reads):
            left = ctypes.byref(self.pointers, done * ctypes.sizeof(ctypes.c_void_p))
            count = self.call(self.submission, self.context, ctypes.c_long(len(reads) - done), left)
            if count <= 0 and ctypes.get_errno() != errno.EINTR:
                break
            done += max(0, count)
        return done

    def finished(self, at_least: int) -> list[tuple[int, int]]:
        """(ticket, bytes read, or less than 0 an error's negative number) of reads that are over
        and were not reported yet; waits until there are so many."""
        most = ctypes.c_long(READS)
        while True:
            wanted = ctypes.c_long(at_least)
            count = self.call(self.getevents, self.context, wanted, most, self.events, None)
            if count >= 0:
                return [(event.data, event.result) for event in self.events[:count]]
            if ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def opened() -> Queue | None:
    """A queue; None where the system has none, or allows no more of them."""
    numbers = NUMBERS.get(platform.machine())
    if not sys.platform.startswith("linux") or numbers is None:
        return None
    try:
        return Queue(ctypes.CDLL(None, use_errno=True), numbers)
    except OSError:
        return None
