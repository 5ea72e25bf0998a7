"""The pages of mapped files, such as torch's libraries, that count as a process's memory.

    touched = resident()        # in a process that has imported what it needs
    if os.fork() == 0:
        touch(touched)          # now they count as this process's memory, too

A fork inherits its parent's own pages, but of mapped files only what it touches itself: it would
seem to take a hundred megabytes less than a process that has imported the same.
"""

import ctypes
import os
from itertools import pairwise
from pathlib import Path

import numpy

Pages = list[tuple[int, int]]  # address and length of ranges, bytes

MADV_POPULATE_READ = 22  # of Linux 5.14 and later; unknown to Python 3.11
OF_A_FILE = 61  # a bit of an entry of /proc/self/pagemap; 63: the page is in memory


def resident() -> Pages:
    """Ranges of this process's pages of mapped files that are in memory, ascending.

    No thread is started for it, as torch's operations would: a process with threads must not fork.
    Raises OSError where the system does not tell.
    """
    size, found = os.sysconf("SC_PAGE_SIZE"), []
    with open("/proc/self/pagemap", "rb", buffering=0) as entries:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, _, _, inode, *_ = line.split()
            if inode == "0":
                continue
            start, end = (int(address, 16) // size for address in addresses.split("-"))
            entries.seek(8 * start)
            words = numpy.frombuffer(entries.read(8 * (end - start)), dtype=numpy.int64)
            here = (words < 0) & ((words >> OF_A_FILE) & 1).astype(bool)  # bit 63 is the sign
            edges = numpy.diff(here.astype(numpy.int8), prepend=0, append=0).nonzero()[0].tolist()
            pairs = list(pairwise(edges))[::2]
            found += [((start + first) * size, (last - first) * size) for first, last in pairs]
    return found


def touch(pages: Pages) -> None:
    """Map these pages into this process, which has the same mappings. OSError where it cannot."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for address, length in pages:
        if madvise(address, length, MADV_POPULATE_READ):
            raise OSError(ctypes.get_errno(), "madvise")


def resident_bytes() -> int:
    """Bytes of mapped files that count as this process's memory. Raises OSError."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssFile")
