"""A process that has imported torch and this package, and forks workers for process.py.

    Template(variables)         # of process.py starts it, with the descriptor of a socket

Importing takes four seconds of a core, which every process of every arm would spend anew. The
template runs no op and no thread of its own, so that a fork finds nothing half done. Each request
has the worker's folder, stdin, stdout and stderr, and a pipe that tells its number and how it ends.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import random
import select
import signal
import socket
import sys
from pathlib import Path

import numpy

PAD = 1 << 12  # pages, at most
PRESENT_IN_A_FILE = 0b101 << 61  # of an entry of /proc/self/pagemap
PR_SET_PDEATHSIG = 1
MADV_POPULATE_READ = 22  # Linux 5.14
Pages = list[tuple[int, int]]  # addresses and bytes


def serve(requests: socket.socket) -> None:
    """Fork a worker for each request, until there are no more."""
    gc.freeze()  # or collections in a fork would copy the pages of all these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    mapped = file_pages()
    while True:
        folder, given, _, _ = socket.recv_fds(requests, 1 << 16, 4)
        if not folder:
            return
        if os.fork() == 0:
            requests.close()
            _keep(mapped, folder, *given)
        for descriptor in given:
            os.close(descriptor)


def _keep(mapped: Pages, folder: bytes, stdin: int, stdout: int, stderr: int, ending: int) -> None:
    """Be the worker's parent until nobody asks how it ended: until then its number stays taken."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) == 0:
        os.close(ending)
        _work(mapped, folder, stdin, stdout, stderr)
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)
    os.write(ending, f"{pid}\n".encode())
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended  # without WNOHANG
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(BrokenPipeError):
        os.write(ending, f"{code}\n".encode())
        closed = select.poll()
        closed.register(ending, 0)
        closed.poll()
    os._exit(0)


def file_pages() -> Pages:
    """The pages of files that this process has mapped and read; none if a sandbox does not tell."""
    page, found = mmap.PAGESIZE, []
    with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb") as entries:
        for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
            between, rights, _, _, inode = line.split()[:5]
            begin, end = (int(address, 16) // page for address in between.split("-"))
            if inode == "0" or rights[0] != "r":
                continue
            entries.seek(8 * begin)
            flags = numpy.frombuffer(entries.read(8 * (end - begin)), numpy.uint64)
            there = (flags & PRESENT_IN_A_FILE) == PRESENT_IN_A_FILE
            edges = numpy.flatnonzero(numpy.diff(there, prepend=False, append=False))
            for first, last in edges.reshape(-1, 2):
                found.append(((begin + int(first)) * page, int(last - first) * page))
    return found


def _work(mapped: Pages, folder: bytes, *streams: int) -> None:
    """Be the worker, in a separate session. Like a new process it has random addresses, on which
    speed depends, and the files' pages, which count as its memory and which fork leaves out."""
    from quantbench.bench import worker

    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        random.seed()
        advise = ctypes.CDLL(None).madvise
        for address, size in mapped:
            advise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_READ)
        with mmap.mmap(-1, mmap.PAGESIZE * random.randint(1, PAD)):
            worker.serve(worker.Worker())
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


if __name__ == "__main__":
    from quantbench import environment

    environment.prepare()
    # What every worker imports sooner or later, and no more: it would count as its memory.
    from quantbench import generate  # noqa: F401
    from quantbench.bench import worker  # noqa: F401
    from quantbench.run import plan, saved_model, sizes, turns  # noqa: F401

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)  # which process.TEMPLATE set: serve() ends now
    serve(socket.socket(fileno=int(sys.argv[1])))
